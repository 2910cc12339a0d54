"""Ranks that meet at small objects in the checkpoint's own store: for saves in the background.

They need no process group, no port, and nothing that the training uses. All that they say lies under one `sync_root`,
and nothing of it is unpickled unless a rank of the same session wrote it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from cloudckpt.errors import CloudckptError, StoreError
from cloudckpt.format.keys import parse_sync_rank, parse_sync_round, sync_key, sync_root
from cloudckpt.pytorch.group import make_group
from cloudckpt.pytorch.messages import ForgedMessageError, Messages, Session
from cloudckpt.pytorch.pace import Pace, Signs
from cloudckpt.pytorch.rounds import (
    COORDINATOR,
    Failure,
    combined,
    kept_in,
    out_of_touch,
    packed,
    packed_part,
    rank_error,
    settled,
    unpacked,
)
from cloudckpt.store.base import Store

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")

REFUSED_S = 3.0
"""How long a failure is tried to be told where the store refuses to hear it: a full disk has room again once the other
ranks have given up their unfinished files, too."""

STOP_S = 2.0
"""How long the end of a round waits for its watching thread, whose request may be stuck."""

_PART, _FAILURE = b"\0", b"\1"

logger = logging.getLogger(__name__)


def make_session(group: dist.ProcessGroup | None, timeout_s: float) -> Session:
    """A new session, the same on all ranks of ``group``, told over torch's rendezvous store. Collective."""
    return make_group(group, timeout_s).round(lambda: None, lambda _: Session.draw())


