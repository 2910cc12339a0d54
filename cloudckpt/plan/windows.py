"""What is held at a time while a checkpoint is rewritten: runs of chunks, each run a box of its array. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloudckpt.format.box import Box
from cloudckpt.format.grid import Grid


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks ``[start, stop)`` of an array, numbered in its grid, which together are ``box``."""

    array: int
    start: int
    stop: int
    box: Box

    @property
    def num_chunks(self) -> int:
        return self.stop - self.start


def plan_windows(grids: Sequence[Grid], itemsizes: Sequence[int], window_bytes: int) -> list[tuple[Block, ...]]:
    """All chunks in their order, in windows of about ``window_bytes`` (more only where one chunk is larger).

    Blocks are as thick as the window allows: chunks of the source that lie across two windows are read twice.
    """
    windows: list[tuple[Block, ...]] = []
    window: list[Block] = []
    size = 0
    for array, (grid, itemsize) in enumerate(zip(grids, itemsizes, strict=True)):
        for start, stop, box in _blocks(grid, max(1, window_bytes // itemsize)):
            nbytes = box.num_elements * itemsize
            if window and size + nbytes > window_bytes:
                windows.append(tuple(window))
                window, size = [], 0
            window.append(Block(array, start, stop, box))
            size += nbytes
    return [*windows, tuple(window)] if window else windows


def _blocks(grid: Grid, max_elements: int) -> Iterator[tuple[int, int, Box]]:
    """Runs along one dim, at a single index of those before it, over all of those after it."""
    if not grid.num_chunks:
        return
    if not grid.shape:
        yield 0, 1, Box((), ())
        return
    dims = len(grid.shape)
    widest = [int(max(b - a for a, b in itertools.pairwise(edges.tolist()))) for edges in grid.edges]
    rows = [math.prod(widest[: d + 1]) * math.prod(grid.shape[d + 1 :]) for d in range(dims)]
    dim = next((d for d in range(dims) if rows[d] <= max_elements), dims - 1)
    at_a_time = max(1, max_elements // rows[dim])
    below = math.prod(grid.counts[dim + 1 :])
    whole = [slice(0, count) for count in grid.counts[dim + 1 :]]
    for number, outer in enumerate(itertools.product(*map(range, grid.counts[:dim]))):
        for first in range(0, grid.counts[dim], at_a_time):
            last = min(first + at_a_time, grid.counts[dim])
            spans = [*(slice(i, i + 1) for i in outer), slice(first, last), *whole]
            base = number * grid.counts[dim]
            yield (base + first) * below, (base + last) * below, _box(grid, spans)


def _box(grid: Grid, spans: Sequence[slice]) -> Box:
    """The elements of a box of chunks."""
    offset = tuple(int(edges[span.start]) for edges, span in zip(grid.edges, spans, strict=True))
    end = tuple(int(edges[span.stop]) for edges, span in zip(grid.edges, spans, strict=True))
    return Box(offset, tuple(b - a for a, b in zip(offset, end, strict=True)))
