"""``cloudckpt verify``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from cloudckpt.cli.text import human_bytes, printable
from cloudckpt.progress import Progress
from cloudckpt.verify import Fault, VerifyReport, verify

MAX_LINES_PER_OBJECT = 20


def verify_checkpoint(url: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Prints the faults; whether there are none."""
    start = time.monotonic()
    report = _with_bar(url, storage_options) if sys.stderr.isatty() else verify(url, storage_options=storage_options)
    _print_faults(report.faults)
    read = f"{report.num_objects} objects, {report.num_chunks} chunks, {human_bytes(report.nbytes)}"
    verdict = "no faults" if report.ok else f"{len(report.faults)} faults"
    print(f"{verdict} in {printable(report.url)}: {read}, {time.monotonic() - start:.1f} s")
    return report.ok


def _print_faults(faults: tuple[Fault, ...]) -> None:
    seen: Counter[str] = Counter()
    for fault in faults:
        seen[fault.key] += 1
        if seen[fault.key] <= MAX_LINES_PER_OBJECT:
            print(printable(str(fault)))
    for key, count in seen.items():
        if count > MAX_LINES_PER_OBJECT:
            print(f"... and {count - MAX_LINES_PER_OBJECT} more faults in object {printable(key)}")


def _with_bar(url: str, storage_options: Mapping[str, Any] | None) -> VerifyReport:
    """On standard error, so that the output can be kept."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("verify"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)
        report: Progress = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        return verify(url, storage_options=storage_options, progress=report)
