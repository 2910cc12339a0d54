"""Save and load the same state with several libraries, side by side on one server, and compare.

    python benchmarks/bench.py --mib 256 --repeat 3 --only raw,cloudckpt,dcp-s3fs --json bench-results/figures.json

Peers take turns, so that a slow minute of the machine hits all of them; ratios are taken within a turn,
and the median over the turns counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import exchange_bench
from async_bench import measure_async, measure_incremental
from bench_state import Layout, TensorSpec, layers, small, total_bytes, warm_up
from export_bench import measure_export
from peers import PEERS, Place
from plan_bench import PlanFigures, measure_exchange, measure_plans
from pool import Pool, RankFigures, Task, TaskError
from report import (
    Bar,
    Sample,
    async_bars,
    bars,
    exchange_bars,
    export_bars,
    print_report,
    staging_bars,
    warm_bars,
    write_json,
)
from rich.console import Console
from server_counts import ServerCounts, read_counts
from staging_bench import measure_staging
from warm_bench import measure_warm_saves

if TYPE_CHECKING:
    from tests.servers.process import S3Server

REPOSITORY = Path(__file__).resolve().parents[1]
BUCKET = "bench"
NUM_SMALL = 2000


@dataclass
class Bench:
    """One run over all peers; collects samples."""

    server: S3Server
    local_folder: Path
    procs: int
    specs: list[TensorSpec]
    console: Console
    samples: list[Sample] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def turn(self, name: str, repeat: int) -> None:
        """One peer saves, and loads in every layout. A failure ends its turn, not the run."""
        place = self.place(name, f"turn-{repeat}")
        halves = max(1, self.procs // 2)
        try:
            with Pool(self.procs) as pool:
                self.warm_up(pool, name)
                self.measure(pool, name, repeat, "save", "rows", place)
                self.measure(pool, name, repeat, "load", "rows", place)
                if PEERS[name].reshards:
                    self.measure(pool, name, repeat, "load", "columns", place)
            if PEERS[name].reshards and halves < self.procs:
                with Pool(halves) as pool:
                    self.warm_up(pool, name)
                    self.measure(pool, name, repeat, "load", "columns", place)
        except TaskError as error:
            self.fail(name, error)
        finally:
            self.clear()

    def many_small(self, name: str) -> None:
        """What saving many small tensors costs in requests."""
        try:
            with Pool(self.procs) as pool:
                self.warm_up(pool, name)
                place = self.place(name, "small")
                task = Task(name, "save", "rows", place, small(NUM_SMALL))
                self.record(pool, task, 0, f"save {NUM_SMALL} small")
        except TaskError as error:
            self.fail(name, error)
        finally:
            self.clear()

    def fail(self, name: str, error: TaskError) -> None:
        self.failed.add(name)
        self.console.print(f"{name} failed: {error}", style="red", markup=False, highlight=False)

    def warm_up(self, pool: Pool, name: str) -> None:
        place = self.place(name, f"warm-up-{time.time_ns()}")
        pool.run(Task(name, "save", "rows", place, warm_up()))
        pool.run(Task(name, "load", "rows", place, warm_up()))

    def measure(self, pool: Pool, name: str, repeat: int, action: Any, layout: Layout, place: Place) -> None:
        task = Task(name, action, layout, place, self.specs)
        change = "" if action == "save" else f" {layout} {self.procs}->{pool.size}"
        self.record(pool, task, repeat, action + change)

    def record(self, pool: Pool, task: Task, repeat: int, case: str) -> None:
        os.sync()  # what the last peer left to be written back is not this one's burden
        before = self.counts()
        ranks = pool.run(task)
        time.sleep(0.2)  # the server counts a request after its answer has gone out
        counts = self.counts().since(before)
        sample = _sample(task, repeat, case, ranks, counts)
        self.samples.append(sample)
        speed = sample.nbytes / 1e6 / sample.wall_s
        self.console.print(f"{sample.peer:16} {case:20} {sample.wall_s:7.2f} s {speed:7.0f} MB/s", highlight=False)

    def counts(self) -> ServerCounts:
        return read_counts(self.server.endpoint_url, self.server.key, self.server.secret)

    def place(self, name: str, leaf: str) -> Place:
        if PEERS[name].local:
            return Place(str(self.local_folder / name / leaf))
        return Place(f"s3://{BUCKET}/{name}/{leaf}", self.server.endpoint_url, self.server.key, self.server.secret)

    def clear(self) -> None:
        """Remove everything that was saved: a full disk would slow whoever comes last."""
        shutil.rmtree(self.local_folder, ignore_errors=True)
        client = self.server.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for found in page.get("Contents", []):
                client.delete_object(Bucket=BUCKET, Key=found["Key"])
        client.close()


def _sample(task: Task, repeat: int, case: str, ranks: list[RankFigures], counts: ServerCounts) -> Sample:
    return Sample(
        peer=task.peer,
        case=case,
        repeat=repeat,
        nbytes=total_bytes(task.specs),
        wall_s=max(rank.end_s for rank in ranks) - min(rank.start_s for rank in ranks),
        cpu_s=sum(rank.cpu_s for rank in ranks),
        extra_rss_bytes=max(rank.extra_rss_bytes for rank in ranks),
        requests={} if PEERS[task.peer].local else counts.requests,
        num_puts=0 if PEERS[task.peer].local else counts.num_puts,
        server_received_bytes=0 if PEERS[task.peer].local else counts.received,
        server_sent_bytes=0 if PEERS[task.peer].local else counts.sent,
        told=ranks[0].told,
    )


@contextmanager
def running_server(folder: Path) -> Iterator[S3Server]:
    sys.path.insert(0, str(REPOSITORY))  # the servers lie with the tests that need them
    from tests.servers.juicefs import start_juicefs

    server = start_juicefs(folder)
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.stop()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state, in steps of 64 MiB (default: 1024)")
    parser.add_argument("--procs", type=int, default=4, help="ranks, a power of two (default: 4)")
    parser.add_argument("--repeat", type=int, default=3, help="turns of every peer (default: 3)")
    parser.add_argument("--only", default=",".join(PEERS), help=f"peers, of {','.join(PEERS)} (default: all)")
    parser.add_argument("--json", type=Path, default=Path("bench-results/bench.json"), help="where the figures go")
    parser.add_argument("--server-dir", type=Path, help="where the S3 server keeps its data (default: a temporary one)")
    parser.add_argument("--local-dir", type=Path, help="where local checkpoints go (default: a temporary one)")
    parser.add_argument("--no-extras", action="store_true", help="leave out small tensors and planning")
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - set(PEERS)
    if unknown:
        parser.error(f"no such peers: {', '.join(sorted(unknown))}")
    if args.procs not in (1, 2, 4, 8, 16):
        parser.error("--procs must be 1, 2, 4, 8 or 16")
    return args


def main() -> int:
    args = arguments()
    console = Console()
    console.width = max(console.width, 110)  # also where the output goes to a file
    names = args.only.split(",")
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        server_folder = args.server_dir or Path(temporary) / "server"
        local_folder = (args.local_dir or Path(temporary)) / "checkpoints"
        with running_server(server_folder) as server:
            bench = Bench(server, local_folder, args.procs, layers(args.mib), console)
            for repeat in range(args.repeat):
                first = repeat % len(names)  # nobody always comes right after the same other
                for name in names[first:] + names[:first]:
                    bench.turn(name, repeat)
            if not args.no_extras and "cloudckpt" in names:
                bench.many_small("cloudckpt")
    plans: list[PlanFigures] = [] if args.no_extras else [*measure_plans(), *measure_exchange()]
    results: list[Bar] = bars(bench.samples, plans, procs=args.procs)
    if not args.no_extras:
        results += exchange_bars(exchange_bench.measure(repeat=args.repeat))
        results += warm_bars(measure_warm_saves())
        results += async_bars(measure_async(repeat=args.repeat), measure_incremental())
        results += export_bars(measure_export(repeat=args.repeat))
        results += staging_bars([measure_staging(1024, 100), measure_staging(2, 2000)])
    print_report(console, bench.samples, plans, results)
    write_json(args.json, bench.samples, plans, results, mib=args.mib, procs=args.procs)
    console.print(f"figures: {args.json}")
    if bench.failed:
        console.print(f"failed: {', '.join(sorted(bench.failed))}", style="red")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
