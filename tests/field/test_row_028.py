"""pytorch/pytorch#127071: the optimizer fields of pipeline stages do not overwrite each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt.errors import InvalidStateError
from tests.ranks import RankPool
from tests.sharding import error_of

STAGES = [("a", 0.1), ("b", 0.2)]


def groups(rank: int) -> list[dict[str, Any]]:
    name, lr = STAGES[rank]
    return [{"lr": lr, "params": [name]}]


def save_lists(url: str) -> Exception | None:
    return error_of(lambda: cloudckpt.save({"param_groups": groups(dist.get_rank())}, url))


def test_lists_that_differ_are_refused(ranks: RankPool, tmp_path: Path):
    for error in ranks.run(2, save_lists, str(tmp_path / "c")):
        assert isinstance(error, InvalidStateError)
        assert "'param_groups.0.lr' differs between ranks 0 and [1]: 0.1 and 0.2" in str(error)


def save_per_rank(url: str) -> list[dict[str, Any]]:
    cloudckpt.save({"param_groups": cloudckpt.PerRank(groups(dist.get_rank()))}, url)
    target = {"param_groups": cloudckpt.PerRank()}
    cloudckpt.load(target, url)
    return target["param_groups"].value


def test_marked_per_rank_every_stage_keeps_its_own(ranks: RankPool, tmp_path: Path):
    assert ranks.run(2, save_per_rank, str(tmp_path / "c")) == [groups(0), groups(1)]
    assert cloudckpt.read(tmp_path / "c")["param_groups"] == [groups(0), groups(1)]


def save_by_name(url: str) -> None:
    rank = dist.get_rank()
    name, lr = STAGES[rank]
    cloudckpt.save({"state": {name: torch.full((2,), lr)}, "param_groups": {name: {"lr": lr}}}, url)


def test_keys_of_their_own_are_united(ranks: RankPool, tmp_path: Path):
    ranks.run(2, save_by_name, str(tmp_path / "c"))
    target = {
        "state": {name: torch.zeros(2) for name, _ in STAGES},
        "param_groups": {name: {"lr": 0.0} for name, _ in STAGES},
    }
    report = cloudckpt.load(target, tmp_path / "c")
    assert target["param_groups"] == {"a": {"lr": 0.1}, "b": {"lr": 0.2}}
    assert torch.equal(target["state"]["a"], torch.full((2,), 0.1))
    assert torch.equal(target["state"]["b"], torch.full((2,), 0.2))
    assert (report.missing, report.unexpected) == ([], [])
