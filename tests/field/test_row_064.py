"""huggingface/accelerate#3971: state by name is not looked up by number, nor the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import TrainingState
from cloudckpt.errors import MismatchError


def job(order: str) -> tuple[torch.nn.Module, torch.optim.Adam]:
    """Parameters of one shape, so that a mix-up would go unnoticed."""
    model = torch.nn.Module()
    for i, name in enumerate("abc"):
        setattr(model, name, torch.nn.Parameter(torch.full((2,), float(i))))
    return model, torch.optim.Adam([getattr(model, name) for name in order], lr=0.1)


def stepped(order: str = "abc") -> tuple[torch.nn.Module, torch.optim.Adam]:
    model, optimizer = job(order)
    for i, name in enumerate("abc"):
        getattr(model, name).grad = torch.full((2,), float(i + 1))
    optimizer.step()
    return model, optimizer


def by_name(optimizer: torch.optim.Adam, order: str) -> dict[str, Any]:
    state = optimizer.state_dict()
    return {
        "state": {order[number]: entry for number, entry in state["state"].items()},
        "param_groups": [{**group, "params": [order[i] for i in group["params"]]} for group in state["param_groups"]],
    }


@pytest.mark.parametrize("grouped", [False, True], ids=["one-group", "three-groups"])
def test_mapped_by_name_in_another_order_and_grouping(tmp_path: Path, grouped: bool):
    model, optimizer = stepped()
    cloudckpt.save(TrainingState(model, optimizer), tmp_path / "c")
    again, _ = job("abc")
    params = [again.c, again.a, again.b]
    target = torch.optim.Adam([{"params": [p]} for p in params] if grouped else params, lr=9.0)
    cloudckpt.load(TrainingState(again, target), tmp_path / "c")
    for name in "abc":
        for key, value in optimizer.state[getattr(model, name)].items():
            assert torch.equal(target.state[getattr(again, name)][key], value)
    assert {group["lr"] for group in target.param_groups} == {0.1}
    assert [*target.state_dict()["state"]] == [0, 1, 2]


def test_by_name_into_a_dict_by_number(tmp_path: Path):
    _, optimizer = stepped()
    cloudckpt.save({"optimizer": by_name(optimizer, "abc")}, tmp_path / "c")
    _, target = stepped("cab")
    before = target.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"optimizer": target.state_dict()}, tmp_path / "c")
    assert caught.value.kinds == {
        "optimizer": (
            "keyed by name, with param_groups as a list (get_optimizer_state_dict())",
            "keyed by number (optimizer.state_dict())",
        )
    }
    assert (caught.value.missing, caught.value.unexpected) == ([], [])
    assert torch.equal(target.state_dict()["state"][0]["exp_avg"], before)


@pytest.mark.parametrize("strict", [True, False])
def test_the_conventions_are_named(tmp_path: Path, strict: bool):
    model, optimizer = stepped()
    cloudckpt.save({"optimizer": optimizer.state_dict()}, tmp_path / "number")
    cloudckpt.save({"optimizer": by_name(optimizer, "abc")}, tmp_path / "name")
    cloudckpt.save(TrainingState(model, optimizer, rng=False), tmp_path / "training")
    again, target = job("cab")

    def kinds(state: Any, name: str) -> dict[str, tuple[str, str]]:
        with pytest.raises(MismatchError) as caught:
            cloudckpt.load(state, tmp_path / name, strict=strict)
        assert not [key for key in caught.value.unexpected if key.startswith("optimizer")]
        return caught.value.kinds

    train = TrainingState(again, target, rng=False)
    own = "keyed by parameter name (TrainingState)"
    assert kinds(train, "number") == {"optimizer": ("keyed by number (optimizer.state_dict())", own)}
    assert kinds(train, "name")["optimizer"][0] == (
        "keyed by name, with param_groups as a list (get_optimizer_state_dict())"
    )
    assert kinds({"model": again, "optimizer": target}, "training") == {
        "optimizer": (own, "keyed by number (optimizer.state_dict())")
    }
    for optimizer in (target, stepped("cab")[1]):
        by_number = {"optimizer": optimizer.state_dict()}
        assert kinds(by_number, "training") == {"optimizer": (own, "keyed by number (optimizer.state_dict())")}
    names = {"optimizer": by_name(stepped()[1], "abc")}
    assert kinds(names, "number")["optimizer"][0] == "keyed by number (optimizer.state_dict())"
    assert target.state_dict()["state"] == {}


def test_int_keys_stay_int(tmp_path: Path):
    _, optimizer = stepped()
    cloudckpt.save({"optimizer": optimizer.state_dict()}, tmp_path / "c")
    assert [*cloudckpt.read(tmp_path / "c")["optimizer"]["state"]] == [0, 1, 2]
