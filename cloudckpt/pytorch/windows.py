"""Reading the arrays of a rewritten checkpoint out of the stored ones, a window at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch

from cloudckpt.format.codec import Bytes1D
from cloudckpt.plan.rewrite import Rewrite
from cloudckpt.plan.shard import PieceBox
from cloudckpt.plan.windows import Block
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard, torch_dtype
from cloudckpt.pytorch.targets import Targets, Want
from cloudckpt.pytorch.views import stored_wants

Fetch: TypeAlias = Callable[[Targets], None]
"""Fills targets from the store."""


class WindowReader:
    """Chunks of the new arrays, by their number in the chunk table, from any thread; the next window is read ahead.

    They must be asked for about in order, and each once: a window is let go when all of its chunks were handed out.
    """

    def __init__(self, rewrite: Rewrite, windows: Sequence[tuple[Block, ...]], fetch: Fetch) -> None:
        self._rewrite = rewrite
        self._windows = windows
        self._fetch = fetch
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cloudckpt-window")
        self._held: dict[int, Future[dict[Block, LocalShard]]] = {}
        self._left = Counter({i: sum(block.num_chunks for block in window) for i, window in enumerate(windows)})
        first = rewrite.chunks.first_chunks
        blocks = [(i, block) for i, window in enumerate(windows) for block in window]
        self._blocks = blocks
        self._starts = np.array([int(first[block.array]) + block.start for _, block in blocks], dtype=np.int64)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def read(self, chunk: int) -> Bytes1D:
        """The unencoded bytes, padded as they are to be stored."""
        number, block = self._blocks[int(np.searchsorted(self._starts, chunk, side="right")) - 1]
        with self._lock:
            for ahead in (number, number + 1):
                if ahead < len(self._windows) and ahead not in self._held and self._left[ahead]:
                    self._held[ahead] = self._pool.submit(self._load, self._windows[ahead])
            window = self._held[number]
        shard = window.result()[block]
        grid = self._rewrite.chunks.grids[block.array]
        place = chunk - int(self._rewrite.chunks.first_chunks[block.array])
        data = shard.read(grid.box(place), grid.stored_shape(place), self._scratch)
        with self._lock:
            self._left[number] -= 1
            if not self._left[number]:
                del self._held[number]
        return data

    def _load(self, window: tuple[Block, ...]) -> dict[Block, LocalShard]:
        wants: list[Want] = []
        shards: dict[Block, LocalShard] = {}
        for block in window:
            leaf, array = self._rewrite.leaves[block.array], self._rewrite.arrays[block.array]
            kind = torch_dtype(leaf.dtype, leaf.id)
            # Not from malloc, which keeps in each thread's arena about as much as was ever in use there.
            data = torch.from_numpy(self._scratch.take(block.box.num_elements * kind.itemsize))
            memory = data.view(kind).reshape(block.box.shape)
            zero = (0,) * len(block.box.shape)
            piece = PieceBox(zero, block.box.offset, block.box.shape)
            shards[block] = LocalShard(leaf.id, leaf.dtype, leaf.shape, (piece,), memory)
            wants += stored_wants(array, shards[block])
        self._fetch(Targets(wants))
        return shards
