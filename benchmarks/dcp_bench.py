"""torch.distributed.checkpoint on S3: through cloudckpt's storage, and through torch's own with s3fs.

    python benchmarks/dcp_bench.py --mib 256 --procs 4 --repeat 5

The two take turns on one server; a ratio is that of one turn. `make bench` has the same among its peers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench import Bench, running_server
from bench_state import layers
from report import Bar, dcp_bars, print_report
from rich.console import Console

PEERS = ("dcp-cloudckpt", "dcp-s3fs")


def measure(*, mib: int, procs: int, repeat: int, console: Console) -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="dcp-bench-") as folder, running_server(Path(folder) / "server") as server:
        bench = Bench(server, Path(folder) / "checkpoints", procs, layers(mib), console)
        for turn in range(repeat):
            for name in PEERS if turn % 2 else PEERS[::-1]:
                bench.turn(name, turn)
    found = dcp_bars(bench.samples, procs=procs)
    print_report(console, bench.samples, [], found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the state, in steps of 64 MiB (default: 512)")
    parser.add_argument("--procs", type=int, default=4, help="ranks, a power of two (default: 4)")
    parser.add_argument("--repeat", type=int, default=3, help="turns of each (default: 3)")
    args = parser.parse_args()
    console = Console()
    console.width = max(console.width, 110)
    found = measure(mib=args.mib, procs=args.procs, repeat=args.repeat, console=console)
    return 0 if all(bar.passes for bar in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
