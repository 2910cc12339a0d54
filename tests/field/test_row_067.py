"""pytorch/pytorch#130810: parameters of one element, and of none of dims, keep their shapes under sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cloudckpt
from tests.ranks import RankPool
from tests.sharding import make_mesh


class Tiny(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.register_buffer("count", torch.tensor(value))
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, value)


def make(value: float, sharded: bool) -> dict[str, Any]:
    model = Tiny(value)
    if sharded:
        fully_shard(model, mesh=make_mesh((2,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_tiny(url: str) -> list[int]:
    state = make(3.0, sharded=True)
    cloudckpt.save(state, url)
    return [parameter.to_local().numel() for parameter in state["model"].parameters()]


def load_tiny(url: str, sharded: bool) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """By name, the whole shape and the values held here."""
    state = make(9.0, sharded)
    cloudckpt.load(state, url)
    model, optimizer = state["model"], state["optimizer"]
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {
        name: (tuple(t.shape), (t.to_local() if isinstance(t, DTensor) else t).reshape(-1).tolist())
        for name, t in tensors.items()
    }


def check(found: dict[str, tuple[tuple[int, ...], list[float]]], empty: bool) -> None:
    shapes = {name: shape for name, (shape, _) in found.items()}
    assert shapes["linear.weight"] == (1, 1)
    assert shapes["linear.bias"] == (1,)
    assert shapes["count"] == ()
    assert shapes["linear.weight.exp_avg"] == (1, 1)
    assert shapes["linear.weight.step"] == ()
    values = {name: value for name, (_, value) in found.items()}
    assert values["count"] == [3.0]
    assert values["linear.weight.step"] == values["linear.bias.step"] == [1.0]
    assert values["linear.weight"] == values["linear.bias"] == ([] if empty else [3.0])
    moments = torch.tensor(values["linear.weight.exp_avg"]), torch.tensor(values["linear.bias.exp_avg_sq"])
    expected = torch.tensor([] if empty else [0.3]), torch.tensor([] if empty else [0.009])
    torch.testing.assert_close(moments, expected)


def test_on_two_ranks_of_which_one_holds_nothing(ranks: RankPool, tmp_path: Path):
    assert ranks.run(2, save_tiny, str(tmp_path / "c")) == [[1, 1], [0, 0]]
    first, second = ranks.run(2, load_tiny, str(tmp_path / "c"), True)
    check(first, empty=False)
    check(second, empty=True)
    check(load_tiny(str(tmp_path / "c"), sharded=False), empty=False)
