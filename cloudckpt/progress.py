"""Progress of a save or load: a bar on one rank, or a function of the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Progress: TypeAlias = bool | Callable[[int, int], None] | None
Advance: TypeAlias = Callable[[int], None]


@contextmanager
def start_progress(progress: Progress, title: str, total: int, *, show: bool) -> Iterator[Advance]:
    """Yields a function that any thread calls with the bytes that it has just finished."""
    if callable(progress):
        yield _counting(progress, total)
    elif progress and show:
        with _bar(title, total) as advance:
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


@contextmanager
def _bar(title: str, total: int) -> Iterator[Advance]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)
