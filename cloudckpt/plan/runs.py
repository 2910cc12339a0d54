"""What is held at a time while tensors are written out in C order: windows of runs. Pure.

The chunks of a checkpoint are boxes, and the bytes of a file of another format are rows. A window therefore is as
thick as the chunks that it meets, so that each of them is read once. Where one layer of chunks is larger than a
window may be, it is cut into equal parts, and its chunks are read once for each of these: for a stored tensor with k
divisions along every dim that happens where the tensor is larger than k windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cloudckpt.format.box import Box
from cloudckpt.format.grid import Grid, Ints
from cloudckpt.plan.virtual import Part, VirtualArray, stored_array


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of an array that follow each other in C order, and are ``box`` of it. ``array`` counts in the plan."""

    array: int
    box: Box


Window: TypeAlias = tuple[Run, ...]
"""Runs that are read together."""


@dataclass(frozen=True, slots=True)
class RunSizes:
    """``run_bytes``: upper bound of a run. ``window_bytes``: what a window is to be, ``largest_bytes``: may be."""

    run_bytes: int
    window_bytes: int
    largest_bytes: int


@dataclass(frozen=True, eq=False)
class RunPlan:
    """``arrays``: those asked for, but one that is stored flat as it is stored: its bytes are in the same order.

    All runs together are the elements of all arrays, one array after the other, each in C order.
    """

    arrays: tuple[VirtualArray, ...]
    windows: tuple[Window, ...]


def plan_runs(
    arrays: Sequence[VirtualArray], itemsizes: Sequence[int], grids: Sequence[Grid], sizes: RunSizes
) -> RunPlan:
    """``itemsizes``: of the elements as they are held. ``grids``: of the stored arrays, by their number."""
    plain = tuple(map(_unflattened, arrays))
    windows: list[Window] = []
    window: list[Run] = []
    filled = 0
    for number, (array, itemsize) in enumerate(zip(plain, itemsizes, strict=True)):
        for slab in _Slabs(array, grids, itemsize, sizes):
            nbytes = slab.num_elements * itemsize
            if window and filled + nbytes > sizes.window_bytes:
                windows.append(tuple(window))
                window, filled = [], 0
            window += [Run(number, box) for box in _runs(slab, max(1, sizes.run_bytes // itemsize))]
            filled += nbytes
    return RunPlan(plain, (*windows, tuple(window)) if window else tuple(windows))


def _unflattened(array: VirtualArray) -> VirtualArray:
    source = array.source
    if source is None or not source.flat:
        return array
    return stored_array(source.number, array.dtype, (math.prod(source.shape),))


class _Slabs:
    """Iterates over an array in slabs of consecutive elements, which are boxes: along one dim, at one index each of
    the dims before it, over all of those after it."""

    def __init__(self, array: VirtualArray, grids: Sequence[Grid], itemsize: int, sizes: RunSizes) -> None:
        self._array = array
        self._grids = grids
        self._sizes = sizes
        self._row_bytes = [math.prod(array.shape[d + 1 :]) * itemsize for d in range(len(array.shape))]

    def __iter__(self) -> Iterator[Box]:
        if not self._array.shape:
            yield Box((), ())
        elif 0 not in self._array.shape:
            yield from self._below((), self._array.parts)

    def _below(self, outer: tuple[int, ...], parts: Sequence[Part]) -> Iterator[Box]:
        """Those at the indices ``outer`` of the first dims. ``parts``: what is there."""
        dim = len(outer)
        row_bytes = self._row_bytes[dim]
        at_once = self._sizes.largest_bytes // row_bytes
        for start, stop in self._spans(dim, parts):
            if stop - start <= at_once:
                yield self._slab(outer, start, stop)
            elif at_once or dim == len(self._row_bytes) - 1:
                for a, b in itertools.pairwise(_even(start, stop, max(1, at_once))):
                    yield self._slab(outer, a, b)
            else:
                for index in range(start, stop):
                    yield from self._below((*outer, index), [p for p in parts if _meets(p.box, dim, index)])

    def _slab(self, outer: tuple[int, ...], start: int, stop: int) -> Box:
        rest = self._array.shape[len(outer) + 1 :]
        return Box((*outer, start, *(0,) * len(rest)), (*(1,) * len(outer), stop - start, *rest))

    def _spans(self, dim: int, parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
        """Along a dim, what is cut where no chunk is, and as thick as a window if it can be."""
        thickest = max(1, self._sizes.window_bytes // self._row_bytes[dim])
        begin = end = 0
        for _, stop in _layers(self._array.shape[dim], _chunk_spans(self._grids, parts, dim), thickest):
            if stop - begin > thickest and end > begin:
                yield begin, end
                begin = end
            end = stop
        yield begin, end


def _meets(box: Box, dim: int, index: int) -> bool:
    return box.offset[dim] <= index < box.end[dim]


def _chunk_spans(grids: Sequence[Grid], parts: Sequence[Part], dim: int) -> tuple[Ints, Ints]:
    """Where chunks begin and end along a dim, clipped to their parts."""
    starts, stops = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for part in parts:
        low, high = part.box.offset[dim], part.box.end[dim]
        if low == high or part.stored.flat:
            continue  # a cut through what is stored flat meets one chunk, if it is not turned
        if dim not in part.dims:
            edges = np.array([low, high], dtype=np.int64)
        else:
            stored = part.dims.index(dim)
            edges = grids[part.stored.number].edges[stored] + (low - part.start[stored])
            edges = np.unique(np.clip(edges, low, high))
        starts.append(edges[:-1])
        stops.append(edges[1:])
    return np.concatenate(starts), np.concatenate(stops)


def _layers(extent: int, chunks: tuple[Ints, Ints], thickest: int) -> Iterator[tuple[int, int]]:
    """The spans of a dim between indices at which no chunk would be cut; where there are no chunks, any will do."""
    order = np.argsort(chunks[0], kind="stable")
    starts, stops = chunks[0][order], chunks[1][order]
    reach = np.maximum.accumulate(stops)
    last = np.ones(len(starts), dtype=bool)
    last[:-1] = starts[1:] >= reach[:-1]
    ends = np.nonzero(last)[0]
    firsts = np.append(0, ends + 1)[: len(ends)]
    done = 0
    for start, stop in [*zip(starts[firsts].tolist(), reach[ends].tolist(), strict=True), (extent, extent)]:
        yield from itertools.pairwise(_even(done, start, thickest))
        if stop > start:
            yield start, stop
        done = stop


def _even(start: int, stop: int, most: int) -> list[int]:
    """Cuts of a span into as few parts as there can be of at most so many, about equal."""
    count = -(-(stop - start) // most)
    return [start + (stop - start) * i // count for i in range(count + 1)] if count else [start]


def _runs(slab: Box, max_elements: int) -> Iterator[Box]:
    """The elements of a slab in their order, so many at a time at most."""
    dims = len(slab.shape)
    rows = [math.prod(slab.shape[d + 1 :]) for d in range(dims)]
    dim = next((d for d in range(dims) if rows[d] <= max_elements), None)
    if dim is None:
        yield slab
        return
    start, stop = slab.offset[dim], slab.end[dim]
    cuts = _even(start, stop, max_elements // rows[dim])
    outer = [range(a, b) for a, b in zip(slab.offset[:dim], slab.end[:dim], strict=True)]
    for index in itertools.product(*outer):
        for a, b in itertools.pairwise(cuts):
            yield Box((*index, a, *slab.offset[dim + 1 :]), (*(1,) * dim, b - a, *slab.shape[dim + 1 :]))
