"""Which boxes meet, and which chunks of a grid lie in which boxes; all of it in numpy, since there may be millions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cloudckpt.format.box import Box
from cloudckpt.format.grid import Grid, Ints

FEW = 6
"""So many boxes are compared each with each sooner than numpy is called."""


AnyInt = TypeVar("AnyInt", bound=np.integer[Any])


def overlaps(grid: Grid, offset: Ints, shape: Ints) -> tuple[Ints, Ints]:
    """``(box number, chunk number)`` of every pair that has an element in common.

    ``offset`` and ``shape`` are int64[k, dims] of boxes inside the tensor, none of them empty.
    Ordered by box, then chunk.
    """
    num_boxes = len(offset)
    box = np.arange(num_boxes, dtype=np.int64)
    chunk = np.zeros(num_boxes, dtype=np.int64)
    for d, (edges, count) in enumerate(zip(grid.edges, grid.counts, strict=True)):
        first = np.searchsorted(edges, offset[:, d], side="right") - 1
        last = np.searchsorted(edges, offset[:, d] + shape[:, d], side="left")
        lengths = (last - first)[box]
        starts = np.cumsum(lengths) - lengths
        within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
        chunk = np.repeat(chunk * count + first[box], lengths) + within
        box = np.repeat(box, lengths)
    return box, chunk


def chunk_bounds(grid: Grid, chunk: Ints) -> tuple[Ints, Ints]:
    """``(start, end)``, int64[k, dims] each, of chunks by their number (without padding)."""
    index = np.unravel_index(chunk, grid.counts) if grid.counts else ()
    start = np.empty((len(chunk), len(grid.counts)), dtype=np.int64)
    end = np.empty_like(start)
    for d, edges in enumerate(grid.edges):
        start[:, d] = edges[index[d]]
        end[:, d] = edges[index[d] + 1]
    return start, end


def group_rows(values: Ints) -> tuple[Ints, Sequence[Ints]]:
    """Distinct values, ascending, and the row numbers of each."""
    order = stable_order(values)
    distinct, starts = runs(values[order])
    # Split always returns a part, also of nothing.
    return distinct, np.split(order, starts[1:]) if len(order) else []


def stable_order(values: Ints) -> Ints:
    """``argsort`` that keeps equal values in order; values are not negative."""
    # Radix sort, which numpy has for 16 bits only, takes a fraction of the time.
    small = len(values) and int(values.max()) < 2**16
    return np.argsort(values.astype(np.uint16) if small else values, kind="stable")


def runs(values: npt.NDArray[AnyInt]) -> tuple[npt.NDArray[AnyInt], Ints]:
    """The value of every run of equal ones, and the row at which it starts."""
    new = np.ones(len(values), dtype=bool)
    new[1:] = values[1:] != values[:-1]
    starts = np.nonzero(new)[0]
    return values[starts], starts


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Numbers of two boxes that have an element in common, or None. No box may be empty."""
    if len(boxes) <= FEW:
        pairs = ((i, j) for j in range(len(boxes)) for i in range(j))
        return next((pair for pair in pairs if boxes[pair[0]].intersect(boxes[pair[1]]) is not None), None)
    dims = len(boxes[0].offset)
    if dims == 0:
        return 0, 1
    offset = np.array([box.offset for box in boxes], dtype=np.int64)
    end = offset + np.array([box.shape for box in boxes], dtype=np.int64)
    # A sweep along the dim in which the boxes begin at the most places, so that few are open at a time.
    sweep = max(range(dims), key=lambda d: len(np.unique(offset[:, d])))
    running = np.zeros(0, dtype=np.int64)
    for number in np.argsort(offset[:, sweep], kind="stable").tolist():
        running = running[end[running, sweep] > offset[number, sweep]]
        meets = ((offset[running] < end[number]) & (offset[number] < end[running])).all(axis=1)
        if meets.any():
            other = int(running[np.argmax(meets)])
            return min(other, number), max(other, number)
        running = np.append(running, number)
    return None


def uncovered(extents: Sequence[int], offset: Ints, shape: Ints) -> list[Box]:
    """Boxes of all elements of a tensor that are in none of the given boxes, none of which is empty."""
    edges = [
        np.unique(np.concatenate([np.array([0, n], dtype=np.int64), offset[:, d], offset[:, d] + shape[:, d]]))
        for d, n in enumerate(extents)
    ]
    grid = Grid.from_edges(extents, edges)
    covered = np.zeros(grid.num_chunks, dtype=bool)
    covered[overlaps(grid, offset, shape)[1]] = True
    return [grid.box(cell) for cell in np.nonzero(~covered)[0].tolist()]
