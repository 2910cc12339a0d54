"""What planning a save costs when the layout is that of an earlier one, on real ranks.

    python benchmarks/warm_bench.py --ranks 4 --tensors 2000

Every rank reports how long it works for the first round, the coordinator also for the others. They work one after
another, as ranks do that have cores of their own; waiting is not work. The state is sharded over all ranks, with an
optimizer's plain values.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the processes that stand for ranks lie with the tests
NUM_WARM = 9


@dataclass(frozen=True)
class WarmFigures:
    """Planning in seconds, of the slowest rank: of the first save, and the median of the warm ones.

    The collectives are those of all warm saves on all ranks.
    """

    num_ranks: int
    num_tensors: int
    first_s: float
    warm_s: float
    num_object_collectives: int
    num_other_collectives: int

    @property
    def bars(self) -> list[tuple[str, float, float]]:
        """What is promised for this, the figure, and the most that it may be."""
        found: list[tuple[str, float, float]] = [("object collectives", self.num_object_collectives, 0)]
        if (self.num_ranks, self.num_tensors) == (4, 2000):
            found.append(("planning, ms", 1000 * self.warm_s, 50))
        return found


@dataclass
class _Clock:
    """Time in the functions that a rank runs in the first round of a save; ``lock``: a file that all ranks have."""

    lock: Path
    seconds: float = 0.0
    rounds: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                began = time.perf_counter()
                try:
                    return function(*args)
                finally:
                    self.seconds += time.perf_counter() - began

        return call


def measure_warm_saves(num_ranks: int = 4, num_tensors: int = 2000) -> WarmFigures:
    from tests.ranks import RankPool

    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory(prefix="warm-") as folder:
            ranks = pool.run(num_ranks, _save_again_and_again, folder, num_tensors)
    finally:
        pool.stop()
    first_s = max(seconds[0] for seconds, _ in ranks)
    warm = [seconds[1:] for seconds, _ in ranks]
    return WarmFigures(
        num_ranks=num_ranks,
        num_tensors=num_tensors,
        first_s=first_s,
        warm_s=median(max(save) for save in zip(*warm, strict=True)),
        num_object_collectives=sum(objects for _, (objects, _) in ranks),
        num_other_collectives=sum(others for _, (_, others) in ranks),
    )


def _save_again_and_again(folder: str, num_tensors: int) -> tuple[list[float], tuple[int, int]]:
    """On every rank: the seconds of all saves, and the collectives of the warm ones."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    import cloudckpt
    from tests.collectives import OBJECTS, counted_collectives

    size = dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("fsdp",))

    def weight() -> DTensor:
        return DTensor.from_local(torch.zeros(4, 16), mesh, [Shard(0)], run_check=False)

    model = {f"layers.{i // 10}.block.w{i % 10}.weight": weight() for i in range(num_tensors)}
    seconds, counts = [], []
    for step in range(1 + NUM_WARM):
        groups = [{"lr": 0.1 / (step + 1), "betas": (0.9, 0.95), "params": list(range(num_tensors))}]
        state = {"model": model, "optimizer": {"param_groups": groups}, "step": step}
        clock = _Clock(Path(folder) / "lock")
        dist.barrier()
        with _first_round_timed(clock), counted_collectives() as counted:
            cloudckpt.save(state, f"{folder}/step-{step}")
        seconds.append(clock.seconds)
        objects = sum(counted[name] for name in OBJECTS)
        counts.append((objects, counted.total() - objects))
    return seconds, (sum(o for o, _ in counts[1:]), sum(t for _, t in counts[1:]))


@contextmanager
def _first_round_timed(clock: _Clock) -> Iterator[None]:
    from cloudckpt.pytorch.group import Alone
    from cloudckpt.pytorch.ranks import Ranks
    from cloudckpt.transfer.planning import Planner

    def with_clock(real_round: Callable[..., Any]) -> Callable[..., Any]:
        def round_(self: Any, part: Callable[[], Any], combine: Callable[[Sequence[Any]], Any], **options: Any) -> Any:
            clock.rounds += 1
            if clock.rounds > 1:
                return real_round(self, part, combine, **options)
            return real_round(self, clock.timed(part), clock.timed(combine), **options)

        return round_

    with (
        patch.object(Ranks, "round", with_clock(Ranks.round)),
        patch.object(Alone, "round", with_clock(Alone.round)),
        patch.object(Planner, "accept", clock.timed(Planner.accept)),
    ):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--tensors", type=int, default=2000, help="default: 2000")
    args = parser.parse_args()
    figures = measure_warm_saves(args.ranks, args.tensors)
    print(f"warm save, {figures.num_ranks} ranks x {figures.num_tensors:,} tensors")
    for what, figure, bar in figures.bars:
        print(f"{what}: {figure:.3g} (at most {bar:g}: {'PASS' if figure <= bar else 'MISS'})")
    print(f"planning, ms: {1000 * figures.warm_s:.1f} warm, {1000 * figures.first_s:.1f} of the first save")
    print(f"other collectives: {figures.num_other_collectives}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
