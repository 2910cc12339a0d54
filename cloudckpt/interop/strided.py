"""Tensors with strides as boxes of arrays whose bytes lie in C order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from cloudckpt.format.box import Box

MAX_RUNS = 4096
"""Of one tensor. What would be more is laid out in a way that nobody saves on purpose."""


@dataclass(frozen=True, slots=True)
class Run:
    """``box`` of a tensor is a box of an array in C order; ``dims`` and ``start`` as in ``plan.virtual.Part``.

    ``first``: the element of the memory at which the array begins.
    """

    first: int
    shape: tuple[int, ...]
    box: Box
    dims: tuple[int | None, ...]
    start: tuple[int, ...]


def is_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def runs(shape: tuple[int, ...], strides: tuple[int, ...], first: int, numel: int) -> list[Run] | None:
    """How a tensor lies in a memory of ``numel`` elements, the first one at ``first``; None for more than `MAX_RUNS`.

    The tensor has elements, and all of them are in the memory.
    """
    found = list(itertools.islice(_runs(Box((0,) * len(shape), shape), strides, first, numel), MAX_RUNS + 1))
    return found if len(found) <= MAX_RUNS else None


def _runs(box: Box, strides: tuple[int, ...], first: int, numel: int) -> Iterator[Run]:
    dims = sorted((d for d, n in enumerate(box.shape) if n > 1), key=lambda d: (-strides[d], d))
    run = _nested(box, strides, dims, first, numel)
    if run is not None:
        yield run
        return
    # Repeated dims first, then the outermost: an index at a time.
    dim = next((d for d in dims if strides[d] == 0), dims[0])
    for index in range(box.shape[dim]):
        offset = (*box.offset[:dim], box.offset[dim] + index, *box.offset[dim + 1 :])
        row = Box(offset, (*box.shape[:dim], 1, *box.shape[dim + 1 :]))
        yield from _runs(row, strides, first + index * strides[dim], numel)


def _nested(box: Box, strides: tuple[int, ...], dims: list[int], first: int, numel: int) -> Run | None:
    """Where each dim's rows lie whole within one row of the next larger stride: one array, with gaps as more extent."""
    steps = [strides[d] for d in dims]
    if 0 in steps:
        return None
    extents = [box.shape[dims[0]]] if dims else []
    for outer, inner, dim in zip(steps, steps[1:], dims[1:], strict=False):
        if outer % inner or box.shape[dim] > outer // inner:
            return None
        extents.append(outer // inner)
    places: list[int | None] = [*dims]
    if steps and steps[-1] > 1:
        extents.append(steps[-1])
        places.append(None)
    total = math.prod(extents)
    # From the start of the row in which the first element is, if that fits: then the rows end with the memory.
    begin, start = _aligned(first, box, dims, steps, extents)
    if begin + total > numel:
        begin, start = first, (0,) * len(extents)
    if begin + total > numel:
        return None
    return Run(begin, tuple(extents), box, tuple(places), start)


def _aligned(
    first: int, box: Box, dims: list[int], steps: list[int], extents: list[int]
) -> tuple[int, tuple[int, ...]]:
    """The start of the row of the outermost stride, and the index of the first element from there."""
    if not steps:
        return first, ()
    rest = first % steps[0]
    start = [0]
    for step, dim, extent in zip(steps[1:], dims[1:], extents[1:], strict=False):
        index, rest = divmod(rest, step)
        if index + box.shape[dim] > extent:
            return first, (0,) * len(extents)
        start.append(index)
    if len(extents) > len(steps):
        start.append(rest)
    return first - first % steps[0], tuple(start)
