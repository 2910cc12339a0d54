"""Jobs whose ranks are threads, one of which runs at a time, from one call of a store to the next.

So a job can be held between any two effects on its store while other jobs go on, and be killed there; and the same
choices lead to the same course of events. What is simulated is the processes and how they meet (`Rank` is a `Group`),
the rest is the real thing, down to the bytes in a `MemoryStore`.
"""

from __future__ import annotations

import itertools
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pytest

from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError, RankError, StoreError
from cloudckpt.store.base import Store
from cloudckpt.store.memory import MemoryStore

K = TypeVar("K")

CONFIG = Config(chunk_bytes=16, pack_bytes=24, num_threads=1)
"""One thread, so that a rank is one thing at a time. With it a small tensor has several chunks and packs."""

STORE_CALLS = {
    "get",
    "size",
    "put",
    "put_if_absent",
    "honours_conditions",
    "list",
    "leftovers",
    "common_prefixes",
    "delete",
}

HANG_S = 60.0


class KilledError(BaseException):
    """The process that a thread stands for is no more. No `Exception`: nobody may handle it."""


@dataclass(frozen=True)
class Fault:
    """What happens at event number ``at`` of a job; an event is the moment before or after a call of a store.

    "refuse" is an error of the store: after a call its effect is there, and its answer lost. "repeat" is a call that
    is made again since its answer was lost.
    """

    at: int
    kind: Literal["kill job", "kill rank", "refuse", "repeat"]


