"""Private copies of what a rank saves, in host memory that later saves use again."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cloudckpt.errors import BusyError, InvalidStateError
from cloudckpt.pytorch.arena import ALIGNMENT, Arena
from cloudckpt.pytorch.copies import Copies
from cloudckpt.pytorch.pause import paused_gc
from cloudckpt.pytorch.shards import LocalShard

HUGE_PAGE = 2 * 1024 * 1024


class Staged:
    """Private copies of shards, until ``release``. ``nbytes``: what they take.

    ``shards`` have the ids of those that were copied; their memory is contiguous and on the host. ``arena``: where all
    of it lies; None where there is nothing.
    """

    def __init__(self, shards: Mapping[str, LocalShard], nbytes: int, arena: Arena | None, pool: StagingPool) -> None:
        self.shards = shards
        self.nbytes = nbytes
        self.arena = arena
        self._pool = pool

    def release(self) -> None:
        """Give the memory back; nobody may read the copies any more. Does nothing the second time."""
        self.shards = {}
        arena, self.arena = self.arena, None
        if arena is not None:
            self._pool.give_back(arena)


class StagingPool:
    """Arenas for private copies, one for each save that is under way; each is used again once it was released.

    ``shared``: other processes can map the arenas, which take a file descriptor each. ``max_bytes``: of all arenas
    together; None for no limit; counts when the next is made. Where the state has grown, an arena is replaced by
    a larger one. Threads may share a pool. A forked child begins with an empty one.
    """

    def __init__(self, *, shared: bool, max_bytes: int | None) -> None:
        self._shared = shared
        self.max_bytes = max_bytes
        self._numbers = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._free: list[Arena] = []
        self._lent: list[Arena] = []

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """All that there are at the moment, in use or not."""
        with self._changed:
            return (*self._free, *self._lent)

    def stage(self, shards: Mapping[str, LocalShard], *, timeout_s: float = 600.0) -> Staged:
        """Copy them; returns when the copies are there. What two ids share is copied once, and shared by the copies.

        What was queued before on the current streams of devices is done first. Waits up to ``timeout_s`` for memory
        of earlier saves, then raises BusyError. Raises InvalidStateError where there is not enough in any case.
        """
        with paused_gc():
            plan = _Plan(shards)
        arena = self._take(plan.nbytes, plan.device_type, timeout_s) if plan.nbytes else None
        try:
            if arena is not None and plan.device_type == "cuda":
                arena.pin()
            with paused_gc():
                return Staged(plan.copy_to(arena), plan.nbytes, arena, self)
        except BaseException:
            if arena is not None:
                self.give_back(arena)
            raise

    def give_back(self, arena: Arena) -> None:
        """`Staged.release` does it."""
        with self._changed:
            if arena in self._lent:  # a forked child has none of its parent's
                self._lent.remove(arena)
                self._free.append(arena)
                self._changed.notify_all()

    def _take(self, nbytes: int, device_type: str, timeout_s: float) -> Arena:
        if os.getpid() != self._process:
            self._begin()
        if self.max_bytes is not None and nbytes > self.max_bytes:
            raise InvalidStateError(
                f"the private copy that a background save takes of this rank's state has {nbytes} bytes, of "
                f"{self.max_bytes} that Config.staging_bytes allows: raise that, or use save(), which takes none"
            )
        with self._changed:
            arena = self._changed.wait_for(lambda: self._find(nbytes) or self._make(nbytes, device_type), timeout_s)
            if arena is None:
                raise BusyError(
                    f"no memory for a private copy of {nbytes} bytes: saves that still run hold "
                    f"{sum(arena.nbytes for arena in self._lent)} of the {self.max_bytes} bytes that "
                    f"Config.staging_bytes allows, and none ended within {timeout_s:g} s"
                )
            self._lent.append(arena)
            return arena

    def _find(self, nbytes: int) -> Arena | None:
        fitting = [arena for arena in self._free if arena.nbytes >= nbytes]
        if not fitting:
            return None
        arena = min(fitting, key=lambda arena: arena.nbytes)
        self._free.remove(arena)
        return arena

    def _make(self, nbytes: int, device_type: str) -> Arena | None:
        """None where the limit allows no other now. Smaller free ones make room, since this state has outgrown them."""
        size = _rounded(nbytes)
        if self.max_bytes is not None:
            size = min(size, self.max_bytes - sum(arena.nbytes for arena in self._lent))
            if size < nbytes:
                return None
        self._drop_free()
        try:
            return Arena.make(next(self._numbers), size, shared=self._shared, device_type=device_type)
        except (MemoryError, OSError, RuntimeError) as error:
            raise InvalidStateError(
                f"the private copy that a background save takes of this rank's state has {size} bytes, and there is "
                f"no memory for it: {error}. Use save(), which takes none"
            ) from error

    def _drop_free(self) -> None:
        for arena in self._free:
            arena.close()
        self._free.clear()


def _rounded(nbytes: int) -> int:
    """Up to 6 % more, so that a state which grows a little with every save does not need a new arena each time."""
    unit = max(HUGE_PAGE, 1 << max(0, nbytes.bit_length() - 5))
    return -(-nbytes // unit) * unit


class _Plan:
    """Which bytes are copied, and where each begins. Only elements count: of a view, not the memory around it."""

    def __init__(self, shards: Mapping[str, LocalShard]) -> None:
        self._shards = shards
        self._keys: list[Any] = []  # by shard; equal for the same memory
        self._sources: dict[Any, tuple[torch.Tensor | npt.NDArray[Any], int]] = {}  # with the offset of the copy
        self.nbytes = 0
        self.device_type = "cpu"
        for shard in shards.values():
            memory = shard.memory
            key = _tensor_key(memory) if isinstance(memory, torch.Tensor) else id(memory)
            self._keys.append(key)
            if key not in self._sources:
                self._sources[key] = memory, self.nbytes
                self.nbytes += -(-memory.nbytes // ALIGNMENT) * ALIGNMENT
                if isinstance(memory, torch.Tensor) and memory.device.type != "cpu":
                    self.device_type = memory.device.type

    def copy_to(self, arena: Arena | None) -> dict[str, LocalShard]:
        copies = Copies()
        made = {key: _copied(source, arena, offset, copies) for key, (source, offset) in self._sources.items()}
        copies.run()
        return {
            name: shard.moved(made[key]) for (name, shard), key in zip(self._shards.items(), self._keys, strict=True)
        }


def _tensor_key(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _copied(
    source: torch.Tensor | npt.NDArray[Any], arena: Arena | None, byte_offset: int, copies: Copies
) -> torch.Tensor | npt.NDArray[Any]:
    if isinstance(source, torch.Tensor):
        if arena is None or source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype)
        tensor = arena.tensor(byte_offset, source.dtype, source.shape)
        copies.add_tensor(tensor, source)
        return tensor
    if arena is None or source.nbytes == 0:
        return np.empty(source.shape, source.dtype)
    array = arena.array(byte_offset, source.dtype, source.shape)
    copies.add_array(array, source)
    return array
