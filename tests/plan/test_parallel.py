"""Ranks and their coordinates; torch's init_device_mesh and Megatron's rank generator are the oracles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.plan.parallel import AXES, DENSE_AXES, ParallelConfig


def megatron_coordinates(order: str, sizes: dict[str, int], rank: int) -> dict[str, int]:
    """As parallel_state.RankGenerator counts: the first axis of the string is the fastest."""
    found = {}
    for axis in order.split("-"):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


@given(st.permutations(["tp", "cp", "ep", "dp"]), *(st.integers(1, 3) for _ in range(4)), st.integers(1, 2))
def test_megatron_orders(axes: list[str], tp: int, cp: int, dp: int, pp: int, ep: int) -> None:
    """With pp last, as Megatron demands where experts are divided in another way than the rest."""
    if (tp * cp * dp) % (ep * tp):
        return
    order = "-".join([*axes, "pp"])
    config = ParallelConfig(dp_shard=dp, tp=tp, cp=cp, pp=pp, ep=ep, order=order)
    edp = tp * cp * dp // (ep * tp)
    for rank in range(config.world_size):
        dense = megatron_coordinates(order, {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}, rank)
        expert = megatron_coordinates(order, {"tp": tp, "cp": 1, "ep": ep, "dp": edp, "pp": pp}, rank)
        found = config.coordinates(rank)
        assert [found[a] for a in ("tp", "cp", "dp_shard", "pp")] == [dense[a] for a in ("tp", "cp", "dp", "pp")]
        assert [found[a] for a in ("etp", "ep", "edp", "pp")] == [expert[a] for a in ("tp", "ep", "dp", "pp")]


@given(st.permutations(DENSE_AXES), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_orders_count_like_nested_loops(order: list[str], sizes: list[int]) -> None:
    config = ParallelConfig(**dict(zip(order, sizes, strict=True)), order=tuple(order))
    assert config.world_size == math.prod(sizes)
    for rank, index in enumerate(np.ndindex(*sizes)):
        assert [config.coordinates(rank)[axis] for axis in order] == list(index)


def test_experts_have_a_second_decomposition() -> None:
    """2 stages of 8 ranks: tp 2 x dp 4, and for experts etp 1 x ep 4 x edp 2."""
    config = ParallelConfig(dp_shard=4, tp=2, pp=2, ep=4, etp=1)
    assert [config.size(axis) for axis in AXES] == [2, 1, 4, 1, 2, 2, 4, 1]
    assert config.coordinates(13) == {
        "pp": 1, "dp_replicate": 0, "dp_shard": 2, "cp": 0, "tp": 1, "edp": 1, "ep": 1, "etp": 0,
    }  # fmt: skip
    for rank in range(8):
        assert config.coordinates(rank)["ep"] == rank % 4


def test_default_order_is_megatrons() -> None:
    config = ParallelConfig(dp_shard=4, tp=2, pp=2, cp=2, ep=4)
    assert config == ParallelConfig(dp_shard=4, tp=2, pp=2, cp=2, ep=4, order="tp-cp-ep-dp-pp")
    assert config.order == ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


def test_axes_of_one_rank_may_be_left_out() -> None:
    config = ParallelConfig(dp_shard=3, tp=2, pp=2, order="tp-pp-dp")
    assert [config.coordinates(7)[axis] for axis in ("tp", "pp", "dp_shard")] == [1, 1, 1]
    assert ParallelConfig(tp=2, order=("tp",)).coordinates(1)["tp"] == 1


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"tp": 0}, "axis tp must be a positive int, not 0"),
        ({"dp_shard": 2.0}, "axis dp_shard"),
        ({"pp": True}, "axis pp"),
        ({"ep": "2"}, "axis ep"),
        ({"etp": 0}, "axis etp"),
        ({"tp": 2, "ep": 3}, "the 2 ranks of a pipeline stage cannot be divided over ep=3 x etp=2"),
        ({"tp": 2, "etp": 4}, "ep=1 x etp=4"),
        ({"order": 5}, "order must be a tuple of axes or a string"),
        ({"order": ("tp", "fsdp")}, r"unknown axes \['fsdp'\]"),
        ({"order": "tp-cp-tp"}, "an axis twice"),
        ({"order": ("tp",), "pp": 2}, "lacks pp"),
        ({"order": "tp-dp", "cp": 2, "pp": 2}, "lacks pp, cp"),
    ],
)
def test_what_does_not_fit_together(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidStateError, match=fault):
        ParallelConfig(**arguments)


def test_there_are_no_other_ranks_and_axes() -> None:
    config = ParallelConfig(tp=2)
    for rank in (-1, 2):
        with pytest.raises(InvalidStateError, match=f"no rank {rank} among the 2"):
            config.coordinates(rank)
    with pytest.raises(InvalidStateError, match="no axis 'dp'"):
        config.size("dp")


def test_default_order_is_that_of_init_device_mesh() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = ParallelConfig(pp=2, dp_replicate=2, dp_shard=3, tp=2)
    for rank in range(config.world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
        try:
            mesh = init_device_mesh("cpu", (2, 2, 3, 1, 2), mesh_dim_names=DENSE_AXES)
            coordinate = mesh.get_coordinate()
        finally:
            dist.destroy_process_group()
        assert [config.coordinates(rank)[axis] for axis in DENSE_AXES] == list(coordinate or ())
