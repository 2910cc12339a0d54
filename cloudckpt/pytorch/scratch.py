"""Host buffers that are used again as soon as whoever reads them lets go.

Fresh memory costs a page fault every 4 KiB: gathering a strided chunk into a new buffer takes five
times as long as into one that is mapped already.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

from cloudckpt.format.codec import Bytes1D

SMALLEST_BYTES = 128 * 1024
"""Below, malloc keeps the pages itself."""

SLAB_BYTES = 16 * 1024 * 1024
"""Buffers are cut from slabs: numpy asks for huge pages from 4 MiB on, which fault 512 times less often."""


class Scratch:
    """Hands out buffers; one comes back when the array that ``take`` returned is freed, in any thread."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes1D]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes1D:
        """An uninitialised buffer of exactly ``nbytes``."""
        if nbytes < SMALLEST_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            free = self._free.setdefault(size, [])
            if not free:
                slab = np.empty(max(size, SLAB_BYTES), dtype=np.uint8)
                free.extend(slab[start : start + size] for start in range(0, len(slab), size))
            base = free.pop()
        # Through a memoryview, since numpy would let a slice of a slice refer to the slab instead.
        lent: Bytes1D = np.frombuffer(base.data[:nbytes], dtype=np.uint8)
        weakref.finalize(lent, free.append, base).atexit = False
        return lent
