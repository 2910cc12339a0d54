"""Where a rank stands among those that save together in the background."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch.distributed as dist

from cloudckpt.pytorch.group import Group, background_ranks, members
from cloudckpt.pytorch.messages import Session
from cloudckpt.pytorch.store_ranks import make_session


@dataclass(frozen=True)
class Seat:
    """This rank's place in one save through the store, as plain data. ``number``: of the save, in the session."""

    session: Session
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
        self._number = 0
        self._ranks: Group | None = None

    def next_seat(self, timeout_s: float) -> Seat:
        """For the next save; all ranks must ask in the same order. ``timeout_s``: see `make_group`."""
        if self._session is None:
            self._session = make_session(self._alive(), timeout_s)
        self._number += 1
        return Seat(self._session, self._number, self.rank, self.size)

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
