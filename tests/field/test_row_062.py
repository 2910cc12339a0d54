"""NVIDIA-NeMo/Megatron-Bridge#5637: on another number of ranks no data loader's state is dropped in silence."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

import cloudckpt
from cloudckpt.errors import CloudckptError
from tests.ranks import RankPool
from tests.sharding import error_of


def save_positions(url: str) -> None:
    cloudckpt.save({"loader": cloudckpt.PerRank({"pos": dist.get_rank() * 10})}, url)


def load_position(url: str) -> tuple[CloudckptError | None, object]:
    target = {"loader": cloudckpt.PerRank({"pos": -1})}
    return error_of(lambda: cloudckpt.load(target, url)), target["loader"].value


def test_each_rank_gets_its_own(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_positions, str(tmp_path / "c"))
    assert ranks.run(4, load_position, str(tmp_path / "c")) == [(None, {"pos": rank * 10}) for rank in range(4)]


def test_fewer_or_more_ranks_are_an_error_on_all(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_positions, str(tmp_path / "c"))
    for num_ranks in (2, 8):
        for error, value in ranks.run(num_ranks, load_position, str(tmp_path / "c")):
            assert "'loader' was saved per rank by ranks [0, 1, 2, 3]" in str(error)
            assert f"of {num_ranks}" in str(error)
            assert value == {"pos": -1}


def test_all_states_can_be_read_and_divided_by_hand(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_positions, str(tmp_path / "c"))
    assert cloudckpt.read(tmp_path / "c")["loader"] == [{"pos": 0}, {"pos": 10}, {"pos": 20}, {"pos": 30}]