class Rank:
    """A process of a job, as a `Group` and as what its stores ask before and after each call."""

    def __init__(self, job: Job, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.job = job
        self.cancel = threading.Event()  # never set: here all parts end soon
        self.number = next(_NUMBERS)
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        """Where it is held: whether it may go on."""
        self._kept: dict[type, Any] = {}
        self._rounds = 0
        _RANKS[self.number] = self

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """By which stores that are opened for this rank know it, in whatever thread."""
        return {"simulated rank": self.number}

    def kept(self, kind: type[K]) -> K:
        found = self._kept.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found

    def round(self, part: Callable[[], Any], combine: Callable[[Sequence[Any]], Any], *, is_last: bool = False) -> Any:
        self._rounds += 1
        meeting = self.job.meetings.setdefault(self._rounds, Meeting())
        meeting.parts[self.rank] = _attempted(part)
        dead = self.job.dead
        if self.rank == 0:
            self.hold(lambda: len(meeting.parts.keys() | dead) == self.size)
            meeting.outcome = _concluded(meeting.parts, self.size, combine)
        else:
            self.hold(lambda: meeting.outcome is not None or 0 in dead)
        outcome = meeting.outcome or RankError("rank 0: killed", causes={0: "killed"})
        if isinstance(outcome, CloudckptError):
            raise outcome
        return pickle.loads(outcome)

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        if self._event(f"before {name}") == "repeat" and name in STORE_CALLS:
            function(*args)
        try:
            return function(*args)
        finally:
            self._event(f"after {name}")

    def hold(self, ready: Callable[[], bool]) -> None:
        """Let others run, until the job lets this rank go on."""
        if self.rank not in self.job.dead:
            self.ready = ready
            self.job.idle.release()
            assert self.go.acquire(timeout=HANG_S)
        if self.rank in self.job.dead:
            raise KilledError

    def _event(self, name: str) -> str | None:
        self.hold(lambda: True)
        job = self.job
        job.events.append(f"rank {self.rank}: {name}")
        if job.fault is None or len(job.events) - 1 != job.fault.at:
            return None
        if job.fault.kind == "refuse":
            raise StoreError(f"refused {name}")
        if job.fault.kind == "repeat":
            return "repeat"
        job.dead |= {*range(self.size)} if job.fault.kind == "kill job" else {self.rank}
        raise KilledError


@dataclass
class Meeting:
    parts: dict[int, bytes | CloudckptError] = field(default_factory=dict)
    outcome: bytes | CloudckptError | None = None


def _attempted(part: Callable[[], Any]) -> bytes | CloudckptError:
    try:
        return pickle.dumps(part())
    except CloudckptError as error:
        return error


def _concluded(
    parts: Mapping[int, bytes | CloudckptError], size: int, combine: Callable[[Sequence[Any]], Any]
) -> bytes | CloudckptError:
    errors = [part for part in parts.values() if isinstance(part, CloudckptError)]
    if len(errors) == size and len({(type(error), str(error)) for error in errors}) == 1:
        return errors[0]
    causes = {rank: str(part) for rank, part in parts.items() if isinstance(part, CloudckptError)}
    causes |= {rank: "killed" for rank in range(size) if rank not in parts}
    if causes:
        return RankError("; ".join(f"rank {rank}: {text}" for rank, text in causes.items()), causes=causes)
    return _attempted(lambda: combine([pickle.loads(parts[rank]) for rank in range(size)]))  # type: ignore[arg-type]


class Job:
    """``size`` ranks that do one thing after another, until they are killed. ``seed``: of the order of their events."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.ranks = [Rank(self, rank, size) for rank in range(size)]
        self.meetings: dict[int, Meeting] = {}
        self.dead: set[int] = set()
        self.idle = threading.Semaphore(0)
        self.events: list[str] = []
        self.fault: Fault | None = None
        self.outcomes: dict[int, Any] = {}
        """Of the last thing done, by rank: what was returned, or the error; a killed rank has none."""
        self._dice = random.Random(seed)
        self._threads: dict[int, threading.Thread] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._threads)

    def start(self, function: Callable[[Rank], Any], fault: Fault | None = None) -> None:
        assert not self.is_busy
        assert not self.dead
        self.events, self.fault, self.outcomes = [], fault, {}
        for rank in self.ranks:
            rank.ready = lambda: True
            thread = threading.Thread(target=self._run, args=(rank, function), daemon=True)
            self._threads[rank.rank] = thread
            thread.start()

    def advance(self, num_events: int | None = None) -> None:
        """Go on until so many events have passed, or (None) to the end."""
        end = None if num_events is None else len(self.events) + num_events
        while self._threads and (end is None or len(self.events) < end):
            ready = [r for r in self._threads if r in self.dead or self.ranks[r].ready is None or self.ranks[r].ready()]
            assert ready, f"all ranks wait for each other after {self.events[-5:]}"
            rank = self.ranks[self._dice.choice(ready)]
            rank.go.release()
            assert self.idle.acquire(timeout=HANG_S), f"rank {rank.rank} hangs after {self.events[-5:]}"
            if rank.rank in self.outcomes or rank.rank in self.dead:
                self._threads.pop(rank.rank).join(HANG_S)

    def run(self, function: Callable[[Rank], Any], fault: Fault | None = None) -> list[Any]:
        self.start(function, fault)
        self.advance()
        return [self.outcomes.get(rank) for rank in range(self.size)]

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        self.dead |= {*(range(self.size) if ranks is None else ranks)}

    def _run(self, rank: Rank, function: Callable[[Rank], Any]) -> None:
        assert rank.go.acquire(timeout=HANG_S)
        try:
            if rank.rank not in self.dead:
                self.outcomes[rank.rank] = function(rank)
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.outcomes[rank.rank] = error
        self.idle.release()


_NUMBERS = itertools.count()
_RANKS: weakref.WeakValueDictionary[int, Rank] = weakref.WeakValueDictionary()


class HeldStore:
    """A store of one rank. Its calls are events."""

    num_streams = 1

    def __init__(self, real: Store, rank: Rank) -> None:
        self._real, self._rank = real, rank

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in STORE_CALLS:
            return value
        return lambda *args: self._rank.call(name, lambda: _at_once(value(*args)))

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Any]:
        yield from self._rank.call("stream", lambda: [*self._real.stream(key, byte_offset, nbytes)])

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> HeldUpload:
        return HeldUpload(self._rank.call("open_upload", self._real.open_upload, key, nbytes_hint), self._rank)


def _at_once(answer: Any) -> Any:
    """The effect of a call, and what it tells of others', belong to the moment of the call."""
    return iter([*answer]) if isinstance(answer, Iterator) else answer


class HeldUpload:
    """Of its writes only the first is an event: none of them has an effect that others see."""

    def __init__(self, real: Any, rank: Rank) -> None:
        self._real, self._rank = real, rank
        self._is_new = True

    def write(self, data: Any) -> None:
        if self._is_new:
            self._is_new = False
            self._rank.call("upload.write", self._real.write, data)
        else:
            self._real.write(data)

    def close(self) -> None:
        self._rank.call("upload.close", self._real.close)

    def abort(self) -> None:
        self._real.abort()


def resolve(url: str, storage_options: Mapping[str, Any] | None = None, config: Config | None = None) -> Any:
    assert storage_options is not None
    return HeldStore(MemoryStore(str(url)), _RANKS[storage_options["simulated rank"]])


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, ``group=`` takes a `Rank`, and its ``storage_options`` open what it is to work on."""
    from cloudckpt import _fallback, _load, _save, _write
    from cloudckpt.transfer import pool

    for module in (_save, _load):
        monkeypatch.setattr(module, "make_group", lambda group, timeout_s: group)
    for module in (_fallback, _load, _write):
        monkeypatch.setattr(module, "resolve", resolve)
    monkeypatch.setattr(pool, "GRACE_S", HANG_S)  # a rank that is held is not a rank that stalls
