"""Ranks that meet at keys of torch.distributed's store.

What is small travels through these keys as well, compressed. What is large is sent as bytes, from one rank to the
coordinator or from the coordinator to all, once the keys have said how many, and that both ends are there.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from cloudckpt.errors import InterruptedTransferError
from cloudckpt.pytorch.connections import device_types, make_gloo, own_client, rendezvous_store
from cloudckpt.pytorch.rounds import (
    COORDINATOR,
    Failure,
    combined,
    kept_in,
    packed_part,
    rank_error,
    unpacked,
)

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")

HEARTBEAT_S = 1.0
"""How often a working rank says that it lives, and looks whether another one failed."""

INLINE_BYTES = 64 * 1024
"""What one rank may send through the store of torch.distributed, which is one process."""

INLINE_TOTAL_BYTES = 8 * 1024 * 1024
"""...and all ranks together."""

GRACE_S = 2.0
"""How long a failed rank may take to the next point at which all agree, before the others stop waiting for it there."""

FAREWELL_S = 2.0
"""How long the coordinator stays for others to read the last outcome, which lies in a store that may end with it."""

SEND_TAG = 0x636B7074
"""Tells what is sent here from what the caller may send over the same group."""


@dataclass(frozen=True)
class _Large:
    """Stands for what is too large for a key, and comes in another way."""

    nbytes: int


@dataclass(frozen=True)
class _Verdict:
    """What the coordinator tells the others: who is late, or that all are here; and the outcome, if it is known yet."""

    causes: dict[int, str]
    outcome: bytes | Failure | _Large | None = None


class Ranks:
    """A torch.distributed group, with gloo among the same ranks where its own backend is another.

    ``ranks``: their global numbers. ``group()``: the group itself; ``control_group()``: gloo.

    ``apart``: a name that all ranks know and that was never used. These then share nothing with other users of the
    group: they have a gloo and a client of the rendezvous store of their own, for use by another thread, and go on
    when the group is destroyed.
    """

    def __init__(self, group: dist.ProcessGroup, *, apart: str | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.cancel = threading.Event()
        self.timeout_s = 600.0
        self.ranks = dist.get_process_group_ranks(group)
        # The caller's group lives as long as the caller wants; what is made here lives as long as this.
        self._weak_group = weakref.ref(group)
        self._rounds = 0
        self._kept: dict[type, Any] = {}
        # Held, since the process of the first rank may be the one that serves it.
        self._served = rendezvous_store()
        if apart is None:
            prefix = f"cloudckpt/{group.group_name}"
            # A group of the same name may have been here before, on the same store.
            epoch = self._served.add(f"{prefix}/epoch/{self.rank}", 1)
            self._store = PrefixStore(f"{prefix}/{epoch}", self._served)
        else:
            self._store = PrefixStore(f"cloudckpt/{apart}", own_client(self._served))
        shares_gloo = apart is None and "cpu" in device_types(group)
        self._gloo = None if shares_gloo else make_gloo(self._store, self.rank, self.size)

    def group(self) -> dist.ProcessGroup:
        group = self._weak_group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def control_group(self) -> Any:
        """A process group or a bare backend, which have the same methods. Ranks are numbered as here."""
        return self._gloo or self.group()

    def kept(self, kind: type[K]) -> K:
        return kept_in(self._kept, kind)

    def round(self, part: Callable[[], T], combine: Callable[[Sequence[T]], R], *, is_last: bool = False) -> R:
        self._rounds += 1
        self.cancel.clear()
        mine: bytes | Failure | None = None
        try:
            with self._sign_of_life():
                mine = packed_part(part, self.tell_failure)
                outcome = self._exchange(mine, combine)
                if is_last or isinstance(outcome, Failure):
                    self._see_off()
        except RuntimeError as error:  # of gloo or of torch's store: the other end of a connection is gone
            text = f"lost touch with the other ranks, one of which was killed or cut off: {error}"
            own = [str(mine.error)] if isinstance(mine, Failure) and not mine.interrupted else []
            raise rank_error({self.rank: "; ".join([*own, text])}) from error
        if isinstance(outcome, Failure):
            raise outcome.error from (mine.error if isinstance(mine, Failure) else None)
        return unpacked(outcome)  # type: ignore[no-any-return]

    def await_work(self, work: dist.Work, members: Sequence[int]) -> None:
        """Wait for a collective among some of the ranks. Raises RankError for those that show no sign of life.

        Asks again and again, since the backend's own wait would keep signals from Python. A rank that has failed
        still comes to where all agree to stop; one that does not within `GRACE_S` was to be in this collective, and
        InterruptedTransferError is raised. The group of the collective is of no use then.
        """
        pause_s, deadline = 0.0002, time.monotonic() + self.timeout_s
        beats: dict[int, bytes] = {}
        failed_at: float | None = None
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.005)
            if self.cancel.is_set():
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > GRACE_S:
                    raise InterruptedTransferError("stopped, since another rank failed in the middle of a collective")
            if time.monotonic() >= deadline:
                now = {r: self._beat(r) for r in members if r != self.rank}
                late = [r for r, beat in now.items() if beat == beats.get(r, b"")]
                if late:
                    raise rank_error(dict.fromkeys(late, f"no sign of life for {self.timeout_s:g} s"))
                beats, deadline = now, time.monotonic() + self.timeout_s
        work.wait()

    def tell_failure(self) -> None:
        """Within a part: the others shall stop, before this rank's part has ended."""
        self._store.set(self._key("failed"), "1")

    def scratch_store(self, name: str) -> PrefixStore:
        """A store of this round's own. All ranks that use it must give the same name, once."""
        return PrefixStore(self._key(f"scratch/{name}"), self._store)

    def _exchange(self, mine: bytes | Failure, combine: Callable[[Sequence[T]], R]) -> bytes | Failure:
        inline_bytes = min(INLINE_BYTES, INLINE_TOTAL_BYTES // self.size)
        self._set(f"here/{self.rank}", _inline(mine, inline_bytes))
        if self.rank == COORDINATOR:
            return self._conclude(mine, combine, inline_bytes)
        verdict = self._await("verdict")
        self._raise_if_late(verdict)
        if isinstance(mine, bytes) and len(mine) > inline_bytes:
            self.control_group().send([_tensor(mine)], COORDINATOR, SEND_TAG).wait()
        if verdict.outcome is None:
            verdict = self._await("outcome")
            self._raise_if_late(verdict)
        if isinstance(verdict.outcome, _Large):
            buffer = torch.empty(verdict.outcome.nbytes, dtype=torch.uint8)
            self._broadcast(buffer)
            return buffer.numpy().tobytes()
        assert verdict.outcome is not None
        return verdict.outcome

    def _conclude(
        self, mine: bytes | Failure, combine: Callable[[Sequence[T]], R], inline_bytes: int
    ) -> bytes | Failure:
        """On the coordinator: from the parts to the outcome."""
        late = self._await_ranks()
        if late:
            text = f"not here within {self.timeout_s:g} s and not at work: killed, or it did not call the same function"
            verdict = _Verdict(dict.fromkeys(late, text))
            self._set("verdict", verdict)
            self._raise_if_late(verdict)
        self._forget(self._rounds - 2)
        sent = [
            mine if r == self.rank else pickle.loads(self._store.get(self._key(f"here/{r}"))) for r in range(self.size)
        ]
        key = "verdict"
        if any(isinstance(part, _Large) for part in sent):
            self._set(key, _Verdict({}))
            key = "outcome"
        try:
            outcome = combined([self._received(rank, part) for rank, part in enumerate(sent)], combine)
        except RuntimeError as error:
            self._set(
                key, _Verdict({}, Failure(rank_error({self.rank: f"lost touch with another rank: {error}"}), False))
            )
            raise
        self._set(key, _Verdict({}, _inline(outcome, inline_bytes)))
        if isinstance(outcome, bytes) and len(outcome) > inline_bytes:
            self._broadcast(_tensor(outcome))
        return outcome

    def _broadcast(self, data: torch.Tensor) -> None:
        """From the coordinator to all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = COORDINATOR, 0
        self.control_group().broadcast([data], options).wait()

    def _see_off(self, num_late: int = 0) -> None:
        """Wait on the coordinator, though not for long, until the others have what they need from the store."""
        if self.rank != COORDINATOR:
            self._store.add(self._key("left"), 1)
            return
        deadline = time.monotonic() + min(FAREWELL_S, self.timeout_s)
        while self._store.add(self._key("left"), 0) < self.size - 1 - num_late and time.monotonic() < deadline:
            time.sleep(0.001)

    def _received(self, rank: int, part: bytes | Failure | _Large) -> bytes | Failure:
        if not isinstance(part, _Large):
            return part
        buffer = torch.empty(part.nbytes, dtype=torch.uint8)
        self.control_group().recv([buffer], rank, SEND_TAG).wait()
        return buffer.numpy().tobytes()

    def _set(self, name: str, value: object) -> None:
        self._store.set(self._key(name), pickle.dumps(value))  # type: ignore[arg-type]  # the stubs forget bytes

    def _raise_if_late(self, verdict: _Verdict) -> None:
        if verdict.causes:
            # Whoever comes now must not take this rank for one that is still waiting.
            self._store.delete_key(self._key(f"here/{self.rank}"))
            self._see_off(len(verdict.causes))
            raise rank_error(verdict.causes)

    @contextlib.contextmanager
    def _sign_of_life(self) -> Iterator[None]:
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(stop,), name="cloudckpt-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()

    def _watch(self, stop: threading.Event) -> None:
        beats = 0
        while not stop.wait(HEARTBEAT_S):
            beats += 1
            try:
                self._store.set(self._key(f"beat/{self.rank}"), str(beats))
                has_failed = self._store.check([self._key("failed")])
            except RuntimeError:  # the store's process is gone, and with it this round
                self.cancel.set()
                return
            if has_failed:
                self.cancel.set()

    def _await_ranks(self) -> list[int]:
        """The ranks that neither arrive nor show a sign of life for ``timeout_s``."""
        missing = [r for r in range(self.size) if r != self.rank]
        beats: dict[int, bytes] = {}
        deadline = time.monotonic() + self.timeout_s
        while missing:
            self._wait(self._key(f"here/{missing[0]}"), min(HEARTBEAT_S, max(0.01, deadline - time.monotonic())))
            missing = [r for r in missing if not self._store.check([self._key(f"here/{r}")])]
            if missing and time.monotonic() >= deadline:
                now = {r: self._beat(r) for r in missing}
                if any(now[r] == beats.get(r, b"") for r in missing):
                    return [r for r in missing if now[r] == beats.get(r, b"")]
                beats, deadline = now, time.monotonic() + self.timeout_s
        return []

    def _await(self, name: str) -> _Verdict:
        key = self._key(name)
        deadline = time.monotonic() + self.timeout_s
        beat = b""
        while not self._wait(key, HEARTBEAT_S):
            if time.monotonic() >= deadline:
                now = self._beat(COORDINATOR)
                if now == beat:
                    return _Verdict({COORDINATOR: f"the coordinator gave no sign of life for {self.timeout_s:g} s"})
                beat, deadline = now, time.monotonic() + self.timeout_s
        verdict = pickle.loads(self._store.get(key))
        assert isinstance(verdict, _Verdict)
        return verdict

    def _beat(self, rank: int) -> bytes:
        key = self._key(f"beat/{rank}")
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _wait(self, key: str, timeout_s: float) -> bool:
        """Asks again and again: the store's own wait warns on the console whenever it times out."""
        deadline = time.monotonic() + timeout_s
        longest_s = 0.004 + self.size / 4096  # so that many ranks do not flood the store
        pause_s = 0.0005
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)
        return True

    def _forget(self, number: int) -> None:
        """All ranks have left a round once they have met in the one after it."""
        if number > 0:
            names = [
                "verdict",
                "outcome",
                "failed",
                "left",
                *(f"{k}/{r}" for k in ("here", "beat") for r in range(self.size)),
            ]
            for name in names:
                self._store.delete_key(f"{number}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._rounds}/{name}"


def _inline(part: bytes | Failure, inline_bytes: int) -> bytes | Failure | _Large:
    """What stands for a part or an outcome in the store. A failure has to be told at once, however long its text."""
    return _Large(len(part)) if isinstance(part, bytes) and len(part) > inline_bytes else part


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
