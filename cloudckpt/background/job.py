"""One rank's part of a background save as plain data, and what whoever has it does with it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from cloudckpt._tries import MAX_RETRIES, RunPolicy, meetings, run_tries
from cloudckpt._write import Commit, Prepared
from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError
from cloudckpt.pytorch.deferred import finish
from cloudckpt.pytorch.group import Alone, Group
from cloudckpt.pytorch.messages import Session
from cloudckpt.pytorch.seats import Seat
from cloudckpt.pytorch.store_ranks import StoreRanks
from cloudckpt.store.resolve import resolve


@dataclass(frozen=True, eq=False)
class Job:
    """``prepared``: what to save, in memory that is the job's own; or why this rank cannot, for the others to hear.

    ``seat``: None in a job of one process.
    """

    prepared: Prepared | CloudckptError
    url: str
    storage_options: Mapping[str, Any] | None
    config: Config
    seat: Seat | None
    policy: RunPolicy | None = None

    def finished(self) -> Job:
        """With all that was left to the background, and must be done in the process that it was left in."""
        if not isinstance(self.prepared, Prepared) or not self.prepared.state.deferred:
            return self
        state = self.prepared.state
        finish(state.deferred)
        return replace(self, prepared=replace(self.prepared, state=replace(state, deferred=())))

    def prepare(self) -> Prepared:
        prepared = self.finished().prepared
        if isinstance(prepared, CloudckptError):
            raise prepared
        return prepared


def run_job(job: Job, ranks: Group | None, note: Callable[[int, int], None]) -> Commit:
    """Collective over ``ranks``, or, without any, over those that meet in the store. ``note``: see `Progress`."""

    def meet(
        url: str | os.PathLike[str], options: Mapping[str, Any] | None, number: int
    ) -> AbstractContextManager[Group]:
        return seated(job, url, options, number) if ranks is None else nullcontext(ranks)

    return run_tries(
        meet,
        job.prepare,
        job.url,
        policy=job.policy,
        storage_options=job.storage_options,
        progress=note,
        config=job.config,
    )


NUMBERS_PER_SAVE = MAX_RETRIES + 2
"""Every try, that of the fallback included, has a number of its own among those of the session."""


@contextmanager
def seated(job: Job, url: str | os.PathLike[str], options: Mapping[str, Any] | None, number: int) -> Iterator[Group]:
    """The ranks of a try, which meet in the store that it saves to."""
    if job.seat is None:
        yield Alone()
        return
    seat = job.seat
    store = resolve(url, options, job.config)
    try:
        yield StoreRanks(
            store,
            session=replace(seat.session, id=f"{seat.session.id}/{seat.subject}"),
            number=seat.number * NUMBERS_PER_SAVE + number,
            rank=seat.rank,
            size=seat.size,
            # Ranks may fall out of one try much later than others: those wait for them in the next.
            timeout_s=job.config.rank_timeout_s * (1 if number == 0 else 3),
            kept=_kept_for(seat.session),
        )
    finally:
        store.close()


SESSIONS_KEPT = 8
_KEPT: OrderedDict[str, dict[type, Any]] = OrderedDict()
_LOCK = threading.Lock()


def _kept_for(session: Session) -> dict[type, Any]:
    """What saves of one session hand on to the next, such as plans. Sessions do not tell when they are over."""
    with _LOCK:
        kept = _KEPT.setdefault(session.id, {})
        _KEPT.move_to_end(session.id)
        while len(_KEPT) > SESSIONS_KEPT:
            _KEPT.popitem(last=False)
        return kept


def give_up(job: Job, error: CloudckptError) -> None:
    """Tell the other ranks, who would wait for it, that this one's part is lost, wherever in the save they are."""
    if job.seat is None:
        return
    # In all tries: the others, told in one of them, go on with the next.
    for meeting in meetings(job.url, job.storage_options, job.policy):
        with seated(job, *meeting) as ranks:
            assert isinstance(ranks, StoreRanks)
            ranks.abandon(error)
