"""pytorch/pytorch#127071: the optimizer fields of pipeline stages do not overwrite each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import TrainingState
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


def stage(rank: int) -> tuple[torch.nn.Module, torch.optim.Adam]:
    name, lr = STAGES[rank]
    model = torch.nn.Module()
    setattr(model, name, torch.nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=lr / 10)
    getattr(model, name).sum().backward()
    optimizer.step()
    return model, optimizer


def train_and_save(url: str) -> None:
    model, optimizer = stage(dist.get_rank())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    cloudckpt.save({"train": TrainingState(model, optimizer, scheduler)}, url)


def resume_stage(url: str) -> tuple[Any, ...]:
    """The same stages, on swapped ranks: names count, not ranks."""
    model, optimizer = stage(1 - dist.get_rank())
    (group,) = optimizer.param_groups
    group["lr"] = group["weight_decay"] = 5.0
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    cloudckpt.load({"train": TrainingState(model, optimizer, scheduler)}, url)
    return group["lr"], group["weight_decay"], scheduler.base_lrs


def test_training_state_keeps_each_stage_apart(ranks: RankPool, tmp_path: Path):
    ranks.run(2, train_and_save, str(tmp_path / "c"))
    assert ranks.run(2, resume_stage, str(tmp_path / "c")) == [(0.2, 0.02, [0.2]), (0.1, 0.01, [0.1])]
    model = torch.nn.ParameterDict({"b": torch.zeros(2), "a": torch.zeros(2)})
    optimizer = torch.optim.Adam([{"params": [model["b"]]}, {"params": []}, {"params": [model["a"]]}], lr=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = TrainingState(model, optimizer, scheduler, rng=False)
    cloudckpt.load({"train": state}, tmp_path / "c", strict=False)
    fields = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert fields == [(0.2, 0.02), (7.0, 0), (0.1, 0.01)]
    assert scheduler.base_lrs == [0.2, 7.0, 0.1]
    assert {*optimizer.state} == {model["a"], model["b"]}
    assert all(torch.equal(model[name], stage(i)[0].get_parameter(name)) for i, (name, _) in enumerate(STAGES))


def test_one_group_cannot_have_two_rates(ranks: RankPool, tmp_path: Path):
    ranks.run(2, train_and_save, str(tmp_path / "c"))
    model = torch.nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=7.0)
    with pytest.raises(InvalidStateError, match="'a' and 'b' are in one group of the target's optimizer, but option"):
        cloudckpt.load({"train": TrainingState(model, optimizer)}, tmp_path / "c", strict=False)
    assert optimizer.param_groups[0]["lr"] == 7.0
    assert torch.equal(model["a"], torch.zeros(2))