class StoreRanks:
    """The ranks of one save: the one with this ``number`` in its session, of which there must be no other.

    ``store``: its root is the checkpoint. A rank that neither arrives nor gives a sign of life for ``timeout_s`` is
    named within one and a half of that. ``kept``: what `kept` keeps; a later save may be given the same.
    """

    def __init__(
        self,
        store: Store,
        *,
        session: Session,
        number: int,
        rank: int,
        size: int,
        timeout_s: float,
        kept: dict[type, Any],
    ) -> None:
        self.rank = rank
        self.size = size
        self.cancel = threading.Event()
        self.timeout_s = timeout_s
        self._url = store.url
        self._messages = Messages(store, session)
        self._root = sync_root(session.id, number)
        self._kept = kept
        self._pace = Pace.of(size, timeout_s)
        self._rounds = 0
        self._beats = 0
        self._is_working = False
        self._late: list[int] = []

    def kept(self, kind: type[K]) -> K:
        return kept_in(self._kept, kind)

    def round(self, part: Callable[[], T], combine: Callable[[Sequence[T]], R], *, is_last: bool = False) -> R:
        self._rounds += 1
        self.cancel.clear()
        mine: bytes | Failure | None = None
        outcome: bytes | Failure | None = None
        try:
            with self._sign_of_life():
                mine = packed_part(part, self._tell_failure)
                self._is_working = False
                if self.rank == COORDINATOR:
                    outcome = self._conclude(mine, combine)
                else:
                    self._tell(self._key("here", self.rank), mine)
            if outcome is None:
                outcome = self._take_outcome()
            elif is_last or isinstance(outcome, Failure):
                self._clear()
        except StoreError as error:
            raise out_of_touch(self.rank, mine, self._lost_touch(error)) from error
        return settled(outcome, mine)  # type: ignore[no-any-return]

    def abandon(self, error: CloudckptError) -> None:
        """For a rank that is no longer in any round, such as one whose process has died: the others hear ``error``.

        An outcome that is there already stands.
        """
        leads = self.rank == COORDINATOR
        if leads:
            error = rank_error({COORDINATOR: f"{type(error).__name__}: {error}"})
        found = [number for key in self._messages.keys(self._root) if (number := parse_sync_round(key)) is not None]
        # That of its last message may be over. More than one more cannot have begun without it.
        for self._rounds in (max(found, default=1), max(found, default=0) + 1):
            key = self._key("outcome") if leads else self._key("here", self.rank)
            if not leads or self._messages.get(key) is None:
                self._tell_failure()
                self._tell(key, Failure(error, False))

    def _take_outcome(self) -> bytes | Failure:
        """On all but the coordinator, which sees by the message that is gone then that the outcome was taken."""
        outcome = self._await_outcome()
        self._messages.delete([self._key("here", self.rank)])
        return outcome

    def _await_outcome(self) -> bytes | Failure:
        key, signs, pauses = self._key("outcome"), Signs(self._count_beats, self.timeout_s), self._pace.pauses()
        try:
            while (body := self._messages.get(key)) is None:
                if signs.silent([COORDINATOR]):
                    text = f"the coordinator gave no sign of life for {self.timeout_s:g} s"
                    return Failure(rank_error({COORDINATOR: text}), False)
                time.sleep(next(pauses))
        except ForgedMessageError as error:
            return Failure(rank_error({COORDINATOR: str(error)}), False)
        return _opened(body)

    def _conclude(self, mine: bytes | Failure, combine: Callable[[Sequence[T]], R]) -> bytes | Failure:
        """On the coordinator: from the parts to the outcome."""
        parts = {COORDINATOR: mine}
        causes: dict[int, str] = {}
        try:
            self._late = self._await_parts(parts)
        except StoreError as error:
            causes = {COORDINATOR: self._lost_touch(error)}
        if self._late:
            text = f"not here within {self.timeout_s:g} s and not at work: killed, or it did not call the same function"
            causes = dict.fromkeys(self._late, text)
        outcome: bytes | Failure
        if causes:
            outcome = Failure(rank_error(causes), False)
        else:
            outcome = combined([parts[rank] for rank in range(self.size)], combine)
        self._tell(self._key("outcome"), outcome)
        if not causes and self._rounds > 1:
            self._messages.delete([sync_key(self._root, self._rounds - 1, "outcome")])  # all have left that round
        return outcome

    def _lost_touch(self, error: StoreError) -> str:
        return (
            f"cannot exchange messages with the other ranks through {self._url}: {error} "
            "(they need rights to put, get, list and delete there; coordination='collectives' does without)"
        )

    def _await_parts(self, parts: dict[int, bytes | Failure]) -> list[int]:
        """Fill in what the others say; returns the ranks that neither arrive nor give a sign of life."""
        signs, pauses = Signs(self._count_beats, self.timeout_s), self._pace.pauses()
        while True:
            self._fetch_parts(parts)
            missing = [rank for rank in range(self.size) if rank not in parts]
            if not missing:
                return []
            if late := signs.silent(missing):
                return late
            time.sleep(next(pauses))

    def _fetch_parts(self, parts: dict[int, bytes | Failure]) -> None:
        found = {parse_sync_rank(key) for key in self._messages.keys(self._key("here"))}
        arrived = [rank for rank in range(self.size) if rank in found and rank not in parts]
        bodies = self._messages.get_many([self._key("here", rank) for rank in arrived])
        for rank, body in zip(arrived, bodies, strict=True):
            if isinstance(body, ForgedMessageError):
                parts[rank] = Failure(body, False)
            elif body is not None:
                parts[rank] = _opened(body)

    def _clear(self) -> None:
        """On the coordinator: delete all messages once the others have the last outcome, or have had the time for it.

        Where one may still come for the outcome, it stays, and is left to the sweep.
        """
        deadline = time.monotonic() + self._pace.farewell_s
        here, pauses = self._key("here"), self._pace.pauses()
        try:
            while True:
                found = self._messages.keys(self._root)
                are_waiting = any(key.startswith(f"{here}/") for key in found)
                if not are_waiting or time.monotonic() >= deadline:
                    break
                time.sleep(next(pauses))
        except StoreError as error:  # the outcome stands
            logger.warning("messages below %s in %s are left to the sweep: %s", self._root, self._url, error)
            return
        stays = {self._key("outcome")} if are_waiting or self._late else set()
        next_round = sync_key(self._root, self._rounds + 1, "")  # in which others may be already, after a failure
        self._messages.delete(key for key in found if key < next_round and key not in stays)

    def _tell(self, key: str, message: bytes | Failure) -> None:
        is_failure = isinstance(message, Failure)
        body = _FAILURE + packed(message) if isinstance(message, Failure) else _PART + message
        deadline = time.monotonic() + (REFUSED_S if is_failure else 0.0)
        while True:
            try:
                self._messages.put(key, body)
            except StoreError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(self._pace.first_s)
            else:
                return

    def _tell_failure(self) -> None:
        """The others shall stop before they have done their parts."""
        try:
            self._messages.put(self._key("failed"), b"")
        except StoreError as error:
            logger.warning("rank %d cannot tell the others at once that it failed: %s", self.rank, error)

    @contextlib.contextmanager
    def _sign_of_life(self) -> Iterator[None]:
        stop = threading.Event()
        self._is_working = True
        watcher = threading.Thread(target=self._watch, args=(stop,), name="cloudckpt-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join(STOP_S)

    def _watch(self, stop: threading.Event) -> None:
        next_beat_s = time.monotonic() + self._pace.beat_s
        while not stop.wait(self._pace.longest_s):
            try:
                if time.monotonic() >= next_beat_s:
                    next_beat_s += self._pace.beat_s
                    self._beats += 1
                    self._messages.put(self._beat_key(self.rank), str(self._beats).encode())
                if (
                    self._is_working
                    and not self.cancel.is_set()
                    and self._messages.get(self._key("failed")) is not None
                ):
                    self.cancel.set()
            except CloudckptError as error:
                # What the rank is at work on will meet the same fault, and say so.
                logger.warning("rank %d cannot show that it is at work: %s", self.rank, error)

    def _count_beats(self, ranks: Sequence[int]) -> list[int]:
        bodies = self._messages.get_many([self._beat_key(rank) for rank in ranks])
        return [int(body) if isinstance(body, bytes) else 0 for body in bodies]

    def _beat_key(self, rank: int) -> str:
        return sync_key(self._root, 0, "beat", rank)

    def _key(self, name: str, rank: int | None = None) -> str:
        return sync_key(self._root, self._rounds, name, rank)


def _opened(body: bytes) -> bytes | Failure:
    if body[:1] == _PART:
        return body[1:]
    failure = unpacked(body[1:])
    assert isinstance(failure, Failure)
    return failure
