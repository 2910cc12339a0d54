"""Many blocking calls at a time, within one budget of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from cloudckpt.errors import InterruptedTransferError


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


def run_all(tasks: Iterable[Callable[[], None]], *, num_threads: int, cancel: threading.Event) -> None:
    """Run every task; after the first failure nothing new is begun, and that failure is raised.

    ``cancel`` set from outside ends it with InterruptedTransferError; a failure here sets it, so
    that tasks under way can stop.
    """
    iterator = iter(tasks)
    running: set[Future[None]] = set()
    failure: BaseException | None = None
    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="cloudckpt") as pool:
        while True:
            # The iterator may make the buffers that its tasks send: never run ahead of the threads.
            while failure is None and not cancel.is_set() and len(running) < 2 * num_threads:
                task = next(iterator, None)
                if task is None:
                    break
                running.add(pool.submit(task))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                error = future.exception()
                if error is not None and (failure is None or isinstance(failure, InterruptedTransferError)):
                    failure = error
                    cancel.set()
    if failure is not None:
        raise failure
    if cancel.is_set():
        raise InterruptedTransferError("stopped, since another rank failed")
