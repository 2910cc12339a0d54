"""What it costs to hand a checkpoint on as safetensors, and to take such files over, beside a copy of as many bytes.

    python benchmarks/export_bench.py --mib 1024 --repeat 3

All three go from an S3 server on this machine to the same server, through the same clients; they take turns, each
turn in a new process. The checkpoint is a bfloat16 model, its large tensors cut along both dims as usual.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the server lies with the tests
MIB = 1024 * 1024
BUCKET = "export"
ACTIONS = ("copy", "export", "import")
MOST_MEMORY_MIB = 256


@dataclass
class ExportFigures:
    """By turn: wall and CPU seconds (of this process, the server's not counted), and memory beyond what there was."""

    mib: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ACTIONS})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ACTIONS})
    extra_mib: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ACTIONS})

    @property
    def speed_ratios(self) -> dict[str, list[float]]:
        """How many times as fast as the copy of the same turn."""
        copies = self.seconds["copy"]
        return {
            name: [copy / own for copy, own in zip(copies, self.seconds[name], strict=True)]
            for name in ("export", "import")
        }


def model(mib: int) -> dict[str, Any]:
    """About so many MiB in which all rows of a tensor are one row in memory: what is stored is the same."""
    import torch

    def matrix(rows: int, columns: int, value: int) -> torch.Tensor:
        row = torch.arange(value, value + columns, dtype=torch.float32).to(torch.bfloat16)
        return row.expand(rows, columns)

    state = {"embed_tokens.weight": matrix(mib * 16, 4096, 1)}  # an eighth of the whole
    for layer in range(max(1, (mib * 7 // 8) // 128)):
        for number, name in enumerate(("q", "k", "v", "o")):
            state[f"layers.{layer}.{name}_proj.weight"] = matrix(2048, 4096, 100 * layer + number)
        for number, name in enumerate(("gate", "up")):
            state[f"layers.{layer}.mlp.{name}_proj.weight"] = matrix(4096, 4096, 100 * layer + 10 + number)
        state[f"layers.{layer}.norm.weight"] = torch.full((4096,), float(layer), dtype=torch.bfloat16)
    return state


def measure_export(mib: int = 1024, repeat: int = 3) -> ExportFigures:
    import cloudckpt

    figures = ExportFigures(mib)
    with _server() as server:
        common = {"storage_options": server.storage_options}
        cloudckpt.save(model(mib), f"s3://{BUCKET}/source", **common)
        cloudckpt.save(model(1), f"s3://{BUCKET}/small", **common)
        for turn in range(repeat):
            # What is exported is then imported.
            for name in ("export", "import", "copy") if turn % 2 else ("copy", "export", "import"):
                os.sync()  # what the last one left to be written back is not this one's burden
                _run(figures, name, server.storage_options, turn)
            _clear(server, turn)
    return figures


def _run(figures: ExportFigures, name: str, options: dict[str, Any], turn: int) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        seconds, cpu_s, extra = pool.apply(_measured, (name, options, turn))
    figures.seconds[name].append(seconds)
    figures.cpu_s[name].append(cpu_s)
    figures.extra_mib[name].append(extra / MIB)


def _measured(name: str, options: dict[str, Any], turn: int) -> tuple[float, float, int]:
    from pool import reset_peak_rss, status_bytes

    _act(name, options, "small", f"{turn}/small")() if name != "import" else _warm_up_import(options, turn)
    action = _act(name, options, "source", str(turn))
    gc.collect()
    reset_peak_rss()
    before, start, cpu_start = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - cpu_start, status_bytes("VmHWM") - before


def _act(name: str, options: dict[str, Any], source: str, target: str) -> Callable[[], object]:
    import cloudckpt

    root = f"s3://{BUCKET}"
    both = {"src_options": options, "dst_options": options}
    if name == "copy":
        return lambda: cloudckpt.copy(f"{root}/{source}", f"{root}/copy/{target}", **both)
    if name == "export":
        return lambda: cloudckpt.export_hf(f"{root}/{source}", f"{root}/export/{target}", **both)
    return lambda: cloudckpt.import_from("hf", f"{root}/export/{target}", f"{root}/import/{target}", **both)


def _warm_up_import(options: dict[str, Any], turn: int) -> None:
    _act("export", options, "small", f"{turn}/import-small")()
    _act("import", options, "", f"{turn}/import-small")()


@contextmanager
def _server() -> Iterator[Any]:
    from tests.servers.juicefs import start_juicefs

    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        server = start_juicefs(Path(folder) / "server")
        try:
            server.make_bucket(BUCKET)
            yield server
        finally:
            server.stop()


def _clear(server: Any, turn: int) -> None:
    """Remove what a turn has written: a full disk would slow whoever comes last."""
    client = server.client()
    for action in ACTIONS:
        for found in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{action}/{turn}").get("Contents", []):
            client.delete_object(Bucket=BUCKET, Key=found["Key"])
    client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    figures = measure_export(args.mib, args.repeat)
    for name in ACTIONS:
        seconds = ", ".join(f"{s:.2f}" for s in figures.seconds[name])
        cpu_s, extra = median(figures.cpu_s[name]) / args.mib * 1024, max(figures.extra_mib[name])
        print(f"{name:7}: {seconds} s, {cpu_s:.2f} CPU s/GiB, at most {extra:.0f} MiB more memory")
    for name, ratios in figures.speed_ratios.items():
        print(f"speed of {name} / copy: {median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")
    print(f"promised: export / copy at least 0.7, at most {MOST_MEMORY_MIB} MiB for export and import")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
