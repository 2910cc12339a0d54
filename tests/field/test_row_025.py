"""pytorch/pytorch#161368: offsets of dims that two mesh axes cut unevenly, as FSDP2 with tensor parallelism does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import cloudckpt
from tests.ranks import RankPool
from tests.sharding import blank, make_mesh, same_bits, shard

EXTENTS = (5, 7, 9, 17)
SEVEN = torch.arange(7.0)
FIVE = torch.arange(5.0)
STRIDED = (_StridedShard(0, split_factor=2), Shard(0))
TWICE = (Shard(0), Shard(0))

Layout = tuple[tuple[int, ...], tuple[int, ...] | None, Sequence[Placement]]
"""Mesh shape, ranks of the mesh in C order (None: 0, 1, ...), placements."""


def save_rows(full: torch.Tensor, layout: Layout, url: str) -> list[float]:
    shape, order, placements = layout
    held = shard(full, make_mesh(shape, order), placements)
    cloudckpt.save({"w": held}, url)
    return held.to_local().tolist()


def loads_right(full: torch.Tensor, layout: Layout, url: str) -> bool:
    shape, order, placements = layout
    mesh = make_mesh(shape, order)
    target = blank(full, mesh, placements)
    cloudckpt.load({"w": target}, url)
    return same_bits(target.to_local(), shard(full, mesh, placements).to_local())


def written_rows(url: Path) -> dict[int, list[tuple[int, int]]]:
    """By rank, the offset and size of every chunk that it wrote."""
    with cloudckpt.open_checkpoint(url) as checkpoint:
        manifest = checkpoint.manifest
        found: dict[int, list[tuple[int, int]]] = {}
        for chunk in range(manifest.document.chunks.count):
            box = manifest.grids[0].box(chunk)
            rank = manifest.objects[int(manifest.columns.object[chunk])].rank
            found.setdefault(rank, []).append((box.offset[0], box.shape[0]))
    return found


CASES = [
    pytest.param(SEVEN, (2, 2), STRIDED, [[0, 1], [4, 5], [2, 3], [6]], id="7-strided"),
    pytest.param(FIVE, (2, 4), TWICE, [[0], [1], [2], [], [3], [4], [], []], id="5-twice"),
]


@pytest.mark.parametrize(("full", "mesh", "placements", "rows"), CASES)
def test_offsets_are_those_of_the_rows_held(
    ranks: RankPool, tmp_path: Path, full: torch.Tensor, mesh: tuple[int, ...], placements: Any, rows: list[list[int]]
):
    url = tmp_path / "c"
    held = ranks.run(len(rows), save_rows, full, (mesh, None, placements), str(url))
    assert held == rows
    assert written_rows(url) == {rank: [(own[0], len(own))] for rank, own in enumerate(rows) if own}
    for num_ranks, layout in [
        (1, ((1,), None, (Shard(0),))),
        (3, ((3,), None, (Shard(0),))),
        (4, ((2, 2), (0, 2, 1, 3), STRIDED)),
        (4, ((2, 2), (0, 2, 1, 3), TWICE)),
        (4, ((4,), None, (Shard(0),))),
    ]:
        assert all(ranks.run(num_ranks, loads_right, full, layout, str(url)))
    assert torch.equal(cloudckpt.read(url)["w"], full)


class Block(torch.nn.Module):
    """Two linear layers whose odd number of rows or columns no mesh divides."""

    def __init__(self, extent: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(extent)
        self.up = torch.nn.Linear(3, extent)
        self.down = torch.nn.Linear(extent, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def train(model: torch.nn.Module) -> torch.optim.Optimizer:
    """A step of AdamW on gradients that every layout knows."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def whole_state() -> dict[str, Any]:
    models = {str(extent): Block(extent) for extent in EXTENTS}
    return {name: {"model": model, "optimizer": train(model)} for name, model in models.items()}


def parallel_state(mesh_shape: tuple[int, int], transposed: bool) -> dict[str, Any]:
    """The same, sharded by tensor parallelism and then by FSDP2."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("tp", "dp") if transposed else ("dp", "tp"))
    state = {}
    for extent in EXTENTS:
        model = Block(extent)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        state[str(extent)] = {"model": model, "optimizer": train(model)}
    return state


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All that is sharded, by path."""
    found = {}
    for extent, held in state.items():
        for name, parameter in held["model"].named_parameters():
            found[f"{extent}.{name}"] = parameter.detach()
            kept = held["optimizer"].state[parameter]
            found |= {f"{extent}.{name}.{key}": kept[key] for key in ("exp_avg", "exp_avg_sq")}
    return found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_models(mesh_shape: tuple[int, int], url: str) -> list[str]:
    state = parallel_state(mesh_shape, transposed=False)
    cloudckpt.save(state, url)
    weight = state["5"]["model"].up.weight
    assert isinstance(weight, DTensor)
    return [type(placement).__name__ for placement in weight.placements]


def wrong_after_load(mesh_shape: tuple[int, int] | None, transposed: bool, url: str) -> list[str]:
    """Which tensors of models that were spoilt do not get back exactly what they had."""
    target = whole_state() if mesh_shape is None else parallel_state(mesh_shape, transposed)
    held = tensors_of(target)
    expected = {path: local_part(tensor).clone() for path, tensor in held.items()}
    with torch.no_grad():
        for tensor in held.values():
            local_part(tensor).fill_(-1.0)
    cloudckpt.load(target, url)
    return [path for path, tensor in held.items() if not same_bits(local_part(tensor), expected[path])]


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 2), (2, 4)], ids=str)
def test_fsdp2_on_top_of_tensor_parallelism(ranks: RankPool, tmp_path: Path, mesh_shape: tuple[int, int]):
    url = str(tmp_path / "c")
    kinds = ranks.run(mesh_shape[0] * mesh_shape[1], save_models, mesh_shape, url)
    assert kinds[0] == ["_StridedShard", "Shard"]
    assert wrong_after_load(None, False, url) == []
    assert ranks.run(3, wrong_after_load, (3, 1), False, url) == [[]] * 3
    assert ranks.run(4, wrong_after_load, (2, 2), True, url) == [[]] * 4
    assert ranks.run(4, wrong_after_load, (2, 2), False, url) == [[]] * 4
