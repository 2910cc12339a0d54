"""How long planning takes for jobs that no test machine could run, on one core.

    python benchmarks/plan_bench.py --ranks 4096 --tensors 2000

The tensors are those of a large Llama, saved by FSDP2 x TP on one mesh and loaded on another; with exchange, on
one with replicas (HSDP x TP), where every rank first takes in the wants of all, and plans its own part.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cloudckpt.config import Config
from cloudckpt.plan.exchange import plan_exchange
from cloudckpt.plan.exchange_part import part_of_rank
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.shard import DimShard, PieceTable, Runs, TensorSpec, dim_runs
from cloudckpt.plan.wants import Wants, decode_table, encode_table
from cloudckpt.plan.writes import SavePlan, plan_save

T = TypeVar("T")
ITEMSIZE = 4


@dataclass(frozen=True)
class Mesh:
    dp: int
    tp: int
    replicas: int = 1

    @property
    def size(self) -> int:
        return self.replicas * self.dp * self.tp


@dataclass(frozen=True)
class Weight:
    """One kind of parameter: ``tp_dim`` is the dim that tensor parallelism cuts (None: replicated)."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None

    def runs(self, mesh: Mesh, rank: int) -> tuple[Runs, ...]:
        """The indices along every dim that a rank holds: FSDP2 cuts dim 0 of what TP has left."""
        dp, tp = divmod(rank % (mesh.dp * mesh.tp), mesh.tp)
        cuts: list[list[DimShard]] = [[] for _ in self.shape]
        cuts[0].append(DimShard(mesh.dp, dp, split_factor=mesh.tp if self.tp_dim == 0 else 1))
        if self.tp_dim is not None:
            cuts[self.tp_dim].append(DimShard(mesh.tp, tp))
        return tuple(dim_runs(extent, shards) for extent, shards in zip(self.shape, cuts, strict=True))


_NORM = Weight("norm", (8192,), None)
_WEIGHTS = (
    _NORM,
    Weight("wq", (8192, 8192), 0),
    Weight("wk", (1024, 8192), 0),
    Weight("wv", (1024, 8192), 0),
    Weight("wo", (8192, 8192), 1),
    _NORM,
    Weight("w1", (28672, 8192), 0),
    Weight("w2", (8192, 28672), 1),
    Weight("w3", (28672, 8192), 0),
)


@dataclass(frozen=True)
class PlanFigures:
    """``barred``: whether it is of the size that the project promises a time for."""

    what: str
    num_ranks: int
    num_tensors: int
    num_chunks: int
    seconds: float
    barred: bool


def measure_plans(num_ranks: int = 1024, num_tensors: int = 1000) -> list[PlanFigures]:
    """Time plan_save on a mesh with 8-way TP, and plan_load on one with 4-way TP."""
    weights, specs = _model(num_tensors)
    held = _tables(weights, Mesh(num_ranks // 8, 8))
    wanted = _tables(weights, Mesh(num_ranks // 4, 4))
    config = Config()
    barred = (num_ranks, num_tensors) == (1024, 1000)
    with _one_core():
        plan, save_s = _timed(lambda: plan_save(specs, held, chunk_bytes=config.chunk_bytes))
        stored = _stored(plan)
        _, load_s = _timed(lambda: plan_load(stored, wanted, read_bytes=config.read_bytes))
    times = {"plan_save": save_s, "plan_load": load_s}
    return [PlanFigures(what, num_ranks, num_tensors, len(plan.owner), s, barred) for what, s in times.items()]


def measure_exchange(num_ranks: int = 4096, num_tensors: int = 2000) -> list[PlanFigures]:
    """Time what one rank does for a load with exchange: with 8 replicas, and where all ranks differ."""
    weights, specs = _model(num_tensors)
    config = Config()
    saved = plan_save(specs, _tables(weights, Mesh(num_ranks // 8, 8)), chunk_bytes=config.chunk_bytes)
    stored = _stored(saved)
    meshes = {"8 replicas": Mesh(num_ranks // 32, 4, replicas=8), "all ranks differ": Mesh(num_ranks // 4, 4)}
    figures = []
    for name, mesh in meshes.items():
        wants = Wants.of(_tables(weights, mesh))
        told = [encode_table(table) for table in wants.tables]

        def plan(told: list[bytes] = told, wants: Wants = wants) -> None:
            known = Wants([decode_table(data) for data in told], wants.table)
            exchange = plan_exchange(stored, known, buffer_bytes=config.memory_bytes // 2)
            part_of_rank(exchange, 0, read_bytes=config.read_bytes)

        with _one_core():
            _, seconds = _timed(plan)
        what = f"plan_load with exchange, {name}, {sum(map(len, told)) / 1e6:.1f} MB of wants"
        barred = (num_ranks, num_tensors) == (4096, 2000)
        figures.append(PlanFigures(what, num_ranks, num_tensors, len(saved.owner), seconds, barred))
    return figures


def _model(num_tensors: int) -> tuple[list[Weight], list[TensorSpec]]:
    weights = [_WEIGHTS[i % len(_WEIGHTS)] for i in range(num_tensors)]
    return weights, [TensorSpec(f"{i}.{w.name}", w.shape, ITEMSIZE) for i, w in enumerate(weights)]


def _tables(weights: Sequence[Weight], mesh: Mesh) -> list[PieceTable]:
    """What every rank holds. The ranks of a real job do this themselves, each for its own; not timed."""
    tables = []
    for rank in range(mesh.size):
        bounds = {weight: _bounds(weight.runs(mesh, rank)) for weight in set(weights)}
        rows = [bounds[weight] for weight in weights]
        tensor = np.repeat(np.arange(len(weights), dtype=np.int64), [len(row) for row in rows])
        both = np.concatenate(rows)
        tables.append(PieceTable(tensor, both[:, :2], both[:, 2:]))
    return tables


def _bounds(runs: Sequence[Runs]) -> npt.NDArray[np.int64]:
    """Offsets and shapes of the pieces [k, 4]; a missing second dim is 0 and 1."""
    per_dim = [*runs, ((0, 1),)][:2]
    rows = [(a, b, c - a, d - b) for a, c in per_dim[0] for b, d in per_dim[1]]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _stored(plan: SavePlan) -> StoredChunks:
    """The chunk table that the save would leave: one pack for each rank, chunks one after another."""
    nbytes = np.concatenate([grid.stored_elements for grid in plan.grids]) * ITEMSIZE
    order = np.argsort(plan.owner, kind="stable")
    ends = np.cumsum(nbytes[order])
    owner = plan.owner[order].astype(np.int64)
    first = np.searchsorted(owner, owner)  # the first chunk of the same pack
    byte_offset = np.empty(len(nbytes), dtype=np.int64)
    byte_offset[order] = ends - nbytes[order] - (ends - nbytes[order])[first]
    return StoredChunks(
        plan.grids, plan.first_chunks, plan.owner.astype(np.int64), byte_offset, nbytes, [4] * len(plan.grids)
    )


@contextmanager
def _one_core() -> Iterator[None]:
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _timed(action: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 8 (default: 1024)")
    parser.add_argument("--tensors", type=int, default=1000, help="default: 1000")
    args = parser.parse_args()
    for figures in [*measure_plans(args.ranks, args.tensors), *measure_exchange(args.ranks, args.tensors)]:
        sizes = f"{figures.num_ranks:,} ranks x {figures.num_tensors:,} tensors, {figures.num_chunks:,} chunks"
        print(f"{figures.what}: {figures.seconds:.2f} s ({sizes})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
