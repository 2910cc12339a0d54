"""What one process knows of the saves of its run: which are going on, and how the others ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cloudckpt._write import Commit
from cloudckpt.background.pending import PendingSave
from cloudckpt.format.keys import step_dir


@dataclass(frozen=True)
class SaveInFlight:
    """``done_bytes`` of this rank's ``nbytes`` were handed to the store; both are 0 before they are known."""

    step: int
    done_bytes: int
    nbytes: int
    elapsed_s: float


@dataclass(frozen=True)
class RunStatus:
    """What this process knows of its run, without asking anybody.

    ``last_step``, ``last_url``: of the last save of this process that is durable; the URL is that of the fallback if
    it went there. ``num_failed``: saves that have failed since. ``last_error``, ``last_error_step``: of the last
    failure, also after later saves have succeeded.
    """

    last_step: int | None = None
    last_url: str | None = None
    in_flight: tuple[SaveInFlight, ...] = ()
    num_failed: int = 0
    last_error: str | None = None
    last_error_step: int | None = None


class Flight:
    """A save that is going on. ``pending``: of one in the background."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.pending: PendingSave | None = None
        self._progress = (0, 0)
        self._started_s = time.monotonic()

    def watch(self, report: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        """A progress function that notes what it is told, and passes it on to ``report``."""

        def note(done: int, total: int) -> None:
            self._progress = (done, total)
            if report is not None:
                report(done, total)

        return note

    def snapshot(self) -> SaveInFlight:
        done, total = self._progress if self.pending is None else self.pending.progress
        return SaveInFlight(self.step, done, total, time.monotonic() - self._started_s)


class Flights:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: list[Flight] = []
        self._status = RunStatus()
        self._texts: list[str] = []

    def begin(self, step: int) -> Flight:
        flight = Flight(step)
        with self._lock:
            self._flights.append(flight)
        return flight

    def end(self, flight: Flight) -> None:
        """Harmless if repeated: a save may end in its own thread."""
        with self._lock:
            if flight in self._flights:
                self._flights.remove(flight)

    def succeed(self, flight: Flight, commit: Commit) -> None:
        self.end(flight)
        with self._lock:
            self._status = replace(self._status, last_step=commit.step, last_url=commit.url, num_failed=0)

    def fail(self, flight: Flight, error: BaseException, text: str) -> bool:
        """Whether this call was the first to tell. ``text`` is left for `take_texts` then."""
        with self._lock:
            if flight not in self._flights:
                return False
            self._flights.remove(flight)
            self._texts.append(text)
            num_failed = self._status.num_failed + 1
            self._status = replace(
                self._status, num_failed=num_failed, last_error=str(error), last_error_step=flight.step
            )
        return True

    def take_texts(self) -> list[str]:
        """Of the failures since the last call."""
        with self._lock:
            texts, self._texts = self._texts, []
            return texts

    def directories(self) -> Sequence[str]:
        """Those that are being saved to."""
        with self._lock:
            return [step_dir(flight.step) for flight in self._flights]

    def status(self) -> RunStatus:
        with self._lock:
            return replace(self._status, in_flight=tuple(flight.snapshot() for flight in self._flights))
