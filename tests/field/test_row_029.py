"""pytorch/pytorch#192202: the state of a parameter that was frozen later comes back; none is invented for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import cloudckpt
from cloudckpt import TrainingState


class Model(torch.nn.Module):
    """``d`` is frozen from the start, ``c`` gets no gradient."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, Parameter(torch.full((3,), value), requires_grad=name != "d"))


def job(value: float, lr: float) -> tuple[Model, torch.optim.Adam]:
    model = Model(value)
    return model, torch.optim.Adam(model.parameters(), lr=lr)


def step(model: Model, optimizer: torch.optim.Optimizer, names: str) -> None:
    optimizer.zero_grad()
    sum((getattr(model, name) ** 2).sum() for name in names).backward()
    optimizer.step()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, Model, torch.optim.Adam]:
    model, optimizer = job(1.0, 0.1)
    step(model, optimizer, "ab")
    model.b.requires_grad_(False)
    cloudckpt.save({"train": TrainingState(model, optimizer)}, tmp_path / "c")
    return str(tmp_path / "c"), model, optimizer


def entry(optimizer: torch.optim.Optimizer, parameter: Any) -> dict[str, Any]:
    return dict(optimizer.state[parameter]) if parameter in optimizer.state else {}


def test_what_is_stored(saved):
    state = cloudckpt.read(saved[0])["train"]["optimizer"]
    assert {name: {*entry} for name, entry in state["state"].items()} == {
        name: {"step", "exp_avg", "exp_avg_sq"} for name in "ab"
    }
    assert {*state["param_groups"]} == {*"abcd"}


@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "stepped"])
def test_frozen_then_unfrozen(saved, has_stepped: bool):
    url, model, optimizer = saved
    again, target = job(5.0, 0.9)
    if has_stepped:
        step(again, target, "a")  # b has no state of its own yet, a's is complete
    again.b.requires_grad_(False)
    report = cloudckpt.load({"train": TrainingState(again, target)}, url)
    assert (report.missing, report.unexpected) == ([], [])
    for name in "ab":
        expected, got = entry(optimizer, getattr(model, name)), entry(target, getattr(again, name))
        assert {*expected} == {*got}
        assert all(torch.equal(expected[k], got[k]) for k in expected)
    assert not entry(target, again.c)
    assert not entry(target, again.d)
    assert not again.b.requires_grad
    for m, o in ((model, optimizer), (again, target)):
        m.b.requires_grad_(True)
        step(m, o, "abc")
    for name in "abcd":
        assert torch.equal(getattr(model, name), getattr(again, name)), name
    assert torch.equal(target.state[again.b]["step"], torch.tensor(2.0))
    assert torch.equal(target.state[again.c]["step"], torch.tensor(1.0))


def test_a_partly_filled_entry_is_completed(saved):
    url, model, optimizer = saved
    again, target = job(5.0, 0.9)
    target.state[again.a] = {"exp_avg": torch.zeros(3)}
    cloudckpt.load({"train": TrainingState(again, target)}, url)
    assert torch.equal(target.state[again.a]["exp_avg_sq"], optimizer.state[model.a]["exp_avg_sq"])
    assert torch.equal(target.state[again.a]["exp_avg"], optimizer.state[model.a]["exp_avg"])
