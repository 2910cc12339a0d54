"""pytorch/pytorch#133923: a new version of the library or the model has other keys; old checkpoints stop loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.errors import MismatchError
from cloudckpt.plan import migrations


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_registered", {})


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"train": cloudckpt.TrainingState(model, optimizer)}


class Attention(torch.nn.Module):
    """As it was: two projections of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(4, 8, bias=False)
        self.k = torch.nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x)], dim=-1)


class FusedAttention(torch.nn.Module):
    """As it is: one projection of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_proj = torch.nn.Linear(4, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qk_proj(x)


def fuse() -> list[Any]:
    """Weights and optimizer state; the new parameter has the step and the options of the first."""
    tensors = [
        cloudckpt.Concatenate((f"{{p:*}}.q.weight{tail}", f"{{p:*}}.k.weight{tail}"), f"{{p}}.qk_proj.weight{tail}")
        for tail in ("", ".exp_avg", ".exp_avg_sq")
    ]
    return [*tensors, ("{p:*}.q.weight.{option:*}", "{p}.qk_proj.weight.{option}")]


def test_a_model_and_its_optimizer_under_the_keys_of_a_new_version(tmp_path: Path):
    torch.manual_seed(0)
    old = Attention()
    optimizer = torch.optim.Adam(old.parameters(), lr=0.5)
    cloudckpt.save(trained(old, optimizer), tmp_path / "c", model_version="1")

    cloudckpt.migration("1", "2")(fuse)
    new = FusedAttention()
    fresh = torch.optim.Adam(new.parameters(), lr=0.1)
    report = cloudckpt.load(
        {"train": cloudckpt.TrainingState(new, fresh)}, tmp_path / "c", model_version="2", strict=False
    )
    assert report.migrated == ["1", "2"]
    assert torch.equal(new.qk_proj.weight, torch.cat([old.q.weight, old.k.weight]))
    moments = [optimizer.state[p]["exp_avg"] for p in old.parameters()]
    state = fresh.state[new.qk_proj.weight]
    assert torch.equal(state["exp_avg"], torch.cat(moments))
    assert (state["step"].item(), fresh.param_groups[0]["lr"]) == (1, 0.5)
    assert report.missing == []
    assert all(".k.weight." in key for key in report.unexpected)


def test_without_a_migration_it_says_what_is_there_and_what_is_wanted(tmp_path: Path):
    cloudckpt.save({"w": torch.zeros(3)}, tmp_path / "c", model_version="2024-06")
    target = {"w": torch.ones(3)}
    with pytest.raises(MismatchError, match="c holds model version '2024-06', and version '2026-01' is asked for"):
        cloudckpt.load(target, tmp_path / "c", model_version="2026-01")
    assert target["w"].tolist() == [1, 1, 1]


def test_a_new_field_of_the_optimizer_keeps_its_default(tmp_path: Path):
    """The group gains an option, and the state of each parameter a tensor."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    cloudckpt.save(trained(model, optimizer), tmp_path / "c")

    newer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    trained(model, newer)
    newer.param_groups[0]["nesterov"] = True
    marks = {p: torch.full_like(p, 7.0) for p in model.parameters()}
    for p, mark in marks.items():
        newer.state[p]["max_exp_avg_sq"] = mark.clone()
    target = {"train": cloudckpt.TrainingState(model, newer)}
    with pytest.raises(MismatchError, match="max_exp_avg_sq"):
        cloudckpt.load(target, tmp_path / "c")
    report = cloudckpt.load(target, tmp_path / "c", strict=False)
    assert any("max_exp_avg_sq" in key for key in report.missing)
    assert (newer.param_groups[0]["lr"], newer.param_groups[0]["nesterov"]) == (0.5, True)
    for p, mark in marks.items():
        assert torch.equal(newer.state[p]["max_exp_avg_sq"], mark)
        assert torch.equal(newer.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
