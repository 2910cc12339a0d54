"""Ranks that meet at keys of torch.distributed's store.

What is small travels through these keys as well, compressed. What is large is sent as bytes, from one rank to the
coordinator or from the coordinator to all, once the keys have said how many, and that both ends are there.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from cloudckpt.errors import InterruptedTransferError
from cloudckpt.pytorch.connections import device_types, make_gloo, own_client, rendezvous_store
from cloudckpt.pytorch.round_keys import HEARTBEAT_S, RoundKeys, Silence
from cloudckpt.pytorch.rounds import (
    COORDINATOR,
    Failure,
    combined,
    kept_in,
    out_of_touch,
    packed_part,
    rank_error,
    settled,
)

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")

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
        self._kept: dict[type, Any] = {}
        # Held, since the process of the first rank may be the one that serves it.
        self._served = rendezvous_store()
        if apart is None:
            prefix = f"cloudckpt/{group.group_name}"
            # A group of the same name may have been here before, on the same store.
            epoch = self._served.add(f"{prefix}/epoch/{self.rank}", 1)
            store = PrefixStore(f"{prefix}/{epoch}", self._served)
        else:
            store = PrefixStore(f"cloudckpt/{apart}", own_client(self._served))
        shares_gloo = apart is None and "cpu" in device_types(group)
        self._gloo = None if shares_gloo else make_gloo(store, self.rank, self.size)
        self._keys = RoundKeys(store, self.rank, self.size)

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

    @property
    def round_number(self) -> int:
        """How many rounds this rank has been in."""
        return self._keys.number

    def skip_to(self, round_number: int) -> None:
        """As if it had been in so many. To get in step again where ranks have met by other means, and told each other
        their numbers: one that failed before a round has not been in it, and the others have."""
        assert round_number >= self._keys.number
        self._keys.number = round_number

    def round(self, part: Callable[[], T], combine: Callable[[Sequence[T]], R], *, is_last: bool = False) -> R:
        self._keys.number += 1
        self.cancel.clear()
        mine: bytes | Failure | None = None
        try:
            with self._keys.sign_of_life(self.cancel):
                mine = packed_part(part, self._keys.tell_failure)
                outcome = self._exchange(mine, combine)
                if is_last or isinstance(outcome, Failure):
                    self._see_off()
        except RuntimeError as error:  # of gloo or of torch's store: the other end of a connection is gone
            text = f"lost touch with the other ranks, one of which was killed or cut off: {error}"
            raise out_of_touch(self.rank, mine, text) from error
        return settled(outcome, mine)  # type: ignore[no-any-return]

    def await_work(self, work: dist.Work, members: Sequence[int]) -> None:
        """Wait for a collective among some of the ranks. Raises RankError for those that show no sign of life.

        Asks again and again, since the backend's own wait would keep signals from Python. A rank that has failed
        still comes to where all agree to stop; one that does not within `GRACE_S` was to be in this collective, and
        InterruptedTransferError is raised. The group of the collective is of no use then.
        """
        pause_s, silence = 0.0002, Silence(self._keys, self.timeout_s)
        others = [rank for rank in members if rank != self.rank]
        failed_at: float | None = None
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.005)
            if self.cancel.is_set():
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > GRACE_S:
                    raise InterruptedTransferError("stopped, since another rank failed in the middle of a collective")
            if late := silence.of(others):
                raise rank_error(dict.fromkeys(late, f"no sign of life for {self.timeout_s:g} s"))
        work.wait()

    def tell_failure(self) -> None:
        """Within a part: the others shall stop, before this rank's part has ended."""
        self._keys.tell_failure()

    def scratch_store(self, name: str) -> PrefixStore:
        """A store of this round's own. All ranks that use it must give the same name, once."""
        return self._keys.scratch_store(name)

    def _exchange(self, mine: bytes | Failure, combine: Callable[[Sequence[T]], R]) -> bytes | Failure:
        inline_bytes = min(INLINE_BYTES, INLINE_TOTAL_BYTES // self.size)
        self._keys.set(f"here/{self.rank}", _inline(mine, inline_bytes))
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
            self._keys.set("verdict", verdict)
            self._raise_if_late(verdict)
        self._keys.forget(self._keys.number - 2)  # all have met in the one after it
        sent = [mine if r == self.rank else self._keys.get(f"here/{r}") for r in range(self.size)]
        key = "verdict"
        if any(isinstance(part, _Large) for part in sent):
            self._keys.set(key, _Verdict({}))
            key = "outcome"
        try:
            outcome = combined([self._received(rank, part) for rank, part in enumerate(sent)], combine)
        except RuntimeError as error:
            self._keys.set(
                key, _Verdict({}, Failure(rank_error({self.rank: f"lost touch with another rank: {error}"}), False))
            )
            raise
        self._keys.set(key, _Verdict({}, _inline(outcome, inline_bytes)))
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
            self._keys.add("left", 1)
            return
        deadline = time.monotonic() + min(FAREWELL_S, self.timeout_s)
        while self._keys.add("left", 0) < self.size - 1 - num_late and time.monotonic() < deadline:
            time.sleep(0.001)

    def _received(self, rank: int, part: bytes | Failure | _Large) -> bytes | Failure:
        if not isinstance(part, _Large):
            return part
        buffer = torch.empty(part.nbytes, dtype=torch.uint8)
        self.control_group().recv([buffer], rank, SEND_TAG).wait()
        return buffer.numpy().tobytes()

    def _raise_if_late(self, verdict: _Verdict) -> None:
        if verdict.causes:
            # Whoever comes now must not take this rank for one that is still waiting.
            self._keys.delete(f"here/{self.rank}")
            self._see_off(len(verdict.causes))
            raise rank_error(verdict.causes)

    def _await_ranks(self) -> list[int]:
        """The ranks that neither arrive nor show a sign of life for ``timeout_s``."""
        missing = [r for r in range(self.size) if r != self.rank]
        silence = Silence(self._keys, self.timeout_s)
        while missing:
            timeout_s = min(HEARTBEAT_S, max(0.01, silence.deadline_s - time.monotonic()))
            self._keys.wait(f"here/{missing[0]}", timeout_s)
            missing = [r for r in missing if not self._keys.has(f"here/{r}")]
            if late := silence.of(missing):
                return late
        return []

    def _await(self, name: str) -> _Verdict:
        silence = Silence(self._keys, self.timeout_s)
        while not self._keys.wait(name, HEARTBEAT_S):
            if silence.of([COORDINATOR]):
                return _Verdict({COORDINATOR: f"the coordinator gave no sign of life for {self.timeout_s:g} s"})
        verdict = self._keys.get(name)
        assert isinstance(verdict, _Verdict)
        return verdict


def _inline(part: bytes | Failure, inline_bytes: int) -> bytes | Failure | _Large:
    """What stands for a part or an outcome in the store. A failure has to be told at once, however long its text."""
    return _Large(len(part)) if isinstance(part, bytes) and len(part) > inline_bytes else part


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
