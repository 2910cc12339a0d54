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
            base = free.pop() if free else np.empty(size, dtype=np.uint8)
        # The lender is a view with no base but the memoryview: its end is the end of the loan.
        lent: Bytes1D = np.frombuffer(memoryview(base)[:nbytes], dtype=np.uint8)
        weakref.finalize(lent, free.append, base).atexit = False
        return lent
