"""From any layout to any other: random tensors on random meshes, saved, loaded elsewhere, compared bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cloudckpt
from cloudckpt.plan.shard import DimShard, dim_runs, nested_runs
from tests.ranks import RankPool
from tests.sharding import blank, error_of, make_mesh, noise, other_bits, same_bits, shard

Meshes = dict[tuple[int, ...], DeviceMesh]

NUM_RANKS = 8
MESHES = [(1,), (2,), (3,), (4,), (5,), (8,), (2, 2), (3, 2), (2, 4), (4, 2), (1, 3), (2, 2, 2), (2, 1, 3)]
EXTENTS = [0, 1, 1, 2, 3, 4, 5, 7, 8, 12, 13, 17]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint16,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float4_e2m1fn_x2,
]


@dataclass(frozen=True)
class Layout:
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Case:
    """One tensor. A layout of None is a plain tensor."""

    seed: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    saved: Layout | None
    loaded: Layout | None

    def full(self) -> torch.Tensor:
        return noise(self.shape, self.dtype, self.seed)


@dataclass(frozen=True)
class Job:
    """One checkpoint: who saves it, who loads it, and how."""

    cases: tuple[Case, ...]
    num_saving: int
    num_loading: int
    layout: str
    compression: str | None
    config: cloudckpt.Config


def random_job(seed: int) -> Job:
    rng = random.Random(seed)
    num_saving, num_loading = rng.choice([1, 2, 3, 4, 6, 8, 8]), rng.choice([1, 2, 3, 4, 6, 8, 8])
    cases = tuple(random_case(rng, 1000 * seed + i, num_saving, num_loading) for i in range(10))
    config = cloudckpt.Config(
        chunk_bytes=rng.choice([64, 64, 200, 4096]),
        pack_bytes=rng.choice([500, 2**20]),
        check_replicas=rng.choice(["plain", "all"]),
    )
    compression = rng.choice([None, "zstd"])
    return Job(cases, num_saving, num_loading, rng.choice(["packed", "packed", "zarr"]), compression, config)


def random_case(rng: random.Random, seed: int, num_saving: int, num_loading: int) -> Case:
    shape = tuple(rng.choice(EXTENTS) for _ in range(rng.randrange(5)))
    saved, loaded = random_layout(rng, shape, num_saving), random_layout(rng, shape, num_loading)
    return Case(seed, shape, rng.choice(DTYPES), saved, loaded)


def random_layout(rng: random.Random, shape: tuple[int, ...], most: int) -> Layout | None:
    if rng.random() < 0.15:
        return None
    while True:
        mesh = rng.choice([m for m in MESHES if torch.Size(m).numel() <= most])
        placements = tuple(random_placement(rng, len(shape)) for _ in mesh)
        if not is_ambiguous(shape, mesh, placements):
            return Layout(mesh, placements)


def random_placement(rng: random.Random, dims: int) -> Placement:
    kind = rng.random()
    if dims == 0 or kind < 0.25:
        return Replicate()
    # Mostly on the first dims, so that several axes meet on one.
    dim = min(rng.randrange(dims), rng.randrange(dims))
    return _StridedShard(dim, split_factor=rng.choice([2, 2, 3, 4])) if kind < 0.5 else Shard(dim)


def is_ambiguous(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Placement]) -> bool:
    """Whether the local sizes leave open in which of two orders a dim was cut; save() and load() refuse that."""
    for dim, extent in enumerate(shape):
        axes = [(mesh[axis], p) for axis, p in enumerate(placements) if not p.is_replicate() and p.dim == dim]
        for place in range(torch.Size([size for size, _ in axes]).numel()):
            shards, rest = [], place
            for size, placement in axes:
                rest, coordinate = divmod(rest, size)
                shards.append(DimShard(size, coordinate, getattr(placement, "split_factor", 1)))
            one, other = dim_runs(extent, shards), nested_runs(extent, shards)
            if other is not None and one != other and sum(b - a for a, b in one) == sum(b - a for a, b in other):
                return True
    return False


def run_jobs(seeds: Sequence[int], folder: str) -> list[str]:
    """On every rank: what came back wrong, in words."""
    meshes = {shape: make_mesh(shape) for shape in MESHES}
    groups = {count: dist.new_group(range(count)) for count in range(1, NUM_RANKS + 1)}
    wrong: list[str] = []
    for seed in seeds:
        job, url = random_job(seed), f"{folder}/{seed}"
        failures = [error_of(partial(save_job, job, url, meshes, groups))]
        dist.barrier()
        failures.append(error_of(partial(load_job, job, url, meshes, groups, wrong)))
        wrong += [f"{url}: {error}" for error in failures if error is not None]
    return wrong


def save_job(job: Job, url: str, meshes: Meshes, groups: dict[int, Any]) -> None:
    if dist.get_rank() >= job.num_saving:
        return
    state = {str(i): held(case.full(), case.saved, meshes) for i, case in enumerate(job.cases)}
    group = groups[job.num_saving]
    cloudckpt.save(state, url, group=group, layout=job.layout, compression=job.compression, config=job.config)


def load_job(job: Job, url: str, meshes: Meshes, groups: dict[int, Any], wrong: list[str]) -> None:
    if dist.get_rank() < job.num_loading:
        target = {str(i): spoilt(case, meshes) for i, case in enumerate(job.cases)}
        cloudckpt.load(target, url, group=groups[job.num_loading])
        for i, case in enumerate(job.cases):
            if not same_bits(local(target[str(i)]), local(held(case.full(), case.loaded, meshes))):
                wrong.append(f"{url}: {case}")
    if dist.get_rank() == 0:
        found = cloudckpt.read(url)
        cases = enumerate(job.cases)
        wrong += [f"{url}, read: {case}" for i, case in cases if not same_bits(found[str(i)], case.full())]


def spoilt(case: Case, meshes: Meshes) -> torch.Tensor:
    if case.loaded is None:
        return other_bits(case.full())
    return blank(case.full(), meshes[case.loaded.mesh], case.loaded.placements)


def held(full: torch.Tensor, layout: Layout | None, meshes: Meshes) -> torch.Tensor:
    return full if layout is None else shard(full, meshes[layout.mesh], layout.placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_random_layouts(ranks: RankPool, tmp_path: Path):
    for wrong in ranks.run(NUM_RANKS, run_jobs, range(16), str(tmp_path)):
        assert wrong == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(30))
def test_many_random_layouts(ranks: RankPool, tmp_path: Path, block: int):
    for wrong in ranks.run(NUM_RANKS, run_jobs, range(1000 + 50 * block, 1000 + 50 * (block + 1)), str(tmp_path)):
        assert wrong == []
