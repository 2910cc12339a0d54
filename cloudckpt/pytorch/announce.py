"""What one rank tells all others without a collective: through torch's rendezvous store, once."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # the only way to the rendezvous store

from cloudckpt.errors import CloudckptError
from cloudckpt.pytorch.group import check_group

T = TypeVar("T")

_COUNTS: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


class Announcements:
    """One number at a time that all ranks of a group agree on. Every rank makes its own, in the same order."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._store: PrefixStore | None = None
        self._number = 0
        self.rank = 0
        check_group(group)
        if not (dist.is_available() and dist.is_initialized()):
            return
        group = group or dist.group.WORLD
        assert group is not None
        self.rank = dist.get_rank(group)
        if dist.get_world_size(group) > 1:
            own = next(_COUNTS.setdefault(group, itertools.count()))
            self._store = PrefixStore(f"cloudckpt/announce/{group.group_name}/{own}", _get_default_store())

    @property
    def is_alone(self) -> bool:
        return self._store is None

    def announce(self, number: int) -> int:
        """Returns the number that all hear: another rank may have been faster."""
        if self._store is None:
            return number
        return int(self._asked(lambda store: store.compare_set(str(self._number), "", str(number))))

    def heard(self) -> int | None:
        """The number that some rank has announced. Does not wait."""
        if self._store is None:
            return None
        key = str(self._number)
        return self._asked(lambda store: int(store.get(key)) if store.check([key]) else None)

    def _asked(self, ask: Callable[[PrefixStore], T]) -> T:
        assert self._store is not None
        try:
            return ask(self._store)
        except RuntimeError as error:
            raise CloudckptError(f"torch.distributed's store is gone, and with it the other ranks: {error}") from error

    def settle(self) -> None:
        """What was announced is done with, on all ranks at the same step; listen for the next."""
        self._number += 1
