"""Flat shards (ZeRO, FSDP1, DistributedOptimizer): a rank's part of a buffer of parameters, one after another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.codec import Bytes1D
from cloudckpt.plan.flat import FlatLayout, FlatParam, part_boxes
from cloudckpt.plan.shard import PieceBox
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard, tensor_shard
from cloudckpt.pytorch.targets import Want
from cloudckpt.pytorch.views import stored_wants


class FlatShards(Mapping[str, "FlatShard"]):
    """This rank's part ``[start, start + len(local))`` of a flat buffer.

    In a state it stands for a dict of the parameters' names, under the paths at which plain tensors
    would stand. Its items, `FlatShard`, may also be put into a state one by one. Elements of
    ``local`` that belong to no parameter (padding) are neither stored nor changed by a load.
    """

    def __init__(self, local: torch.Tensor, layout: FlatLayout, start: int) -> None:
        _check_arguments(local, layout, start)
        self.local = local
        self.layout = layout
        self.start = start
        self._items = {
            param.name: FlatShard(local, param, low, high, param.position + low - start, layout.as_boxes)
            for param, low, high in layout.held(start, len(local))
        }

    def __getitem__(self, name: str) -> FlatShard:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"FlatShards({len(self)} parameters, elements {self.start} to {self.start + len(self.local)})"


def _check_arguments(local: Any, layout: Any, start: Any) -> None:
    if not isinstance(local, torch.Tensor) or local.dim() != 1 or not local.is_contiguous():
        raise InvalidStateError("FlatShards: the local part must be a contiguous tensor of one dim")
    if not isinstance(layout, FlatLayout):
        raise InvalidStateError(f"FlatShards: the layout must be a FlatLayout, not a {type(layout).__name__}")
    if type(start) is not int or start < 0:
        raise InvalidStateError(f"FlatShards: start must be an int >= 0, not {start!r}")


@dataclass(frozen=True, eq=False)
class FlatShard:
    """Elements ``[low, high)`` of one parameter, which stand in ``buffer`` from ``position`` on."""

    buffer: torch.Tensor
    param: FlatParam
    low: int
    high: int
    position: int
    as_boxes: bool

    @property
    def local(self) -> torch.Tensor:
        return (
            self.buffer[self.position : self.position + self.high - self.low]
            if self.high > self.low
            else self.buffer[:0]
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.param.whole_shape

    @property
    def logical_shape(self) -> tuple[int, ...] | None:
        """What the leaf of the tree records if the parameter is stored as one dim."""
        return self.shape if self._stored_flat and len(self.shape) != 1 else None

    @property
    def _stored_flat(self) -> bool:
        return self.param.offset is None and not self.as_boxes

    def stored(self, text: str) -> LocalShard:
        """As it is saved: one range of a flat array, or boxes of a tensor of which the buffer has only a part."""
        local = replace(tensor_shard(self.local, text), placed=True)
        if self._stored_flat:
            return self._range(local)
        boxes = self.boxes(text)
        pieces = tuple(piece for box in boxes for piece in box.pieces)
        return _Boxes(text, local.dtype, self.shape, pieces, local.memory, placed=True, boxes=boxes)

    def boxes(self, text: str) -> tuple[LocalShard, ...]:
        """The same elements as boxes of the tensor, each with its own view of the buffer."""
        local = replace(tensor_shard(self.local, text), placed=True)
        assert isinstance(local.memory, torch.Tensor)
        found, position = [], 0
        for box in part_boxes(self.param, self.low, self.high):
            memory = local.memory[position : position + box.num_elements].view(box.shape)
            piece = PieceBox((0,) * len(box.shape), box.offset, box.shape)
            found.append(replace(local, shape=self.shape, pieces=(piece,), memory=memory))
            position += box.num_elements
        return tuple(found)

    def wants(self, array: VirtualArray, text: str) -> list[Want]:
        """What fills it from ``array``, whose shape is that of the tensor."""
        source = array.source
        if source is not None and source.flat and self.param.offset is None:
            local = self._range(replace(tensor_shard(self.local, text), placed=True))
            return [(source.number, replace(local, dtype=array.dtype))]
        return [want for box in self.boxes(text) for want in stored_wants(array, box)]

    def _range(self, local: LocalShard) -> LocalShard:
        piece = PieceBox((0,), (self.low,), (self.high - self.low,))
        return replace(local, shape=(math.prod(self.shape),), pieces=(piece,) if self.high > self.low else ())


@dataclass(frozen=True, eq=False)
class _Boxes(LocalShard):
    """A shard whose pieces have each a memory of their own."""

    boxes: tuple[LocalShard, ...] = ()

    def moved(self, memory: torch.Tensor | npt.NDArray[Any]) -> LocalShard:
        assert isinstance(memory, torch.Tensor)
        parts = torch.split(memory, [box.pieces[0].box.num_elements for box in self.boxes])
        boxes = [box.moved(part.view(box.pieces[0].shape)) for box, part in zip(self.boxes, parts, strict=True)]
        return replace(self, memory=memory, boxes=tuple(boxes))

    def read(self, box: Box, stored_shape: tuple[int, ...], scratch: Scratch) -> Bytes1D:
        holder = next(shard for shard in self.boxes if shard.pieces[0].box.intersect(box) == box)
        return holder.read(box, stored_shape, scratch)
