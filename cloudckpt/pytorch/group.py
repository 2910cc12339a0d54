"""How the ranks of one save or load act together.

Everything is done in rounds: each rank does its part, the coordinator (rank 0 of the group) makes
something of the parts, and all get its result. A failure anywhere in a round is raised on every
rank, and a rank that is late, dead or has failed is named.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from cloudckpt.errors import InvalidStateError
from cloudckpt.pytorch.ranks import Ranks
from cloudckpt.pytorch.rounds import kept_in, rank_error

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")


class Group(Protocol):
    """``cancel`` is set as soon as another rank is known to have failed in the current round."""

    rank: int
    size: int
    cancel: threading.Event

    def round(self, part: Callable[[], T], combine: Callable[[Sequence[T]], R], *, is_last: bool = False) -> R:
        """Collective. ``part`` runs everywhere, ``combine`` (of all parts, by rank) on the coordinator.

        ``is_last``: what follows is the caller's. The coordinator, whose process may hold the rendezvous store,
        then stays until all have the outcome; so it does after a failure.
        """

    def kept(self, kind: type[K]) -> K:
        """This rank's one object of a kind, made at first use and dropped with the group; for one process: never."""


class Alone:
    """A group of one process."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.cancel = threading.Event()

    def round(self, part: Callable[[], T], combine: Callable[[Sequence[T]], R], *, is_last: bool = False) -> R:  # noqa: ARG002  # nobody to wait for
        self.cancel.clear()
        return combine([part()])

    def kept(self, kind: type[K]) -> K:
        return kept_in(_KEPT_ALONE, kind)


_KEPT_ALONE: dict[type, Any] = {}


def check_group(group: object) -> None:
    """Raises InvalidStateError for what is no process group, such as a mesh, which may have several."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    hint = "; of a mesh, it is mesh.get_group()" if hasattr(group, "get_group") else ""
    raise InvalidStateError(f"group must be a torch.distributed.ProcessGroup, not {group!r:.200}{hint}")


def members(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``group``, or the group of all ranks; None for a process that works alone.

    Raises InvalidStateError where this rank may not use it.
    """
    check_group(group)
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise InvalidStateError("a group was given, but torch.distributed is not initialised")
        return None
    group = group or dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise InvalidStateError("this rank is not in the given group: only its members may call save or load with it")
    return group if dist.get_world_size(group) > 1 else None


def make_group(group: dist.ProcessGroup | None, timeout_s: float) -> Group:
    """The ranks of ``group`` (None: all, or this process alone where torch.distributed is not set up). Collective."""
    found = members(group)
    if found is None:
        return Alone()
    if found not in _GROUPS:
        _GROUPS[found] = _made(found)
    ranks = _GROUPS[found]
    ranks.timeout_s = timeout_s
    return ranks


def round_number(group: dist.ProcessGroup) -> int:
    """How many rounds this rank has been in with the group, see `Ranks.skip_to`. Not collective."""
    return _GROUPS[group].round_number if group in _GROUPS else 0


def background_ranks(group: dist.ProcessGroup | None, timeout_s: float) -> Group:
    """The same ranks once more, to be used by one other thread at a time. Collective.

    They have connections of their own, so that no wait in the background keeps the training from its collectives.
    """
    foreground = make_group(group, timeout_s)
    if not isinstance(foreground, Ranks):
        return foreground
    # Drawn in a round, which also names a rank that does not come, before all wait to be connected.
    name = foreground.round(lambda: None, lambda _: secrets.token_hex(8))
    ranks = _made(foreground.group(), apart=name)
    ranks.timeout_s = timeout_s
    return ranks


def _made(group: dist.ProcessGroup, *, apart: str | None = None) -> Ranks:
    try:
        return Ranks(group, apart=apart)
    except RuntimeError as error:
        text = f"torch.distributed's store or the group is gone: {error}"
        raise rank_error({dist.get_rank(group): text}) from error


_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()
"""A control group costs a rendezvous, so it is made once per process group and kept as long as that lives."""
