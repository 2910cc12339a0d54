"""The bytes of tensors in C order, read ahead of who writes them: in bounded memory, converted where that is asked."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import torch

from cloudckpt.config import KIB
from cloudckpt.errors import InterruptedTransferError
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.dtypes import dtype
from cloudckpt.plan.runs import Run, RunPlan, Window
from cloudckpt.plan.shard import PieceBox
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.pytorch.shards import LocalShard, torch_dtype
from cloudckpt.pytorch.targets import Targets, Want
from cloudckpt.pytorch.views import stored_wants

Fetch: TypeAlias = Callable[[Targets], None]
"""Fills targets from the store."""

WINDOWS_AHEAD = 2
"""One that is being read, and one that is waited for to be taken when there is memory again."""

BLOCK_BYTES = 256 * KIB
"""Small runs that follow each other are handed out in blocks of so much."""

_POLL_S = 0.1


class RunMemory:
    """Buffers for runs, of ``nbytes`` together at most; one is free again when the array that ``take`` gave is freed.

    ``held_bytes``: what those who write may hold on to until they get more: the last block, an upload's part that is
    not full yet. While no more than this is lent, any request is granted, so that none is waited for in vain.

    Buffers are used again, since fresh memory costs a page fault every 4 KiB. For use by any threads.
    """

    def __init__(self, nbytes: int, held_bytes: int) -> None:
        self._nbytes = nbytes
        self._held_bytes = held_bytes
        self._lent = 0
        self._kept = 0
        self._free: dict[int, list[Bytes1D]] = {}
        self._changed = threading.Condition()

    def take(self, sizes: Sequence[int], is_over: Callable[[], bool]) -> list[Bytes1D]:
        """Uninitialised buffers, all at once, when there is room for them.

        Raises InterruptedTransferError where ``is_over`` says so while it waits.
        """
        rounded = [-(-size // BLOCK_BYTES) * BLOCK_BYTES if size > BLOCK_BYTES else size for size in sizes]
        total = sum(rounded)
        with self._changed:
            while self._lent > self._held_bytes and self._lent + total > self._nbytes:
                if is_over():
                    raise InterruptedTransferError("stopped, since another part failed")
                self._changed.wait(_POLL_S)
            self._lent += total
            return [self._lend(size, whole) for size, whole in zip(sizes, rounded, strict=True)]

    def _lend(self, nbytes: int, whole: int) -> Bytes1D:
        free = self._free.get(whole)
        if free:
            base = free.pop()
            self._kept -= whole
        else:
            self._make_room()
            base = np.empty(whole, dtype=np.uint8)
        # Through a memoryview: what is made of it then refers to this array, not to the whole one.
        lent: Bytes1D = np.frombuffer(base.data[:nbytes], dtype=np.uint8)
        weakref.finalize(lent, self._take_back, base).atexit = False
        return lent

    def _make_room(self) -> None:
        for size, free in self._free.items():
            while free and self._lent + self._kept > self._nbytes:
                free.pop()
                self._kept -= size

    def _take_back(self, base: Bytes1D) -> None:
        with self._changed:
            self._lent -= len(base)
            if len(base) >= BLOCK_BYTES:
                self._free.setdefault(len(base), []).append(base)
                self._kept += len(base)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class RunSource:
    """An array whose runs are read. ``dtype``: what its elements are to be; ``text``: its name, for messages."""

    text: str
    array: VirtualArray
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element as it is written."""
        return dtype(self.dtype).itemsize


class RunReader:
    """The runs of a plan in their order, once; windows are read ahead in a thread. Close it, or use ``with``.

    ``plan``: of the arrays of ``sources``, with their itemsizes. Values are converted as ``Tensor.to`` does. The bytes
    are little endian, and must be let go for more to be read: none of them may be kept for long.
    """

    def __init__(
        self, plan: RunPlan, sources: Sequence[RunSource], fetch: Fetch, memory: RunMemory, stop: threading.Event
    ) -> None:
        """``stop``: set from outside where all is over; waits for memory then end."""
        self._plan = plan
        self._sources = sources
        self._fetch = fetch
        self._memory = memory
        self._stop = stop
        self._closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cloudckpt-runs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __iter__(self) -> Iterator[tuple[Run, Bytes1D]]:
        """Each run with its bytes."""
        for block, data in self._blocks():
            start = 0
            for run in block:
                nbytes = self._nbytes(run)
                yield run, data[start : start + nbytes]
                start += nbytes

    def blocks(self) -> Iterator[Bytes1D]:
        """The bytes of all runs, with small ones that follow each other as one."""
        for _, data in self._blocks():
            yield data

    def _blocks(self) -> Iterator[tuple[Sequence[Run], Bytes1D]]:
        windows = iter(self._plan.windows)
        pending: deque[Future[deque[tuple[Sequence[Run], Bytes1D]]]] = deque()
        while True:
            for window in itertools.islice(windows, 1 + WINDOWS_AHEAD - len(pending)):
                pending.append(self._pool.submit(self._read, window))
            if not pending:
                return
            blocks = pending.popleft().result()
            while blocks:  # each is let go before the next one is handed out
                yield blocks.popleft()

    def _read(self, window: Window) -> deque[tuple[Sequence[Run], Bytes1D]]:
        blocks = list(self._together(window))
        memory = self._memory.take([sum(map(self._nbytes, block)) for block in blocks], self._is_over)
        wants: list[Want] = []
        for block, data in zip(blocks, memory, strict=True):
            start = 0
            for run in block:
                nbytes = self._nbytes(run)
                wants += self._wants(run, data[start : start + nbytes])
                start += nbytes
        self._fetch(Targets(wants))
        return deque(zip(blocks, memory, strict=True))

    def _is_over(self) -> bool:
        return self._closed or self._stop.is_set()

    def _wants(self, run: Run, data: Bytes1D) -> list[Want]:
        source, array = self._sources[run.array], self._plan.arrays[run.array]
        memory = torch.from_numpy(data).view(torch_dtype(source.dtype, source.text)).reshape(run.box.shape)
        piece = PieceBox((0,) * len(run.box.shape), run.box.offset, run.box.shape)
        return stored_wants(array, LocalShard(source.text, source.dtype, array.shape, (piece,), memory))

    def _nbytes(self, run: Run) -> int:
        return run.box.num_elements * self._sources[run.array].itemsize

    def _together(self, window: Iterable[Run]) -> Iterator[Sequence[Run]]:
        """Small runs share a buffer, as long as the elements of all are aligned in it."""
        block: list[Run] = []
        filled = 0
        for run in window:
            nbytes = self._nbytes(run)
            if block and (filled + nbytes > BLOCK_BYTES or filled % self._sources[run.array].itemsize):
                yield block
                block, filled = [], 0
            block.append(run)
            filled += nbytes
        if block:
            yield block
