"""What a rank did in one save or load: stage times, one line in the log, and spans and metrics with OpenTelemetry.

Nothing is configured here: who wants to see the lines sets up `logging`, who wants the rest sets up OpenTelemetry.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram
    from opentelemetry.trace import Tracer

Operation = Literal["save", "load"]

log = logging.getLogger("cloudckpt")


@dataclass(frozen=True)
class Stage:
    """A stretch of time, in nanoseconds since the epoch; the parts of one stage need not be in one piece."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Record:
    """One rank's part of a save or load that has ended. ``nbytes``: sent to or fetched from the store.

    ``earlier``: seconds of stages before ``start_ns``, such as a background save's in the foreground.
    ``error``: None, or what it ended with.
    """

    operation: Operation
    url: str
    step: int | None
    rank: int
    size: int
    start_ns: int
    end_ns: int
    stages: tuple[Stage, ...]
    nbytes: int
    num_requests: int
    num_retries: int
    earlier: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, in the order in which they were first begun."""
        total = dict(self.earlier)
        for stage in self.stages:
            total[stage.name] = total.get(stage.name, 0.0) + (stage.end_ns - stage.start_ns) / 1e9
        return total

    def __str__(self) -> str:
        duration_s = (self.end_ns - self.start_ns) / 1e9
        done = {"save": "saved", "load": "loaded"}[self.operation]
        what = done if self.error is None else f"{self.operation} failed:"
        step = "" if self.step is None else f" step {self.step}"
        speed = f" ({self.nbytes / duration_s / 1e6:,.1f} MB/s)" if duration_s else ""
        stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.seconds.items())
        text = (
            f"{what} {self.url}{step}, rank {self.rank} of {self.size}: {self.nbytes / 1e6:,.1f} MB in "
            f"{duration_s:.3f} s{speed}; {stages}; {self.num_requests} requests, {self.num_retries} retries"
        )
        return text if self.error is None else f"{text}; {self.error}"


class Recorder:
    """Takes the times of one save or load on one rank. For one thread.

    Whoever runs the operation sets ``url``, ``step`` and the counts as it learns them.
    """

    def __init__(self, operation: Operation, url: str, rank: int, size: int) -> None:
        self.url = url
        self.step: int | None = None
        self.nbytes = self.num_requests = self.num_retries = 0
        self.earlier: Mapping[str, float] = {}
        self._operation: Operation = operation
        self._rank, self._size = rank, size
        # Durations by a clock that nobody sets, from a start that others can compare.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._start_ns = self._now_ns()
        self._stages: list[Stage] = []
        self._open: list[tuple[str, int]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside belongs to this stage; a stage within another one is not part of that."""
        self._cut()
        self._open.append((name, self._now_ns()))
        try:
            yield
        finally:
            self._cut()
            self._open.pop()
            if self._open:
                self._open[-1] = (self._open[-1][0], self._now_ns())

    @property
    def seconds(self) -> dict[str, float]:
        """Of what has ended so far, by stage."""
        return self.finished(None).seconds

    def finished(self, error: BaseException | None) -> Record:
        return Record(
            operation=self._operation,
            url=self.url,
            step=self.step,
            rank=self._rank,
            size=self._size,
            start_ns=self._start_ns,
            end_ns=self._now_ns(),
            stages=tuple(self._stages),
            nbytes=self.nbytes,
            num_requests=self.num_requests,
            num_retries=self.num_retries,
            earlier=self.earlier,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )

    def _cut(self) -> None:
        """End the stretch of the stage that is open."""
        if self._open:
            name, start_ns = self._open[-1]
            self._stages.append(Stage(name, start_ns, self._now_ns()))

    def _now_ns(self) -> int:
        return self._offset_ns + time.perf_counter_ns()


def slowest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each stage's largest time, in the order of the stages."""
    found: dict[str, float] = {}
    for seconds in ranks:
        for name, value in seconds.items():
            found[name] = max(found.get(name, 0.0), value)
    return found


@contextmanager
def recorded(operation: Operation, url: str, rank: int, size: int) -> Iterator[Recorder]:
    """One save or load: what it did is emitted at its end, whether it succeeds or not."""
    recorder = Recorder(operation, url, rank, size)
    try:
        yield recorder
    except BaseException as error:
        _receiver(recorder.finished(error))
        raise
    _receiver(recorder.finished(None))


def emit(record: Record) -> None:
    """Log one line, and hand spans and metrics to OpenTelemetry where it is installed."""
    log.info("%s", record)
    instruments = _instruments()
    if instruments is not None:
        instruments.record(record)


_receiver: Callable[[Record], None] = emit


def divert(receiver: Callable[[Record], None]) -> None:
    """Records of this process go to ``receiver`` from now on: to another process, which emits them."""
    global _receiver  # noqa: PLW0603  # a process has one
    _receiver = receiver


@dataclass(frozen=True)
class _Instruments:
    tracer: Tracer
    duration: Histogram
    stage_duration: Histogram
    traffic: Counter
    requests: Counter
    retries: Counter

    def record(self, record: Record) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context

        labels = {"cloudckpt.operation": record.operation}
        where: dict[str, str | int] = {
            "cloudckpt.url": record.url,
            "cloudckpt.rank": record.rank,
            "cloudckpt.world_size": record.size,
        }
        if record.step is not None:
            where["cloudckpt.step"] = record.step
        span = self.tracer.start_span(
            f"cloudckpt.{record.operation}",
            start_time=record.start_ns,
            attributes={
                **where,
                "cloudckpt.bytes": record.nbytes,
                "cloudckpt.requests": record.num_requests,
                "cloudckpt.retries": record.num_retries,
            },
        )
        context = set_span_in_context(span)
        for stage in record.stages:
            name = f"cloudckpt.{record.operation}.{stage.name}"
            self.tracer.start_span(name, context=context, start_time=stage.start_ns).end(stage.end_ns)
        if record.error is not None:
            span.set_status(StatusCode.ERROR, record.error)
        span.end(record.end_ns)
        outcome = "success" if record.error is None else "error"
        self.duration.record((record.end_ns - record.start_ns) / 1e9, {**labels, "cloudckpt.outcome": outcome})
        for name, seconds in record.seconds.items():
            self.stage_duration.record(seconds, {**labels, "cloudckpt.stage": name})
        self.traffic.add(record.nbytes, labels)
        self.requests.add(record.num_requests, labels)
        self.retries.add(record.num_retries, labels)


@cache
def _instruments() -> _Instruments | None:
    """Those of whatever provider is set up, now or later; None without OpenTelemetry's API."""
    try:
        from opentelemetry import metrics, trace
    except ImportError:
        return None
    meter = metrics.get_meter("cloudckpt")
    return _Instruments(
        trace.get_tracer("cloudckpt"),
        meter.create_histogram("cloudckpt.operation.duration", "s", "time that a save or load takes on one rank"),
        meter.create_histogram("cloudckpt.stage.duration", "s", "time that a stage of it takes on one rank"),
        meter.create_counter("cloudckpt.bytes", "By", "bytes sent to the store by saves, fetched from it by loads"),
        meter.create_counter("cloudckpt.requests", "{request}", "requests to the store"),
        meter.create_counter("cloudckpt.retries", "{request}", "requests that were repeated"),
    )
