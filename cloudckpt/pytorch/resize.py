"""Targets of other extents than what is stored: the common part is loaded, the rest filled or kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.plan.changes import Resize, uncovered
from cloudckpt.plan.shard import PieceBox
from cloudckpt.pytorch.shards import LocalShard


def resized(shard: LocalShard, stored_shape: tuple[int, ...], resize: Resize) -> tuple[LocalShard, Callable[[], None]]:
    """The part of a target that is stored, what fills the rest. InvalidStateError for values that it cannot hold."""
    stored = Box((0,) * len(stored_shape), stored_shape)
    pieces: list[PieceBox] = []
    rest: list[Box] = []
    for piece in shard.pieces:
        common = piece.box.intersect(stored)
        if common is not None:
            pieces.append(PieceBox(_local(piece, common).offset, common.offset, common.shape))
        rest += [_local(piece, box) for box in uncovered(piece.box, common)]
    _check_value(shard, resize.fill)

    def fill() -> None:
        if resize.fill is None:
            return
        for box in rest:
            shard.memory[box.slices] = resize.fill

    return replace(shard, shape=stored_shape, pieces=tuple(pieces)), fill


def _local(piece: PieceBox, box: Box) -> Box:
    within = box.relative_to(piece.global_offset)
    return Box(tuple(a + b for a, b in zip(within.offset, piece.local_offset, strict=True)), box.shape)


def _check_value(shard: LocalShard, value: float | None) -> None:
    if value is None:
        return
    try:
        if isinstance(shard.memory, torch.Tensor):
            held = torch.zeros((), dtype=shard.memory.dtype).fill_(value).item()
        else:
            held = np.full((), value, dtype=shard.memory.dtype).item()
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidStateError(f"{shard.text!r}: cannot be filled with {value!r}: {error}") from error
    if not isinstance(held, float) and held != value:
        raise InvalidStateError(f"{shard.text!r}: {shard.dtype} cannot hold the fill value {value!r}")
