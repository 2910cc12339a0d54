"""pytorch/pytorch#150862: empty shards must not displace the real one at their offset, nor hold anybody up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt.format.box import Box
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.shard import DimShard, PieceTable, TensorSpec, dim_runs
from cloudckpt.plan.writes import plan_save
from tests.ranks import RankPool
from tests.sharding import make_mesh, shard

SHAPES = [(10,), (3,), (0, 3), (1, 4), (16,), (9, 0)]
SIZES = {(10,): [2, 2, 2, 2, 2, 0, 0, 0], (3,): [1, 1, 1, 0, 0, 0, 0, 0], (0, 3): [0] * 8, (16,): [2] * 8}


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def save_all(url: str) -> dict[tuple[int, ...], int]:
    mesh = make_mesh((8,))
    state = {str(shape): shard(numbered(shape), mesh, [Shard(0)]) for shape in SHAPES}
    cloudckpt.save(state, url)
    return {shape: state[str(shape)].to_local().shape[0] for shape in SHAPES}


def load_all(url: str, num_ranks: int) -> dict[tuple[int, ...], torch.Tensor]:
    mesh = make_mesh((num_ranks,))
    target = {str(shape): shard(numbered(shape) - 1, mesh, [Shard(0)]) for shape in SHAPES}
    cloudckpt.load(target, url)
    return {shape: target[str(shape)].to_local() for shape in SHAPES}


def test_eight_ranks_of_which_some_hold_nothing(ranks: RankPool, tmp_path: Path):
    held = ranks.run(8, save_all, str(tmp_path / "c"))
    for shape, sizes in SIZES.items():
        assert [rank[shape] for rank in held] == sizes
    found = cloudckpt.read(tmp_path / "c")
    for shape in SHAPES:
        assert torch.equal(found[str(shape)], numbered(shape))
    parts = ranks.run(3, load_all, str(tmp_path / "c"), 3)
    assert [len(part[(10,)]) for part in parts] == [4, 4, 2]
    for shape in SHAPES:
        assert torch.equal(torch.cat([part[shape] for part in parts]), numbered(shape))


def save_one(url: str) -> None:
    cloudckpt.save({"w": shard(numbered((10,)), make_mesh((8,)), [Shard(0)])}, url)


def test_ranks_with_nothing_do_not_write(ranks: RankPool, tmp_path: Path):
    ranks.run(8, save_one, str(tmp_path / "c"))
    with cloudckpt.open_checkpoint(tmp_path / "c") as checkpoint:
        assert [entry.rank for entry in checkpoint.manifest.objects] == [0, 1, 2, 3, 4]
        assert checkpoint.manifest.grids[0].box(4) == Box((8,), (2,))


@pytest.mark.parametrize(("extent", "num_ranks"), [(512, 30), (10, 8), (3, 8), (0, 8), (1, 30), (29, 30)])
def test_plans_for_many_ranks(extent: int, num_ranks: int):
    runs = [dim_runs(extent, [DimShard(num_ranks, rank)]) for rank in range(num_ranks)]
    parts = torch.arange(extent).chunk(num_ranks)
    sizes = [len(part) for part in parts] + [0] * (num_ranks - len(parts))
    assert [sum(stop - start for start, stop in run) for run in runs] == sizes
    tables = [PieceTable.build((0, Box((a,), (b - a,))) for a, b in run) for run in runs]
    plan = plan_save([TensorSpec("w", (extent,), 4)], tables, chunk_bytes=64)
    grid = plan.grids[0]
    assert sum(grid.box(chunk).num_elements for chunk in range(grid.num_chunks)) == extent
    written = [sum(grid.box(int(c)).num_elements for c in plan.chunks_of(rank)) for rank in range(num_ranks)]
    assert written == sizes
    columns = torch.arange(grid.num_chunks).numpy()
    stored = StoredChunks(plan.grids, plan.first_chunks, columns * 0, columns * 68, columns * 0 + 68, [4])
    loads = plan_load(stored, tables, read_bytes=2**20)
    for rank in range(num_ranks):
        assert loads.rank(rank).parts.chunk.tolist() == plan.chunks_of(rank).tolist()
