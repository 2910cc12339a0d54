"""Where the chunks of a load go: into host memory as they arrive, or to a device through a host buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cloudckpt.format.box import Box
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.place import Placement, PlacementSink
from cloudckpt.plan.reads import RankReads, StoredChunks, plan_load
from cloudckpt.plan.shard import PieceBox, PieceTable
from cloudckpt.pytorch.memory import array_bytes, tensor_elements
from cloudckpt.pytorch.shards import LocalShard


def plan_targets(
    manifest: Manifest, wants: Sequence[tuple[int, LocalShard]], *, read_bytes: int
) -> tuple[Targets, RankReads]:
    """What one rank reads for its ``wants`` (array number, shard to fill), and where it goes."""
    rows = [
        (number, shard, piece)
        for number, shard in sorted(wants, key=lambda want: want[0])
        for piece in shard.pieces
        if piece.box.num_elements
    ]
    table = PieceTable.build((number, piece.box) for number, _, piece in rows)
    plan = plan_load(StoredChunks.of(manifest), [table], read_bytes=read_bytes).rank(0)
    return Targets(manifest, [(shard, piece) for _, shard, piece in rows], plan), plan


class Targets:
    """``rows[i]`` is what row i of the plan's wanted pieces fills."""

    def __init__(self, manifest: Manifest, rows: Sequence[tuple[LocalShard, PieceBox]], plan: RankReads) -> None:
        self._manifest = manifest
        self._rows = rows
        self._plan = plan

    def open_sink(self, chunk: int) -> PlacementSink | _DeviceSink:
        array, number = self._manifest.locate(chunk)
        grid = self._manifest.grids[array]
        box, stored_shape = grid.box(number), grid.stored_shape(number)
        first, last = np.searchsorted(self._plan.chunk, [chunk, chunk + 1]).tolist()
        placements: list[Placement] = []
        copies: list[_DeviceCopy] = []
        for row in self._plan.piece[first:last].tolist():
            shard, piece = self._rows[row]
            part = box.intersect(piece.box)
            assert part is not None, "the planner only names pieces that the chunk meets"
            start = part.relative_to(box.offset).offset
            local = part.relative_to(piece.global_offset)
            local = Box(tuple(a + b for a, b in zip(local.offset, piece.local_offset, strict=True)), local.shape)
            if shard.on_host:
                target = array_bytes(shard.elements)[local.slices]
            else:
                assert isinstance(shard.memory, torch.Tensor)
                copy = _DeviceCopy(shard.memory, local)
                copies.append(copy)
                target = copy.host_bytes
            placements.append(Placement.of_box(target, stored_shape, start))
        return _DeviceSink(placements, copies) if copies else PlacementSink(placements)


class _DeviceCopy:
    """A host buffer for a part of a device tensor."""

    def __init__(self, device_tensor: torch.Tensor, local: Box) -> None:
        self._destination = device_tensor[local.slices]
        self._host = torch.empty(local.shape, dtype=device_tensor.dtype)
        self.host_bytes = array_bytes(tensor_elements(self._host))

    def finish(self) -> None:
        with torch.no_grad():
            self._destination.copy_(self._host)


class _DeviceSink:
    """Into host buffers, and on to the device once the checksum is known to be right."""

    def __init__(self, placements: Sequence[Placement], copies: Sequence[_DeviceCopy]) -> None:
        self._host = PlacementSink(placements)
        self._copies = copies

    def put(self, data: Bytes1D, position: int) -> None:
        self._host.put(data, position)

    def done(self) -> None:
        for copy in self._copies:
            copy.finish()
