"""pytorch/torchtitan#474: all model parts of a rank reach the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import TrainingState, global_layer_names, merge_parts
from cloudckpt.errors import InvalidStateError
from tests.ranks import RankPool
from tests.sharding import error_of


def part(layer: int) -> torch.nn.Module:
    """As torchtitan keeps them: a dict of layers under their global numbers."""
    linear = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(linear.weight, float(layer))
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({str(layer): linear})})


def local_part(layer: int) -> torch.nn.Module:
    """As Megatron keeps them: every part numbers its layers from 0."""
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": part(layer)["layers"][str(layer)]})})


def save_parts(root: str) -> None:
    rank = dist.get_rank()
    layers = (rank, rank + 2)  # rank 0 owns layers 0, 2, rank 1 owns 1, 3
    parts = [part(layer) for layer in layers]
    optimizers = [
        torch.optim.Adam(p.parameters(), lr=0.1 * (layer + 1)) for p, layer in zip(parts, layers, strict=True)
    ]
    for model, optimizer in zip(parts, optimizers, strict=True):
        model["layers"][str(next(iter(model["layers"])))].weight.sum().backward()
        optimizer.step()
    cloudckpt.save(TrainingState(parts, optimizers), f"{root}/global")
    names = [global_layer_names(4, pp=2, vpp=2, stage=rank, chunk=chunk) for chunk in range(2)]
    cloudckpt.save(TrainingState([local_part(layer) for layer in layers], names=names), f"{root}/local")
    merged = merge_parts(*(name.apply(local_part(la).state_dict()) for name, la in zip(names, layers, strict=True)))
    cloudckpt.save({"model": merged}, f"{root}/dicts")


def save_clash(root: str) -> Exception | None:
    return error_of(lambda: cloudckpt.save(TrainingState([local_part(0), local_part(2)]), f"{root}/clash"))


def test_all_layers_are_there(ranks: RankPool, tmp_path: Path):
    ranks.run(2, save_parts, str(tmp_path))
    keys = [f"layers.{i}.weight" for i in range(4)]
    for name in ("global", "local", "dicts"):
        model = cloudckpt.read(tmp_path / name)["model"]
        assert sorted(model) == keys, name
        if name != "global":
            assert [model[key][0, 0].item() for key in keys] == [0.0, 1.0, 2.0, 3.0]
    optimizer = cloudckpt.read(tmp_path / "global")["optimizer"]
    assert sorted(optimizer["state"]) == keys
    assert {key: group["lr"] for key, group in optimizer["param_groups"].items()} == {
        key: pytest.approx(0.1 * (i + 1)) for i, key in enumerate(keys)
    }


def test_a_key_of_two_parts_is_an_error(ranks: RankPool, tmp_path: Path):
    for error in ranks.run(2, save_clash, str(tmp_path)):
        assert isinstance(error, InvalidStateError)
        assert "'layers.0.weight' is in model part 0 and in model part 1" in str(error)
    with pytest.raises(InvalidStateError, match="'w' is in model part 0 and in model part 2"):
        merge_parts({"w": 1}, {"v": 2}, {"w": 3})
