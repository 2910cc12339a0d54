"""Tensors of which the caller says, piece by piece, where they belong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.plan.overlap import first_overlap, uncovered
from cloudckpt.plan.shard import PieceBox
from cloudckpt.pytorch.shards import LocalShard, dtype_name, plain_tensor

_LARGEST = 2**62
"""Larger extents are nonsense, and sums of them would overflow int64."""


@dataclass(frozen=True)
class Piece:
    """One rectangular part of a shard: where it is in the local tensor, where in the global one, and its shape.

    All three in elements, one int per dim.
    """

    local_offset: Sequence[int]
    global_offset: Sequence[int]
    shape: Sequence[int]


class ShardedTensor:
    """A rank's part of a tensor, in a state to save (which reads ``local``) or to load into (which fills it).

    ``pieces``: which boxes of ``local`` are which of the tensor of ``global_shape``; None: ``local`` is
    all of it, ``[]``: this rank holds nothing. What of ``local`` is in no piece is not stored; a load
    sets it to ``padding``, or leaves it as it is where that is None.

    Over all ranks the pieces must cover the tensor. Equal pieces are replicas. Others may only
    overlap if their ``replica`` numbers differ. What is wrong with any of it is an InvalidStateError
    of save() and load(), which know the tensor's name.
    """

    def __init__(
        self,
        local: torch.Tensor,
        global_shape: Sequence[int],
        pieces: Sequence[Piece] | None = None,
        replica: int = 0,
        *,
        padding: bool | complex | None = None,
    ) -> None:
        self.local = local
        self.global_shape = global_shape
        self.pieces = pieces
        self.replica = replica
        self.padding = padding

    def __repr__(self) -> str:
        local = tuple(getattr(self.local, "shape", ()))
        return f"ShardedTensor(local of {local}, {self.global_shape}, {self.pieces}, replica={self.replica})"


def sharded_shard(tensor: ShardedTensor, text: str) -> LocalShard:
    """``text`` is the dotted path. Raises InvalidStateError, naming it and the piece, for what does not fit."""
    if isinstance(tensor.local, DTensor):
        raise InvalidStateError(
            f"{text!r}: the local part of a ShardedTensor is a DTensor, which says itself what part it is: "
            "pass one of them"
        )
    if not isinstance(tensor.local, torch.Tensor):
        raise InvalidStateError(f"{text!r}: the local part of a ShardedTensor is a {type(tensor.local).__name__}")
    local = plain_tensor(tensor.local, text)
    dtype = dtype_name(local, text)
    shape = _ints(tensor.global_shape, f"{text!r}: global_shape")
    if math.prod(shape) * local.element_size() >= _LARGEST:
        raise InvalidStateError(f"{text!r}: the global shape {shape} is too large")
    pieces = _pieces(tensor.pieces, tuple(local.shape), shape, text)
    replica = _int(tensor.replica, f"{text!r}: replica", largest=2**31)
    padding = _padding(tensor.padding, local.dtype, text)
    return LocalShard(text, dtype, shape, pieces, local, placed=True, replica=replica, padding=padding)


def fill_padding(shard: LocalShard) -> None:
    """Set what no piece of a shard to be loaded into covers."""
    if shard.padding is None or not isinstance(shard.memory, torch.Tensor):
        return
    pieces = [piece for piece in shard.pieces if piece.box.num_elements]
    covered = sum(piece.box.num_elements for piece in pieces)
    if covered == shard.memory.numel():
        return
    if not pieces:
        shard.memory.fill_(shard.padding)
        return
    offset = np.array([piece.local_offset for piece in pieces], dtype=np.int64)
    extents = np.array([piece.shape for piece in pieces], dtype=np.int64)
    for box in uncovered(tuple(shard.memory.shape), offset, extents):
        shard.memory[box.slices].fill_(shard.padding)


def _pieces(given: Any, local: tuple[int, ...], shape: tuple[int, ...], text: str) -> tuple[PieceBox, ...]:
    if given is None:
        if local != shape:
            raise InvalidStateError(
                f"{text!r}: the local tensor of {local} is not the whole of {shape}; give pieces=[...], "
                "or pieces=[] where this rank holds nothing"
            )
        return (PieceBox((0,) * len(shape), (0,) * len(shape), shape),)
    if not isinstance(given, (list, tuple)):
        raise InvalidStateError(f"{text!r}: pieces must be a list of Piece, not a {type(given).__name__}")
    pieces = [_piece(piece, local, shape, f"{text!r}: piece {number}") for number, piece in enumerate(given)]
    _check_apart(pieces, text)
    return tuple(pieces)


def _piece(given: Any, local: tuple[int, ...], shape: tuple[int, ...], where: str) -> PieceBox:
    if not isinstance(given, Piece):
        raise InvalidStateError(f"{where} is a {type(given).__name__}; write Piece(local_offset, global_offset, shape)")
    piece = PieceBox(
        _ints(given.local_offset, f"{where}: local_offset"),
        _ints(given.global_offset, f"{where}: global_offset"),
        _ints(given.shape, f"{where}: shape"),
    )
    for offset, extents, what in ((piece.local_offset, local, "local"), (piece.global_offset, shape, "global")):
        if not len(offset) == len(piece.shape) == len(extents):
            raise InvalidStateError(
                f"{where}: {what}_offset {offset} and shape {piece.shape} do not have the {len(extents)} dims "
                f"of the {what} tensor of {extents}"
            )
        if any(o + n > extent for o, n, extent in zip(offset, piece.shape, extents, strict=True)):
            raise InvalidStateError(
                f"{where}: {what}_offset {offset} and shape {piece.shape} reach outside of the {what} tensor "
                f"of {extents}"
            )
    return piece


def _check_apart(pieces: Sequence[PieceBox], text: str) -> None:
    numbers = [number for number, piece in enumerate(pieces) if 0 not in piece.shape]
    if len(numbers) < 2:
        return
    for what in ("local", "global"):
        boxes = [Box(getattr(pieces[i], f"{what}_offset"), pieces[i].shape) for i in numbers]
        found = first_overlap(boxes)
        if found is not None:
            a, b = found
            raise InvalidStateError(
                f"{text!r}: pieces {numbers[a]} and {numbers[b]} overlap in the {what} tensor: "
                f"{boxes[a]} and {boxes[b]}"
            )


def _ints(values: Any, what: str) -> tuple[int, ...]:
    if type(values) is tuple and all(type(value) is int and 0 <= value < _LARGEST for value in values):
        return values  # nearly always
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        raise InvalidStateError(f"{what} must be a sequence of ints, not {values!r:.100}")
    return tuple(_int(value, what) for value in values)


def _int(value: Any, what: str, largest: int = _LARGEST) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidStateError(f"{what}: {value!r:.100} is not an int")
    if not 0 <= value < largest:
        raise InvalidStateError(f"{what}: {value!r:.100} is {'negative' if value < 0 else 'too large'}")
    return int(value)


def _padding(value: Any, dtype: torch.dtype, text: str) -> Any:
    if value is None:
        return None
    kinds: tuple[type, ...] = (bool, int, np.integer)
    if dtype.is_floating_point or dtype.is_complex:
        kinds += (float, np.floating)
    if dtype.is_complex:
        kinds += (complex, np.complexfloating)
    if not isinstance(value, kinds):
        raise InvalidStateError(f"{text!r}: padding={value!r:.100} is no value of {dtype}")
    try:
        torch.empty(1, dtype=dtype).fill_(value)  # type: ignore[call-overload]  # checked above
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidStateError(f"{text!r}: padding={value!r:.100} is no value of {dtype}: {error}") from error
    return value
