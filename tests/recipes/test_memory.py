"""Host memory beyond the tensors stays within Config.memory_bytes, whatever the layout and the engine."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cloudckpt
from tests.ranks import RankPool
from tests.servers.process import S3Server
from tests.sharding import make_mesh

MIB = 1024 * 1024
ROWS = 6144
BUDGET = 48 * MIB
ALLOWANCE = 16 * MIB
"""For threads' stacks, the clients' own buffers and what malloc keeps: 3 MiB beyond the budget is the most that was
measured here, on a machine with ten times as much to do as it has cores. The tensors of a rank are 144 MiB."""


@pytest.fixture
def fresh() -> Iterator[RankPool]:
    """Processes in which nothing has grown the heap before."""
    pool = RankPool()
    yield pool
    pool.stop()


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def extra_memory(call: Callable[[], object]) -> int:
    """The peak of resident memory during a call, beyond what was in use before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or the call would have for nothing what an earlier one has left
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def bound(budget: int) -> int:
    """What ``Config.memory_bytes`` promises."""
    return budget * 11 // 10 + ALLOWANCE


def large_state() -> dict[str, Any]:
    """Per rank 48 MiB each of strided rows, of columns in a transposed buffer, and of a plain tensor; all noise."""
    mesh = make_mesh((2,))
    torch.manual_seed(0)
    plain = torch.rand(ROWS // 2, 4096)
    torch.manual_seed(1 + dist.get_rank())
    rows = torch.rand(ROWS // 2, 4096)
    columns = torch.rand(4096, ROWS // 2).t()
    return {
        "rows": DTensor.from_local(rows, mesh, [_StridedShard(0, split_factor=8)], run_check=False),
        "columns": DTensor.from_local(columns, mesh, [Shard(1)], run_check=False),
        "plain": plain,
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(url: str, options: dict[str, Any], engine: Any, arguments: dict[str, Any]) -> tuple[int, int]:
    config = cloudckpt.Config(engine=engine, memory_bytes=BUDGET, rank_timeout_s=60.0)
    common: dict[str, Any] = {"storage_options": options, "config": config}
    small = {"w": torch.ones(1000)}  # imports and connections
    cloudckpt.save(small, f"{url}-small", **common, **arguments)
    cloudckpt.load(small, f"{url}-small", **common)
    state = large_state()
    saving = extra_memory(lambda: cloudckpt.save(state, url, **common, **arguments))
    for tensor in state.values():
        local(tensor).fill_(-1.0)
    loading = extra_memory(lambda: cloudckpt.load(state, url, **common))
    for name, tensor in large_state().items():
        assert torch.equal(local(state[name]), local(tensor))
    return saving, loading


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [("auto", {}), ("fsspec", {}), ("auto", {"layout": "zarr"}), ("auto", {"compression": "zstd"})],
    ids=["auto", "fsspec", "auto-zarr", "auto-zstd"],
)
def test_on_s3(
    fresh: RankPool, juicefs_s3: S3Server, engine: str, arguments: dict[str, Any], request: pytest.FixtureRequest
):
    bucket = juicefs_s3.make_bucket(f"memory-{request.node.callspec.id}")
    found = fresh.run(2, measure, f"s3://{bucket}/run", juicefs_s3.storage_options, engine, arguments)
    for saving, loading in found:
        assert saving <= bound(BUDGET)
        assert loading <= bound(BUDGET)


def test_on_a_local_disk(fresh: RankPool, tmp_path: Path):
    for saving, loading in fresh.run(2, measure, str(tmp_path / "run"), {}, "auto", {}):
        assert saving <= bound(BUDGET)
        assert loading <= bound(BUDGET)
