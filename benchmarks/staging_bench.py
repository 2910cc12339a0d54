"""How long training waits for the private copy that a background save takes, beside one memcpy of the same bytes.

    python benchmarks/staging_bench.py --mib 1024 --tensors 100
    python benchmarks/staging_bench.py --mib 2 --tensors 2000

Both are done in turn, in one process, into memory that is there already; medians count. The first copy is shown apart:
its memory is new.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
MIB = 1024 * 1024


@dataclass(frozen=True)
class StagingFigures:
    """Seconds; medians, but for the first."""

    mib: int
    num_tensors: int
    shared: bool
    first_s: float
    stage_s: float
    memcpy_s: float

    @property
    def bars(self) -> list[tuple[str, float, float]]:
        """What is promised for this, the figure, and the most that it may be."""
        found: list[tuple[str, float, float]] = []
        if (self.mib, self.num_tensors) == (1024, 100):
            found.append(("stage / memcpy", self.stage_s / self.memcpy_s, 1.3))
        if self.num_tensors == 2000:
            found.append(("beyond a memcpy, ms", 1000 * (self.stage_s - self.memcpy_s), 20))
        return found


def measure_staging(mib: int = 1024, num_tensors: int = 100, *, shared: bool = False, times: int = 9) -> StagingFigures:
    import torch

    from cloudckpt.pytorch.shards import tensor_shard
    from cloudckpt.pytorch.staging import StagingPool

    count = mib * MIB // (4 * num_tensors)
    shards = {f"w{i}": tensor_shard(torch.full((count,), float(i)), f"w{i}") for i in range(num_tensors)}
    nbytes = 4 * count * num_tensors
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    pool = StagingPool(shared=shared, max_bytes=None)
    stages, memcpys = [], []
    for _ in range(1 + times):
        began = time.perf_counter()
        staged = pool.stage(shards)
        stages.append(time.perf_counter() - began)
        staged.release()
        began = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
        memcpys.append(time.perf_counter() - began)
    return StagingFigures(mib, num_tensors, shared, stages[0], median(stages[1:]), median(memcpys[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="in all (default: 1024)")
    parser.add_argument("--tensors", type=int, default=100, help="default: 100")
    parser.add_argument("--times", type=int, default=9, help="of each (default: 9)")
    args = parser.parse_args()
    for shared in (False, True):
        figures = measure_staging(args.mib, args.tensors, shared=shared, times=args.times)
        kind = "shared with a helper process" if shared else "of this process alone"
        print(f"{args.mib:,} MiB in {args.tensors:,} tensors, memory {kind}")
        for what, figure, bar in figures.bars:
            print(f"  {what}: {figure:.3g} (at most {bar:g}: {'PASS' if figure <= bar else 'MISS'})")
        print(f"  stage: {1000 * figures.stage_s:.1f} ms, of the first {1000 * figures.first_s:.1f} ms")
        print(f"  memcpy: {1000 * figures.memcpy_s:.1f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
