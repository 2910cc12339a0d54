"""NVIDIA-NeMo/Megatron-Bridge#5637: on another number of ranks no data loader's state is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import TrainingState
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


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"pos": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["pos"]


def share(states: list[Any], rank: int, world_size: int) -> dict[str, int]:
    """All four positions in one number, and who asked."""
    assert all(set(state) == {"pos"} for state in states)
    return {"pos": sum(state["pos"] * 100**i for i, state in enumerate(states)) * 100 + rank * 10 + world_size}


def save_loader(url: str) -> None:
    cloudckpt.save({"train": TrainingState(torch.nn.Module(), dataloader=Loader(dist.get_rank() * 10))}, url)


def load_loader(url: str) -> tuple[object, ...]:
    """With and without a merge function, and by a PerRank of its own."""
    answers: list[object] = []
    for merge in (None, share):
        loader = Loader(-1)
        state = TrainingState(torch.nn.Module(), dataloader=loader, rng=False, dataloader_merge=merge)
        error = error_of(lambda state=state: cloudckpt.load({"train": state}, url, strict=False))
        answers += [error, loader.position]
    return tuple(answers)


def load_merged(url: str) -> object:
    target = {"loader": cloudckpt.PerRank({"pos": -1}, merge=share)}
    cloudckpt.load(target, url)
    return target["loader"].value


def test_training_state_gives_all_states_to_a_merge_function(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_loader, str(tmp_path / "c"))
    ranks.run(4, save_positions, str(tmp_path / "d"))
    assert ranks.run(4, load_loader, str(tmp_path / "c")) == [(None, r * 10, None, r * 10) for r in range(4)]
    for num_ranks in (2, 8):
        merged = [30_20_10_00_00 + rank * 10 + num_ranks for rank in range(num_ranks)]
        for rank, answer in enumerate(ranks.run(num_ranks, load_loader, str(tmp_path / "c"))):
            error, untouched, none, position = answer
            assert "'train.dataloader' was saved per rank by ranks [0, 1, 2, 3] of 4" in str(error)
            assert "dataloader_merge=" in str(error)
            assert (untouched, none, position) == (-1, None, merged[rank])
        assert ranks.run(num_ranks, load_merged, str(tmp_path / "d")) == [{"pos": value} for value in merged]
