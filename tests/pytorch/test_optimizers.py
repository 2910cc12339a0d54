"""Optimizers as objects in a state, also ones that have not stepped yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cloudckpt
from cloudckpt.errors import MismatchError
from tests.ranks import RankPool


def make(kind: Any, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    return model, kind(model.parameters(), lr=0.1, **options)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_a_fresh_optimizer_goes_on_where_the_saved_one_stopped(kind: Any, options: Any, tmp_path: Path) -> None:
    model, optimizer = make(kind, **options)
    step(model, optimizer)
    cloudckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    again, fresh = make(kind, **options)
    cloudckpt.load({"model": again, "optimizer": fresh}, tmp_path / "c")
    assert [*fresh.state_dict()["state"]] == [*optimizer.state_dict()["state"]]
    for _ in range(2):
        step(model, optimizer)
        step(again, fresh)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_that_is_not_there_is_unexpected(tmp_path: Path) -> None:
    model, optimizer = make(torch.optim.AdamW)
    step(model, optimizer)
    cloudckpt.save({"optimizer": optimizer}, tmp_path / "c")
    small = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, 5))], lr=0.1)
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"optimizer": small}, tmp_path / "c")
    assert "optimizer.state.1.exp_avg" in caught.value.unexpected
    assert small.state_dict()["state"] == {}


def test_another_parameter_at_a_position_is_a_fault_of_shape(tmp_path: Path) -> None:
    model, optimizer = make(torch.optim.AdamW)
    step(model, optimizer)
    cloudckpt.save({"optimizer": optimizer}, tmp_path / "c")
    wider = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    fresh = torch.optim.AdamW(wider.parameters(), lr=0.1)
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"optimizer": fresh}, tmp_path / "c")
    found = caught.value.shapes
    assert {*found} == {f"optimizer.state.{i}.{name}" for i in range(3) for name in ("exp_avg", "exp_avg_sq")}
    assert found["optimizer.state.0.exp_avg"] == ((3, 5), (4, 5))
    assert fresh.state_dict()["state"] == {}


class TwoSided(torch.optim.SGD):
    """State of shapes of its own, one for each dim of a parameter."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            for i, extent in enumerate(param.shape):
                self.state[param][f"side_{i}"] = torch.eye(extent) * 2


def test_state_of_other_shapes_than_its_parameter_is_no_fault(tmp_path: Path) -> None:
    model, optimizer = make(TwoSided)
    step(model, optimizer)
    cloudckpt.save({"optimizer": optimizer}, tmp_path / "c")
    again, fresh = make(TwoSided)
    cloudckpt.load({"optimizer": fresh}, tmp_path / "c")
    assert torch.equal(fresh.state[again[0].weight]["side_1"], torch.eye(5) * 2)


def _fsdp(mesh_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = make(torch.optim.AdamW)
    fully_shard(model, mesh=init_device_mesh("cpu", (mesh_size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train_and_save(url: str) -> list[float]:
    model, optimizer = _fsdp(dist.get_world_size())
    step(model, optimizer)
    cloudckpt.save({"model": model, "optimizer": optimizer}, url)
    step(model, optimizer)
    return [x for p in model.parameters() for x in p.full_tensor().flatten().tolist()]  # type: ignore[attr-defined]


def _resume(url: str) -> list[float]:
    model, optimizer = _fsdp(dist.get_world_size())
    cloudckpt.load({"model": model, "optimizer": optimizer}, url)
    step(model, optimizer)
    return [x for p in model.parameters() for x in p.full_tensor().flatten().tolist()]  # type: ignore[attr-defined]


def test_fsdp2_resumes_on_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    expected = ranks.run(2, _train_and_save, url)[0]
    assert ranks.run(2, _resume, url)[0] == expected
    assert ranks.run(3, _resume, url)[0] == pytest.approx(expected)
