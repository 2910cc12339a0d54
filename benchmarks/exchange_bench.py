"""What passing chunks on between ranks wins where the link to the store is slow, and costs where nothing is shared.

    python benchmarks/exchange_bench.py --mib 256 --repeat 3

- replicas: four ranks load the same state (HSDP 4 x 1) over a link of 200 MB/s, with exchange and without, in turns.
- nothing shared: two ranks load other rows than the four that saved, over the same link.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relay
import torch
import torch.distributed as dist
from pool import reset_peak_rss, status_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the servers and processes lie with the tests
from tests.ranks import RankPool
from tests.servers.juicefs import start_juicefs
from tests.servers.process import S3Server

RATE_BYTES_S = 200e6
REPLICAS = "4 replicas, 200 MB/s"
NOTHING_SHARED = "nothing shared, 200 MB/s"
ROWS, COLUMNS = 4096, 2048
"""32 MiB of float32 a tensor."""


@dataclass(frozen=True)
class Figures:
    """Of one way to load, by turn. ``extra_bytes``: the most that any rank's resident memory grew by."""

    what: str
    mode: str
    seconds: list[float]
    fetched_per_needed: float
    sent_bytes: int
    extra_bytes: int
    budget_bytes: int


def measure(mib: int = 256, repeat: int = 3) -> list[Figures]:
    with _memory_folder() as memory, _pool() as pool:
        server = start_juicefs(memory / "server")
        try:
            server.make_bucket("exchange")
            return _turns(pool, REPLICAS, 4, mib, repeat, server) + _turns(pool, NOTHING_SHARED, 2, mib, repeat, server)
        finally:
            server.stop()


def speedup(figures: list[Figures], what: str) -> list[float]:
    """How many times as fast as without exchange, by turn."""
    seconds = {f.mode: f.seconds for f in figures if f.what == what}
    return [alone / shared for alone, shared in zip(seconds["none"], seconds["auto"], strict=True)]


def _turns(pool: RankPool, what: str, ranks: int, mib: int, repeat: int, server: S3Server) -> list[Figures]:
    url, replicate = "s3://exchange/run", what == REPLICAS
    pool.run(4, _save, url, server.storage_options, mib)
    results: dict[str, list[Any]] = {"none": [], "auto": []}
    for turn in range(repeat):
        for mode in ("none", "auto") if turn % 2 else ("auto", "none"):
            with relay.start(server.endpoint_url, RATE_BYTES_S) as link:
                options = server.storage_options | {"endpoint_url": link.url}
                results[mode].append(pool.run(ranks, _load, url, options, mib, mode, replicate))
    return [
        Figures(
            what,
            mode,
            [max(answer["end_s"] for answer in turn) - min(answer["start_s"] for answer in turn) for turn in turns],
            turns[0][0]["fetched_per_needed"],
            turns[0][0]["sent_bytes"],
            max(answer["extra_bytes"] for turn in turns for answer in turn),
            cloudckpt.Config().memory_bytes,
        )
        for mode, turns in results.items()
    ]


def _names(mib: int) -> list[str]:
    return [f"w{i}" for i in range(max(1, mib * 2**20 // (ROWS * COLUMNS * 4)))]


def _save(url: str, options: dict[str, Any], mib: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    state = {}
    for number, name in enumerate(_names(mib)):
        local = torch.full((ROWS // 4, COLUMNS), float(number * 4 + dist.get_rank()))
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    cloudckpt.save(state, url, storage_options=options, overwrite=True)


def _load(url: str, options: dict[str, Any], mib: int, mode: Any, replicate: bool) -> dict[str, Any]:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    placement = Replicate() if replicate else Shard(0)
    rows = ROWS if replicate else ROWS // size
    state = {
        name: DTensor.from_local(torch.full((rows, COLUMNS), -1.0), mesh, [placement], run_check=False)
        for name in _names(mib)
    }
    small = DTensor.from_local(torch.full((rows, COLUMNS), -1.0), mesh, [placement], run_check=False)
    cloudckpt.load({"w0": small}, url, storage_options=options, exchange=mode, strict=False)  # connections, imports
    gc.collect()
    reset_peak_rss()
    before = status_bytes("VmRSS")
    dist.barrier()
    start_s = time.monotonic()
    report = cloudckpt.load(state, url, storage_options=options, exchange=mode)
    end_s = time.monotonic()
    extra = status_bytes("VmHWM") - before
    first = 0 if replicate else rank * rows
    for number, tensor in enumerate(state.values()):
        wanted = number * 4 + torch.arange(first, first + rows) // (ROWS // 4)
        assert torch.equal(tensor.to_local(), wanted[:, None].expand(-1, COLUMNS).float())
    return {
        "start_s": start_s,
        "end_s": end_s,
        "fetched_per_needed": report.bytes_fetched / report.bytes_needed,
        "sent_bytes": report.bytes_sent,
        "extra_bytes": extra,
    }


@contextmanager
def _pool() -> Iterator[RankPool]:
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.stop()


@contextmanager
def _memory_folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="exchange-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state (default: 256)")
    parser.add_argument("--repeat", type=int, default=3, help="turns (default: 3)")
    args = parser.parse_args()
    figures = measure(args.mib, args.repeat)
    for f in figures:
        times = " ".join(f"{s:.2f}" for s in f.seconds)
        extra = f"{f.extra_bytes / 2**20:.0f} MiB extra memory (budget {f.budget_bytes / 2**20:.0f})"
        print(f"{f.what}, exchange={f.mode}: {times} s; fetched/needed {f.fetched_per_needed:.3f}; {extra}")
    for what in dict.fromkeys(f.what for f in figures):
        print(f"{what}: with exchange {statistics.median(speedup(figures, what)):.2f}x as fast as without")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
