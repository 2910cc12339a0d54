"""Flat buffers: parameters one after another in one dim; and which boxes of a parameter a part of it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.grid import Ints


@dataclass(frozen=True)
class FlatParam:
    """One parameter in a flat buffer: its elements in C order, from ``position`` on.

    Where the buffer has only a part of the tensor (tensor parallelism below ZeRO), ``shape`` is that
    of the part, ``offset`` says where it begins in the tensor, and ``global_shape`` is the tensor's.
    """

    name: str
    shape: tuple[int, ...]
    position: int
    global_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.global_shape is None else self.global_shape


@dataclass(frozen=True)
class FlatLayout:
    """The parameters of a flat buffer, by position. What lies between and behind them is padding.

    ``as_boxes``: how a save stores a parameter. False: as an array of one dim, however it is cut; a
    load of it under tensor parallelism is many short runs, a row each. True: as an array of its own
    shape, cut into boxes where the buffer is; a load has nothing special then, but the grid of chunks
    grows with the square of the number of cuts in a parameter. Parts of a tensor are always boxes.
    """

    params: tuple[FlatParam, ...]
    as_boxes: bool = False

    def __post_init__(self) -> None:
        names: set[str] = set()
        end = 0
        for param in self.params:
            _check_param(param)
            if param.name in names:
                raise InvalidStateError(f"flat layout: two parameters are called {param.name!r}")
            if param.position < end:
                raise InvalidStateError(
                    f"flat layout: {param.name!r} begins at {param.position}, before the one in front ends at {end}"
                )
            names.add(param.name)
            end = param.position + param.numel

    @staticmethod
    def of(
        shapes: Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]],
        *,
        align: int = 1,
        as_boxes: bool = False,
    ) -> FlatLayout:
        """Parameters one after another, each at a multiple of ``align`` elements."""
        params, position = [], 0
        for name, shape in shapes.items() if isinstance(shapes, Mapping) else shapes:
            position = -(-position // align) * align
            params.append(FlatParam(name, tuple(shape), position))
            position += params[-1].numel
        return FlatLayout(tuple(params), as_boxes)

    @property
    def numel(self) -> int:
        """Up to the end of the last parameter, without the padding behind it."""
        return self.params[-1].position + self.params[-1].numel if self.params else 0

    def held(self, start: int, numel: int) -> Iterator[tuple[FlatParam, int, int]]:
        """Every parameter, with the range of its elements that a part ``[start, start + numel)`` of the buffer has."""
        for param in self.params:
            low = min(max(start - param.position, 0), param.numel)
            high = min(max(start + numel - param.position, low), param.numel)
            yield param, low, high


def _check_param(param: FlatParam) -> None:
    numbers = (param.position, *param.shape, *(param.global_shape or ()), *(param.offset or ()))
    if any(type(n) is not int or n < 0 for n in numbers):
        raise InvalidStateError(
            f"flat layout: {param.name!r} has a position, shape or offset that is not made of ints >= 0"
        )
    if (param.global_shape is None) != (param.offset is None):
        raise InvalidStateError(f"flat layout: {param.name!r} needs both global_shape and offset, or neither")
    if param.global_shape is not None and param.offset is not None:
        ends = [o + s for o, s in zip(param.offset, param.shape, strict=False)]
        if not len(param.offset) == len(param.shape) == len(param.global_shape) or any(
            end > extent for end, extent in zip(ends, param.global_shape, strict=True)
        ):
            raise InvalidStateError(
                f"flat layout: {param.name!r}, {param.shape} at {param.offset}, reaches outside of {param.global_shape}"
            )


def part_boxes(param: FlatParam, start: int, stop: int) -> list[Box]:
    """Elements ``[start, stop)`` of a parameter as boxes of the tensor, in that order."""
    boxes = range_boxes(param.shape, start, stop)
    if param.offset is None:
        return boxes
    return [Box(tuple(a + b for a, b in zip(box.offset, param.offset, strict=True)), box.shape) for box in boxes]


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements ``[start, stop)`` of an array in C order, as boxes in that order: at most 2 * dims - 1."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = shape[1:]
    row_size = math.prod(inner)
    (first, head), (last, tail) = divmod(start, row_size), divmod(stop, row_size)
    if first == last:
        return _in_row(first, range_boxes(inner, head, tail))
    boxes = _in_row(first, range_boxes(inner, head, row_size)) if head else []
    whole = first + 1 if head else first
    if whole < last:
        boxes.append(Box((whole, *(0 for _ in inner)), (last - whole, *inner)))
    return boxes + (_in_row(last, range_boxes(inner, 0, tail)) if tail else [])


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes]


def row_dims(shape: tuple[int, ...], box: Box) -> int:
    """How many of the last dims of a box lie in one range of the array: all behind the first one that is cut."""
    dims = len(shape)
    while dims and box.shape[dims - 1] == shape[dims - 1]:
        dims -= 1
    return len(shape) - max(dims - 1, 0)


def row_starts(extents: tuple[int, ...], strides: tuple[int, ...]) -> Ints:
    """The positions of all elements of a strided box, in C order."""
    starts = np.zeros(1, dtype=np.int64)
    for extent, stride in zip(extents, strides, strict=True):
        starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return starts


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
