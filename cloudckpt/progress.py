"""Progress of a save or load: a bar or lines on one rank, or a function of the caller's."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

Progress: TypeAlias = bool | Callable[[int, int], None] | None
Advance: TypeAlias = Callable[[int], None]

LINE_INTERVAL_S = 10.0
"""How often a line is written where there is no terminal: a log file is read by people, too."""


@contextmanager
def start_progress(progress: Progress, title: str, total: int, *, show: bool) -> Iterator[Advance]:
    """Yields a function that any thread calls with the bytes that it has just finished.

    Bytes that have to be sent again are taken back, as a negative number. What is shown goes to standard error.
    """
    if callable(progress):
        yield _counting(progress, total)
    elif progress and show:
        with _bar(title, total) if _is_live() else _lines(title, total, sys.stderr) as advance:
            yield advance
    else:
        yield lambda _: None


def _counting(report: Callable[[int, int], None], total: int) -> Advance:
    lock = threading.Lock()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            report(done, total)

    return advance


def _is_live() -> bool:
    """Whether what was written can be drawn over."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal or console.is_jupyter


@contextmanager
def _bar(title: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)


@contextmanager
def _lines(title: str, total: int, out: TextIO, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """Plain lines, now and then and at the end; none for what is over sooner."""
    start_s = told_s = clock()
    done = told = 0

    def tell(now_s: float) -> None:
        nonlocal told, told_s
        told, told_s = done, now_s
        speed = done / max(now_s - start_s, 1e-9)
        left = f", {(total - done) / speed:.0f} s left" if 0 < done < total else ""
        share = 100 * done // total if total else 100
        out.write(f"{title}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({share} %), {speed / 1e6:,.1f} MB/s{left}\n")
        out.flush()

    def report(now_done: int, _: int) -> None:
        nonlocal done
        done = now_done
        now_s = clock()
        if now_s - told_s >= LINE_INTERVAL_S:
            tell(now_s)

    yield _counting(report, total)
    if 0 < told < done:
        tell(clock())
