"""``cloudckpt copy``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cloudckpt._copy import CopyReport, copy
from cloudckpt.cli.bars import progress_bar
from cloudckpt.cli.text import human_bytes, printable

MAX_STEPS_NAMED = 20


def copy_checkpoints(
    src: str,
    dst: str,
    src_options: Mapping[str, Any] | None,
    dst_options: Mapping[str, Any] | None,
    *,
    overwrite: bool,
    trust_sizes: bool,
) -> None:
    start = time.monotonic()
    with progress_bar("copy") as progress:
        report = copy(
            src,
            dst,
            overwrite=overwrite,
            trust_sizes=trust_sizes,
            src_options=src_options,
            dst_options=dst_options,
            progress=progress,
        )
    print(*_lines(report, time.monotonic() - start), sep="\n")


def _lines(report: CopyReport, seconds: float) -> list[str]:
    sent = f"{report.num_objects} objects, {human_bytes(report.nbytes)} sent, {seconds:.1f} s"
    kept = f"; {human_bytes(report.nbytes_present)} were there" if report.nbytes_present else ""
    lines = []
    if report.steps:
        lines.append(f"copied {_named(report.steps)} to {printable(report.url)}: {sent}{kept}")
    if report.steps_present:
        repaired = f", lacked {sent}" if report.num_objects and not report.steps else ""
        lines.append(f"there already: {_named(report.steps_present)} at {printable(report.url)}{repaired}")
    return lines


def _named(steps: Sequence[int | None]) -> str:
    known = [str(step) for step in steps if step is not None]
    if not known:
        return f"{len(steps)} checkpoints" if len(steps) != 1 else "a checkpoint"
    more = f" and {len(known) - MAX_STEPS_NAMED} more" if len(known) > MAX_STEPS_NAMED else ""
    return f"step{'s' if len(known) > 1 else ''} {', '.join(known[:MAX_STEPS_NAMED])}{more}"
