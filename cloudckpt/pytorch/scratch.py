"""Host buffers that are used again as soon as whoever reads them lets go.

Fresh memory costs a page fault every 4 KiB: gathering a strided chunk into a new buffer takes five
times as long as into one that is mapped already.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect
from collections import deque

import numpy as np

from cloudckpt.format.codec import Bytes1D

SMALLEST_BYTES = 128 * 1024
"""Below, malloc keeps the pages itself."""

SLAB_BYTES = 16 * 1024 * 1024
"""Buffers are cut from slabs: numpy asks for huge pages from 4 MiB on, which fault 512 times less often."""

_STEP_BYTES = 64


class Scratch:
    """Hands out buffers; one comes back when the array that ``take`` returned is freed, in any thread.

    Buffers of all sizes are cut from the same memory, as low in it as they fit, and what comes back joins the
    free memory beside it: what is resident is what was lent at a time, not that for each size.
    """

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []
        self._returned: deque[tuple[_Slab, int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes1D:
        """An uninitialised buffer of exactly ``nbytes``."""
        if nbytes < SMALLEST_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        size = -(-nbytes // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            # Not when they come back: a finaliser may run in this very thread, while it holds the lock.
            while self._returned:
                slab, start, end = self._returned.popleft()
                slab.give_back(start, end)
            slab, start = self._cut(size)
        # Through a memoryview, since numpy would let a slice of a slice refer to the slab instead.
        lent: Bytes1D = np.frombuffer(slab.memory.data[start : start + nbytes], dtype=np.uint8)
        weakref.finalize(lent, self._returned.append, (slab, start, start + size)).atexit = False
        return lent

    def _cut(self, size: int) -> tuple[_Slab, int]:
        for slab in self._slabs:
            start = slab.cut(size)
            if start is not None:
                return slab, start
        self._slabs = [slab for slab in self._slabs if not slab.is_free]  # they are too small
        slab = _Slab(max(size, SLAB_BYTES))
        self._slabs.append(slab)
        start = slab.cut(size)
        assert start is not None
        return slab, start


class _Slab:
    """One piece of memory, and its free spans in order, none of them next to another."""

    def __init__(self, nbytes: int) -> None:
        self.memory: Bytes1D = np.empty(nbytes, dtype=np.uint8)
        self._free = [(0, nbytes)]

    @property
    def is_free(self) -> bool:
        return self._free == [(0, len(self.memory))]

    def cut(self, size: int) -> int | None:
        """Where the lowest free span of that size starts, which is then no longer free; None if there is none."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[i : i + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give_back(self, start: int, end: int) -> None:
        at = bisect(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end))
