"""From samples to tables, to the bars that the project sets itself, and to JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import exchange_bench
from async_bench import AsyncFigures
from export_bench import MOST_MEMORY_MIB, ExportFigures
from plan_bench import PlanFigures
from rich.console import Console
from rich.table import Table
from staging_bench import StagingFigures
from warm_bench import WarmFigures

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True)
class Sample:
    """One measured save or load. ``told`` is what the library's own report says (rank 0's)."""

    peer: str
    case: str
    repeat: int
    nbytes: int
    wall_s: float
    cpu_s: float
    extra_rss_bytes: int
    requests: dict[str, int]
    num_puts: int
    server_received_bytes: int
    server_sent_bytes: int
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / self.nbytes * GIB


@dataclass(frozen=True)
class Bar:
    """One promise: ``figure`` must be at least (or at most) ``bar``; None where it was not measured."""

    what: str
    figure: float | None
    bar: float
    at_least: bool
    spread: tuple[float, float] | None = None

    @property
    def passes(self) -> bool | None:
        if self.figure is None:
            return None
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar


def bars(samples: Sequence[Sample], plans: Sequence[PlanFigures], *, procs: int) -> list[Bar]:
    same, whole, half = (f"load {layout} {procs}->{n}" for layout, n in _loads(procs))
    found = [
        _ratio("save to S3 / raw engine", samples, "save", "cloudckpt", "raw", 0.80),
        _ratio("load from S3, same layout / raw engine", samples, same, "cloudckpt", "raw", 0.80),
        _ratio("load from S3, same layout / torch DCP + s3fs", samples, same, "cloudckpt", "dcp-s3fs", 1.8),
        _ratio(f"{half} / torch DCP + s3fs", samples, half, "cloudckpt", "dcp-s3fs", 3.0),
        _ratio(f"{whole} / torch DCP + s3fs", samples, whole, "cloudckpt", "dcp-s3fs", 4.0),
        _ratio("save to S3 / torch DCP + s3fs", samples, "save", "cloudckpt", "dcp-s3fs", 1.5),
        _ratio("save to S3 / torch DCP + s3torchconnector", samples, "save", "cloudckpt", "dcp-s3tc", 1.0),
        _most("CPU s/GiB, save to S3", samples, "save", lambda s: s.cpu_s_per_gib, 1.7),
        _most("CPU s/GiB, load from S3", samples, same, lambda s: s.cpu_s_per_gib, 1.7),
        _ratio("local save / torch DCP", samples, "save", "cloudckpt-local", "dcp-local", 1.0),
        _ratio("local load / torch DCP", samples, same, "cloudckpt-local", "dcp-local", 1.0),
        # Not 1.00 sharp: a read of several chunks takes the few bytes of ZIP headers between them along.
        _most("bytes fetched / needed, same layout", samples, same, _overfetch, 1.005),
        _most(f"bytes fetched / needed, {whole}", samples, whole, _overfetch, 1.005),
        _most(f"bytes fetched / needed, {half}", samples, half, _overfetch, 1.005),
    ]
    small = next((s.case for s in samples if s.case.endswith("small")), "save small")
    found.append(_most(f"PUT requests, {small} tensors", samples, small, lambda s: s.num_puts, 12))
    found += [Bar(f"{plan.what}, s on one core", plan.seconds, 5.0, at_least=False) for plan in plans if plan.barred]
    return found


def warm_bars(figures: WarmFigures) -> list[Bar]:
    size = f"{figures.num_ranks} ranks, {figures.num_tensors:,} tensors"
    return [Bar(f"warm save, {size}: {what}", figure, bar, at_least=False) for what, figure, bar in figures.bars]


def async_bars(figures: AsyncFigures, written: float) -> list[Bar]:
    """``written``: the part of its bytes that an incremental save writes."""
    found = [_bar(what, ratios, bar, at_least=False) for what, ratios, bar in figures.bars]
    return [*found, Bar("incremental save, 90 % frozen: bytes written / all", written, 0.11, at_least=False)]


def staging_bars(measured: Sequence[StagingFigures]) -> list[Bar]:
    return [
        Bar(f"copy of {figures.mib} MiB in {figures.num_tensors:,} tensors: {what}", figure, bar, at_least=False)
        for figures in measured
        for what, figure, bar in figures.bars
    ]


def exchange_bars(figures: Sequence[exchange_bench.Figures]) -> list[Bar]:
    replicas, apart = exchange_bench.REPLICAS, exchange_bench.NOTHING_SHARED
    shared = next(f for f in figures if (f.what, f.mode) == (replicas, "auto"))
    memory = [f.extra_bytes / f.budget_bytes for f in figures]
    return [
        _bar(f"load, {replicas} / exchange='none'", exchange_bench.speedup(figures, replicas), 2.5, at_least=True),
        _bar(f"load, {apart} / exchange='none'", exchange_bench.speedup(figures, apart), 0.97, at_least=True),
        # A read of several chunks takes the few bytes of ZIP headers between them along.
        Bar(f"bytes fetched / needed, {replicas}", shared.fetched_per_needed, 1.005, at_least=False),
        Bar("peak extra memory of a load with exchange / budget", max(memory), 1.1, at_least=False),
    ]


def export_bars(figures: ExportFigures) -> list[Bar]:
    memory = [
        _bar(f"{name} of safetensors: extra MiB", figures.extra_mib[name], MOST_MEMORY_MIB, at_least=False)
        for name in ("export", "import")
    ]
    speed = _bar("export of safetensors / copy of as many bytes", figures.speed_ratios["export"], 0.7, at_least=True)
    return [speed, *memory]


def _loads(procs: int) -> list[tuple[str, int]]:
    return [("rows", procs), ("columns", procs), ("columns", max(1, procs // 2))]


def _overfetch(sample: Sample) -> float:
    return float(sample.told["bytes_fetched"] / sample.told["bytes_needed"])


def _of(samples: Sequence[Sample], case: str, peer: str) -> dict[int, Sample]:
    return {s.repeat: s for s in samples if s.case == case and s.peer == peer}


def _ratio(what: str, samples: Sequence[Sample], case: str, ours: str, theirs: str, bar: float) -> Bar:
    """How many times as fast as the other: the median of the ratios within each turn."""
    mine, other = _of(samples, case, ours), _of(samples, case, theirs)
    ratios = [other[turn].wall_s / mine[turn].wall_s for turn in mine if turn in other]
    return _bar(what, ratios, bar, at_least=True)


def _most(what: str, samples: Sequence[Sample], case: str, figure: Callable[[Sample], float], bar: float) -> Bar:
    return _bar(what, [figure(s) for s in _of(samples, case, "cloudckpt").values()], bar, at_least=False)


def _bar(what: str, figures: Sequence[float], bar: float, *, at_least: bool) -> Bar:
    if not figures:
        return Bar(what, None, bar, at_least)
    return Bar(what, median(figures), bar, at_least, (min(figures), max(figures)))


def print_report(
    console: Console, samples: Sequence[Sample], plans: Sequence[PlanFigures], results: Sequence[Bar]
) -> None:
    for case in dict.fromkeys(sample.case for sample in samples):
        console.print(_case_table(case, [sample for sample in samples if sample.case == case]))
    if plans:
        console.print(_plan_table(plans))
    console.print(_bar_table(results))


def _case_table(case: str, samples: Sequence[Sample]) -> Table:
    """Medians of one case, a row for each peer."""
    columns = ["s", "MB/s", "CPU s/GiB", "requests", "PUTs", "sent/needed", "fetched/needed", "extra MiB"]
    table = Table("peer", title=case, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for peer in dict.fromkeys(sample.peer for sample in samples):
        table.add_row(peer, *_row([sample for sample in samples if sample.peer == peer]))
    return table


def _row(turns: Sequence[Sample]) -> list[str]:
    def middle(figure: Callable[[Sample], float], digits: int) -> str:
        return f"{median(figure(turn) for turn in turns):.{digits}f}"

    remote = bool(turns[0].requests)
    loaded = turns[0].case.startswith("load")
    return [
        middle(lambda s: s.wall_s, 2),
        middle(lambda s: s.nbytes / 1e6 / s.wall_s, 0),
        middle(lambda s: s.cpu_s_per_gib, 2),
        middle(lambda s: sum(s.requests.values()), 0) if remote else "",
        middle(lambda s: s.num_puts, 0) if remote and not loaded else "",
        middle(lambda s: s.server_sent_bytes / s.nbytes, 3) if remote and loaded else "",
        middle(_overfetch, 3) if loaded and "bytes_needed" in turns[0].told else "",
        middle(lambda s: s.extra_rss_bytes / MIB, 0),
    ]


def _plan_table(plans: Sequence[PlanFigures]) -> Table:
    table = Table("planning, one core", "ranks", "tensors", "chunks", "s", title="plan", title_justify="left")
    for plan in plans:
        sizes = [plan.num_ranks, plan.num_tensors, plan.num_chunks]
        table.add_row(plan.what, *(f"{size:,}" for size in sizes), f"{plan.seconds:.2f}")
    return table


def _bar_table(results: Sequence[Bar]) -> Table:
    table = Table("must hold", "bar", "figure", "least .. most", "", title="bars", title_justify="left")
    verdicts = {True: "[green]PASS[/]", False: "[red]MISS[/]", None: "not measured"}
    for bar in results:
        figure = "" if bar.figure is None else f"{bar.figure:.3g}"
        spread = "" if bar.spread is None else f"{bar.spread[0]:.3g} .. {bar.spread[1]:.3g}"
        table.add_row(bar.what, f"{'>=' if bar.at_least else '<='} {bar.bar:g}", figure, spread, verdicts[bar.passes])
    return table


def write_json(
    path: Path,
    samples: Sequence[Sample],
    plans: Sequence[PlanFigures],
    results: Sequence[Bar],
    *,
    mib: int,
    procs: int,
) -> None:
    packages = ("torch", "obstore", "s3fs", "s3torchconnector", "zarr")
    document = {
        "setup": {
            "mib": mib,
            "procs": procs,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "packages": {name: version(name) for name in packages},
        },
        "bars": [asdict(bar) | {"passes": bar.passes} for bar in results],
        "plans": [asdict(plan) for plan in plans],
        "samples": [asdict(sample) for sample in samples],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str))
