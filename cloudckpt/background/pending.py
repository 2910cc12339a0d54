"""Saves that go on in the background: what the caller holds of them, and that none is forgotten."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # its exit hook must be registered before the one below
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack

from cloudckpt._exit_status import ask_at_exit
from cloudckpt._write import Commit
from cloudckpt.errors import InvalidStateError
from cloudckpt.progress import Progress, start_progress

log = logging.getLogger("cloudckpt")


class PendingSave:
    """A save whose bytes are this library's own by now: the state may change while it goes on.

    Not collective, and safe to use from any thread. Whoever drops it without looking at the result is told at
    the end of the process: a save that failed unseen is printed, and the process ends with status 1.
    """

    def __init__(self, url: str, step: int | None) -> None:
        self.url = url
        self.step = step
        self._future: Future[Commit] = Future()
        self._progress = (0, 0)

    def __repr__(self) -> str:
        state = "done" if self.done() else "running"
        return f"<PendingSave {self.url!r} step={self.step} {state}>"

    def result(self, timeout_s: float | None = None) -> Commit:
        """Wait for the commit; raises what `save` raises, or TimeoutError after ``timeout_s`` (the save goes on)."""
        if not wait([self._future], timeout_s).done:
            raise TimeoutError(f"the save to {self.url} was not done within {timeout_s:g} s")
        _UNFINISHED.forget(self)
        return self._future.result()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, well or not; False if it has not within ``timeout_s``."""
        return bool(wait([self._future], timeout_s).done)

    def when_failed(self, tell: Callable[[BaseException], object]) -> None:
        """Call ``tell`` once it has failed, in whatever thread that is known. Does not count as having seen it."""

        def end(future: Future[Commit]) -> None:
            if (error := future.exception()) is not None:
                tell(error)

        self._future.add_done_callback(end)

    @property
    def is_unseen(self) -> bool:
        """Whether it has failed, and nobody has looked."""
        return self.done() and self in tuple(_UNFINISHED)

    def wait_staged(self) -> None:
        """Return once the private copy exists, as it does by the time that `async_save` returns."""

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of this rank that have been handed to the store, and in all; (0, 0) before the plan is known."""
        return self._progress

    @property
    def failure(self) -> BaseException | None:
        """What went wrong, if it has ended and did; looking at it counts as having seen it."""
        if not self._future.done():
            return None
        _UNFINISHED.forget(self)
        return self._future.exception()


class Running:
    """The other side of a `PendingSave`: what an executor does with it.

    ``on_end`` runs in any case, first of all. ``is_known``: it has failed already, and the caller knows. What functions
    of the user's raise is logged: a save is not lost, nor waited for in vain, for a bar that cannot be drawn.
    """

    def __init__(
        self,
        pending: PendingSave,
        *,
        progress: Progress = None,
        show: bool = False,
        on_commit: Callable[[Commit], object] | None = None,
        on_end: Callable[[], None] | None = None,
        is_known: bool = False,
    ) -> None:
        self.pending = pending
        self._progress = progress
        self._show = show
        self._on_commit = on_commit
        self._on_end = on_end
        self._is_known = is_known
        self._stack = ExitStack()
        self._advance: Callable[[int], None] | None = None
        self._is_shown = True
        _UNFINISHED.add(pending)

    def note(self, done: int, total: int) -> None:
        """So many bytes have been sent, of so many. From one thread at a time."""
        before = self.pending._progress[0]
        self.pending._progress = (done, total)
        if not self._is_shown:
            return
        try:
            if self._advance is None:
                bar = start_progress(self._progress, "save", total, show=self._show)
                self._advance = self._stack.enter_context(bar)
            self._advance(done - before)
        except BaseException:  # sys.exit() would end this thread, and no more
            self._is_shown = False
            log.exception("the save to %s goes on, but its progress cannot be shown", self.pending.url)

    def succeed(self, commit: Commit) -> None:
        try:
            self._end()
            if self._on_commit is not None:
                self._on_commit(commit)
        except BaseException:  # as above
            log.exception("%s is committed, but on_commit failed", commit.url)
        finally:
            self.pending._future.set_result(commit)
            _UNFINISHED.forget(self.pending)

    def fail(self, error: BaseException) -> None:
        try:
            self._end()
            if self._is_known:
                _UNFINISHED.forget(self.pending)
            else:
                log.error("the background save to %s failed: %s", self.pending.url, error)
        finally:
            self.pending._future.set_exception(error)

    def refuse(self) -> None:
        """It has not begun, and the caller knows."""
        _UNFINISHED.forget(self.pending)
        self._end()

    def _end(self) -> None:
        try:
            self._stack.close()
        finally:
            if self._on_end is not None:
                self._on_end()


class _Unfinished:
    """The saves of this process that are running, or failed unseen; and what ends the executors in the end."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """As empty: a forked child has none of the parent's threads and helpers, and waits for nothing of theirs."""
        self._lock = threading.Lock()
        self.is_too_late = False
        self._saves: list[PendingSave] = []
        self.closers: list[Callable[[], None]] = []

    def add(self, pending: PendingSave) -> None:
        with self._lock:
            self._saves.append(pending)

    def forget(self, pending: PendingSave) -> None:
        with self._lock:
            if pending in self._saves:
                self._saves.remove(pending)

    def __iter__(self) -> Iterator[PendingSave]:
        with self._lock:
            return iter(tuple(self._saves))


_UNFINISHED = _Unfinished()


def check_time() -> None:
    """Raises InvalidStateError where the process ends without waiting for what would begin now."""
    if _UNFINISHED.is_too_late:
        raise InvalidStateError(
            "nothing can go on in the background of an interpreter that is ending: save before that"
        )


def close_at_exit(close: Callable[[], None]) -> None:
    """``close`` is called when the interpreter ends, after the last save has."""
    _UNFINISHED.closers.append(close)


def wait_for_all() -> None:
    """Until no background save of this process is running, those included that others begin meanwhile."""
    while running := [pending._future for pending in _UNFINISHED if not pending.done()]:
        wait(running)


def _wait_at_exit() -> None:
    for pending in _UNFINISHED:
        if not pending.done():
            log.info("waiting for the background save to %s before the process ends", pending.url)
    wait_for_all()
    for close in _UNFINISHED.closers:
        close()


def _unseen_failures() -> Sequence[str]:
    failed = [pending for pending in _UNFINISHED if pending.done()]
    return [
        f"cloudckpt: the background save to {pending.url} failed: {type(error).__name__}: {error}"
        for pending in failed
        if (error := pending._future.exception()) is not None
    ]


# Threads that are waited for at exit run when thread pools are already closed, which uploads need: so wait before.
try:
    threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]
except RuntimeError:
    _UNFINISHED.is_too_late = True
ask_at_exit(_unseen_failures)
os.register_at_fork(after_in_child=_UNFINISHED.begin)
