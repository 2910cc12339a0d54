"""``cloudckpt verify``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from cloudckpt.cli.bars import progress_bar
from cloudckpt.cli.text import human_bytes, printable
from cloudckpt.verify import Fault, verify

MAX_LINES_PER_OBJECT = 20


def verify_checkpoint(url: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Prints the faults; whether there are none."""
    start = time.monotonic()
    with progress_bar("verify") as progress:
        report = verify(url, storage_options=storage_options, progress=progress)
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
