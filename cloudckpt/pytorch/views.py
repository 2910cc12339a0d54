"""Wants on virtual arrays as wants on stored ones: views of the target's memory, with the boxes that fill them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cloudckpt.format.box import Box
from cloudckpt.plan.flat import c_strides, row_dims, row_starts
from cloudckpt.plan.shard import PieceBox
from cloudckpt.plan.virtual import Part, Stored, VirtualArray, parts_of
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.targets import Want

Memory: TypeAlias = torch.Tensor | npt.NDArray[Any]


def stored_wants(array: VirtualArray, shard: LocalShard) -> list[Want]:
    """``shard`` is a part of ``array``: with its shape, and with its dtype unless values are to be converted."""
    source = array.source
    if source is not None and not source.flat:
        return [(source.number, shard if shard.dtype == array.dtype else replace(shard, dtype=array.dtype))]
    return [want for piece in shard.pieces for want in _piece_wants(array, shard, piece)]


def _piece_wants(array: VirtualArray, shard: LocalShard, piece: PieceBox) -> Iterator[Want]:
    for part, common in parts_of(array, piece.box):
        local = common.relative_to(piece.global_offset).offset
        local = tuple(a + b for a, b in zip(local, piece.local_offset, strict=True))
        memory = _turned(_narrowed(shard.memory, Box(local, common.shape)), part)
        box = part.stored_box(common)
        plain = replace(shard, dtype=array.dtype, shape=part.stored.shape, pieces=(), memory=memory)
        if part.stored.flat:
            yield from _flat_wants(part.stored, plain, box)
        else:
            zero = (0,) * len(box.shape)
            yield part.stored.number, replace(plain, pieces=(PieceBox(zero, box.offset, box.shape),))


def _narrowed(memory: Memory, box: Box) -> Memory:
    if isinstance(memory, torch.Tensor):
        return memory[box.slices]
    dots: tuple[Any, ...] = (*box.slices, ...)  # without them an array of no dims would be copied
    return memory[dots]  # type: ignore[no-any-return]


def _turned(memory: Memory, part: Part) -> Memory:
    """A part of the target with the dims of the stored array."""
    kept = [d for d in part.dims if d is not None]
    memory = memory[(*(slice(None) if d in kept else 0 for d in range(memory.ndim)), ...)]
    order = [sorted(kept).index(d) for d in kept]
    memory = memory.permute(order) if isinstance(memory, torch.Tensor) else np.asarray(memory).transpose(order)
    return memory[(*(None if d is None else slice(None) for d in part.dims), ...)]


def _flat_wants(stored: Stored, shard: LocalShard, box: Box) -> Iterator[Want]:
    """``box`` of a tensor that is stored as one dim: a piece for every run of elements that is one in both."""
    memory = shard.memory
    assert isinstance(memory, torch.Tensor), "numpy arrays are never stored flat"
    together, step = _collapsible(tuple(memory.shape), memory.stride())
    outer = len(box.shape) - min(row_dims(stored.shape, box), together)
    strides = c_strides(stored.shape)
    begin = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    starts = begin + row_starts(box.shape[:outer], strides[:outer])
    places = row_starts(tuple(memory.shape[:outer]), tuple(memory.stride()[:outer]))
    run = box.num_elements // len(starts)
    plain = replace(shard, shape=(math.prod(stored.shape),))
    # Runs of steps > 1 can only be pieces of one view if they are a multiple of the step apart.
    for rest in np.unique(places % step).tolist():
        rows = places % step == rest
        span = (int(places[rows].max()) - rest) // step + run
        view = memory.as_strided((span,), (step,), memory.storage_offset() + rest)
        local = (places[rows] - rest) // step
        # There may be a million of them: zip makes the offsets, of one dim each, without a loop in Python.
        pieces = tuple(map(PieceBox, zip(local.tolist()), zip(starts[rows].tolist()), repeat((run,))))
        yield stored.number, replace(plain, memory=view, pieces=pieces)


def _collapsible(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """How many of the last dims are one evenly spaced run in memory, and the space between its elements."""
    count, step, reach = 0, 0, 0
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1:
            if step and stride != reach:
                break
            step, reach = step or stride, stride * extent
        count += 1
    return count, step or 1
