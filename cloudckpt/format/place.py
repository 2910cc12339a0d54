"""Putting the bytes of a chunk where they belong in memory, as they arrive, with one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a part of a chunk goes.

    ``target``: writable uint8 view of exactly the wanted part, any strides, one axis per entry of
    ``extents``. ``extents``: the whole chunk as stored, in rows of bytes: the last axis is bytes.
    ``start``: where the wanted part begins along each axis.
    """

    target: Bytes
    extents: tuple[int, ...]
    start: tuple[int, ...]

    @staticmethod
    def of_box(target: Bytes, stored_shape: Sequence[int], offset: Sequence[int]) -> Placement:
        """``target`` has the wanted box's shape and a last axis of ``itemsize`` bytes."""
        return Placement.of_rows(target, [*stored_shape, target.shape[-1]], [*offset, 0])

    @staticmethod
    def of_rows(target: Bytes, extents: Sequence[int], start: Sequence[int]) -> Placement:
        """As the fields say, but rows that follow each other in memory become one: fewer, larger copies."""
        extents, start = list(extents), list(start)
        shape, strides = list(target.shape), list(target.strides)
        while (
            len(shape) > 1
            and shape[-1] == extents[-1]
            and (strides[-2] == shape[-1] or shape[-2] == 1)
            and (strides[-1] == 1 or shape[-1] == 1)
        ):
            row = shape.pop()
            shape[-1] *= row
            strides.pop()
            strides[-1] = 1
            extents[-2:] = [extents[-2] * row]
            start[-2:] = [start[-2] * row]
        if len(shape) != target.ndim:
            target = np.lib.stride_tricks.as_strided(target, shape, strides)
        return Placement(target, tuple(extents), tuple(start))

    def put(self, data: Bytes, position: int) -> None:
        """Bytes ``[position, position + len(data))`` of the chunk; what is not wanted is skipped."""
        _put(self.target, self.extents, self.start, data, position)


@dataclass(frozen=True)
class PlacementSink:
    """All the places in host memory that parts of one chunk go to."""

    placements: Sequence[Placement]

    def put(self, data: Bytes, position: int) -> None:
        for placement in self.placements:
            placement.put(data, position)

    def done(self) -> None: ...


def _put(target: Bytes, extents: tuple[int, ...], start: tuple[int, ...], data: Bytes, position: int) -> None:
    first, wanted = start[0], target.shape[0]
    if len(extents) == 1:
        lo, hi = max(position, first), min(position + len(data), first + wanted)
        if lo < hi:
            target[lo - first : hi - first] = data[lo - position : hi - position]
        return
    row_bytes = math.prod(extents[1:])
    row, within = divmod(position, row_bytes)
    if within:
        head = min(row_bytes - within, len(data))
        if first <= row < first + wanted:
            _put(target[row - first], extents[1:], start[1:], data[:head], within)
        data, row = data[head:], row + 1
    whole = len(data) // row_bytes
    lo, hi = max(row, first), min(row + whole, first + wanted)
    if lo < hi:
        block = data[(lo - row) * row_bytes : (hi - row) * row_bytes].reshape(hi - lo, *extents[1:])
        window = tuple(slice(s, s + n) for s, n in zip(start[1:], target.shape[1:], strict=True))
        target[lo - first : hi - first] = block[(slice(None), *window)]
    tail = data[whole * row_bytes :]
    row += whole
    if len(tail) and first <= row < first + wanted:
        _put(target[row - first], extents[1:], start[1:], tail, 0)
