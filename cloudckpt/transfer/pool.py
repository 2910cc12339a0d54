"""Many blocking calls at a time, within one budget of bytes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from cloudckpt.errors import CloudckptError, InterruptedTransferError


class ByteBudget:
    """Host memory shared by threads. A request for more than there is gets all of it, alone."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free = nbytes
        self._changed = threading.Condition()

    def acquire(self, nbytes: int) -> int:
        """Wait for the bytes; returns what ``release`` must be given."""
        nbytes = min(nbytes, self._nbytes)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        return nbytes

    def release(self, nbytes: int) -> None:
        with self._changed:
            self._free += nbytes
            self._changed.notify_all()


GRACE_S = 1.5
"""How long tasks get to see that all is over. A request can stall for longer than a job may wait for its failure."""

_POLL_S = 0.1


def _submitted(pool: ThreadPoolExecutor, task: Callable[[], None]) -> Future[None]:
    try:
        return pool.submit(task)
    except RuntimeError as error:  # in an atexit handler, or no thread can be started
        raise CloudckptError(f"nothing can be transferred any more: {error}; save and load before that") from error


def run_all(
    tasks: Iterable[Callable[[], None]],
    *,
    num_threads: int,
    cancel: threading.Event | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Run every task; after the first failure nothing new is begun, and that failure is raised.

    ``cancel``, set from outside, ends it with InterruptedTransferError. ``stop`` is set in both
    cases: tasks must look at it between two steps. One that does not end within `GRACE_S` is left
    to end by itself, with its thread.
    """
    cancel, stop = cancel or threading.Event(), stop or threading.Event()
    pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="cloudckpt")
    iterator = iter(tasks)
    running: set[Future[None]] = set()
    failure: BaseException | None = None
    deadline = math.inf
    try:
        while time.monotonic() < deadline:
            if cancel.is_set() and failure is None:
                failure = InterruptedTransferError("stopped, since another rank failed")
            if failure is not None and not stop.is_set():
                stop.set()
                deadline = time.monotonic() + GRACE_S
            # The iterator may make the buffers that its tasks send: never run ahead of the threads.
            while failure is None and len(running) < 2 * num_threads:
                task = next(iterator, None)
                if task is None:
                    break
                running.add(_submitted(pool, task))
            if not running:
                break
            done, running = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                error = None if future.cancelled() else future.exception()
                if error is not None and (failure is None or isinstance(failure, InterruptedTransferError)):
                    failure = error
    finally:
        pool.shutdown(wait=not running, cancel_futures=True)
    if failure is not None:
        raise failure
