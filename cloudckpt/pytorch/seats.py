"""Where a rank stands among those that save together in the background."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from cloudckpt.pytorch.group import Group, background_ranks, members
from cloudckpt.pytorch.messages import Session
from cloudckpt.pytorch.store_ranks import make_session


@dataclass(frozen=True)
class Seat:
    """This rank's place in one save through the store, as plain data.

    ``subject``: what is saved, the same on all ranks; ``number``: of the save, among those of its subject.
    """

    session: Session
    subject: str
    number: int
    rank: int
    size: int


class Table:
    """The ranks of one process group. What is made for them is made once, in the foreground, and is collective."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._group = None if group is None else weakref.ref(group)
        self._session: Session | None = None
        self._numbers: dict[bytes, int] = {}
        self._ranks: Group | None = None

    def next_seat(self, subject: str, timeout_s: float) -> Seat:
        """For the next save of ``subject``, such as a step. ``timeout_s``: see `make_group`.

        Counted for each subject apart, so that ranks of which one has missed a save meet again in the one after it.
        """
        if self._session is None:
            self._session = make_session(self._alive(), timeout_s)
        key = hashlib.sha256(subject.encode()).digest()[:8]  # there will be many, and they are never forgotten
        self._numbers[key] = self._numbers.get(key, 0) + 1
        return Seat(self._session, subject, self._numbers[key], self.rank, self.size)

    def own_ranks(self, timeout_s: float) -> Group:
        """A group that only background saves use."""
        if self._ranks is None:
            self._ranks = background_ranks(self._alive(), timeout_s)
        return self._ranks

    def _alive(self) -> dist.ProcessGroup:
        group = None if self._group is None else self._group()
        assert group is not None
        return group


_TABLES: weakref.WeakKeyDictionary[dist.ProcessGroup, Table] = weakref.WeakKeyDictionary()
_ALONE = Table(None)


def table_of(group: dist.ProcessGroup | None) -> Table:
    """The one table of ``group`` (None: all ranks, or this process alone). Raises InvalidStateError as `make_group`."""
    found = members(group)
    if found is None:
        return _ALONE
    if found not in _TABLES:
        _TABLES[found] = Table(found)
    return _TABLES[found]
