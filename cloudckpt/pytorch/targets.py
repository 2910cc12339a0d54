"""Where the bytes of a load go: straight into host memory, or through a host buffer to a device or another dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cloudckpt._cached import cached_property
from cloudckpt.format.box import Box
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.place import Bytes, Placement, PlacementSink
from cloudckpt.plan.reads import Parts
from cloudckpt.plan.shard import PieceBox, PieceTable
from cloudckpt.pytorch.memory import Elements, array_bytes, opaque_tensor, tensor_elements
from cloudckpt.pytorch.shards import LocalShard

Want = tuple[int, LocalShard]
"""An array number, and the shard to fill from it."""


class Targets:
    """The memory that one rank fills. Row i of ``table`` is what ``fields[i]`` wants."""

    def __init__(self, wants: Sequence[Want]) -> None:
        rows = [
            (number, shard, piece)
            for number, shard in sorted(wants, key=lambda want: want[0])
            for piece in shard.pieces
            if 0 not in piece.shape
        ]
        self.table = PieceTable.build((number, piece.box) for number, _, piece in rows)
        self.fields = [Field(shard, piece) for _, shard, piece in rows]


class Field:
    """The memory of one piece."""

    def __init__(self, shard: LocalShard, piece: PieceBox) -> None:
        self._shard = shard
        self._box = Box(piece.local_offset, piece.shape)

    @property
    def device(self) -> torch.device:
        memory = self._shard.memory
        return memory.device if isinstance(memory, torch.Tensor) else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return self._box.num_elements * self._shard.itemsize

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        return getattr(torch, self._shard.dtype)  # type: ignore[no-any-return]

    @cached_property
    def is_direct(self) -> bool:
        """Whether stored bytes can be put in place as they are."""
        memory = self._shard.memory
        return self._shard.on_host and (not isinstance(memory, torch.Tensor) or memory.dtype == self.stored_dtype)

    @cached_property
    def _host(self) -> tuple[Bytes, int]:
        """The memory as uint8, and the bytes of an element in its last axis (1: that axis is all of an element)."""
        view: Any = (*self._box.slices, ...)  # with the dots it is a view also of a 0-dim array
        elements: Elements = self._shard.elements[view]
        itemsize = elements.dtype.itemsize
        if elements.ndim and elements.strides[-1] == itemsize:
            return elements.view("u1"), itemsize
        return array_bytes(elements), 1

    def placement(
        self, stored_shape: Sequence[int], in_chunk: Sequence[int], in_piece: Sequence[int], shape: Sequence[int]
    ) -> Placement:
        """Where a part of a chunk goes; only if ``is_direct``."""
        memory, scale = self._host
        start, extents = [*in_chunk], [*stored_shape]
        slices = [slice(a, a + n) for a, n in zip(in_piece, shape, strict=True)]
        if scale > 1:
            start[-1], extents[-1] = start[-1] * scale, extents[-1] * scale
            slices[-1] = slice(slices[-1].start * scale, slices[-1].stop * scale)
        elif memory.ndim > len(slices):
            start.append(0)
            extents.append(memory.shape[-1])
        return Placement.of_rows(memory[tuple(slices)], extents, start)

    def fill(
        self,
        payload: torch.Tensor,
        payload_shape: Sequence[int],
        in_payload: Sequence[int],
        in_piece: Sequence[int],
        shape: Sequence[int],
    ) -> None:
        """Set a part from where it lies in a box of stored bytes: uint8, one-dimensional, on any device."""
        if self.is_direct:
            data = payload.cpu().numpy()
            self.placement(payload_shape, in_payload, in_piece, shape).put(data, 0)
            return
        box = payload.view(self.stored_dtype).reshape(tuple(payload_shape))
        self.put(box[tuple(slice(a, a + n) for a, n in zip(in_payload, shape, strict=True))], in_piece, shape)

    def put(self, payload: torch.Tensor, in_piece: Sequence[int], shape: Sequence[int]) -> None:
        """Set a part from a tensor of its shape and the stored dtype, on any device."""
        memory = self._shard.memory
        assert isinstance(memory, torch.Tensor), "numpy arrays are filled through placements"
        part = memory[tuple(slice(o + a, o + a + n) for o, a, n in zip(self._box.offset, in_piece, shape, strict=True))]
        with torch.no_grad():
            if memory.dtype != self.stored_dtype:
                part.copy_(payload)
            else:
                # As plain numbers: not every backend copies every dtype.
                opaque_tensor(part).copy_(opaque_tensor(payload))


class _Staged:
    """A part in host memory, on its way."""

    def __init__(self, field: Field, in_piece: Sequence[int], shape: Sequence[int]) -> None:
        self._field, self._in_piece, self._shape = field, in_piece, shape
        self._host: torch.Tensor | None = torch.empty(tuple(shape), dtype=field.stored_dtype)
        self.host_bytes: Bytes | None = array_bytes(tensor_elements(self._host))

    def finish(self) -> None:
        assert self._host is not None
        self._field.put(self._host, self._in_piece, self._shape)
        self._host = self.host_bytes = None  # before the next chunk's is made


@dataclass(frozen=True)
class StagedSink:
    """Into host buffers, and on once the checksum is known to be right."""

    placements: list[Placement]
    staged: Sequence[_Staged]

    def put(self, data: Bytes1D, position: int) -> None:
        for placement in self.placements:
            placement.put(data, position)

    def done(self) -> None:
        self.placements.clear()
        for part in self.staged:
            part.finish()


class ChunkPlaces:
    """From a chunk to all the places that ``parts`` of it go to."""

    def __init__(self, manifest: Manifest, targets: Targets, parts: Parts) -> None:
        self._manifest = manifest
        self._fields = targets.fields
        self._rows: dict[int, list[int]] = {}
        for row, chunk in enumerate(parts.chunk.tolist()):
            self._rows.setdefault(chunk, []).append(row)
        self._all_direct = all(field.is_direct for field in self._fields)
        # As lists: numpy's scalars are slow one at a time.
        self._piece = parts.piece.tolist()
        self._in_chunk, self._in_piece, self._shape = (
            column.tolist() for column in (parts.in_chunk, parts.in_piece, parts.shape)
        )

    def staged_bytes(self, chunks: Sequence[int]) -> int:
        """Host memory that the fullest of these chunks takes on its way to a device or another dtype."""
        if self._all_direct:
            return 0
        return max((sum(self._staged_row(row) for row in self._rows.get(chunk, ())) for chunk in chunks), default=0)

    def _staged_row(self, row: int) -> int:
        field = self._fields[self._piece[row]]
        return 0 if field.is_direct else math.prod(self._shape[row]) * field.stored_dtype.itemsize

    def open_sink(self, chunk: int, others: Sequence[Placement] = ()) -> PlacementSink | StagedSink:
        """``others``: further places that parts of the chunk go to."""
        array, number = self._manifest.locate(chunk)
        stored_shape = self._manifest.grids[array].stored_shape(number)
        n = len(stored_shape)
        placements = list(others)
        staged: list[_Staged] = []
        for row in self._rows.get(chunk, ()):
            field = self._fields[self._piece[row]]
            in_chunk, in_piece, shape = self._in_chunk[row][:n], self._in_piece[row][:n], self._shape[row][:n]
            if field.is_direct:
                placements.append(field.placement(stored_shape, in_chunk, in_piece, shape))
            else:
                part = _Staged(field, in_piece, shape)
                staged.append(part)
                assert part.host_bytes is not None
                placements.append(Placement.of_box(part.host_bytes, stored_shape, tuple(in_chunk)))
        return StagedSink(placements, staged) if staged else PlacementSink(placements)
