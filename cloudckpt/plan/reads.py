"""What each rank fetches for a load. Pure: manifest and wanted boxes in, ranged reads out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloudckpt.format.grid import Grid, Ints
from cloudckpt.format.manifest import Manifest
from cloudckpt.plan.coalesce import coalesce
from cloudckpt.plan.overlap import overlaps
from cloudckpt.plan.shard import PieceTable, padded_bounds


@dataclass(frozen=True, eq=False)
class StoredChunks:
    """Where the chunks are: int64 columns of the chunk table, and the first row of every array."""

    grids: Sequence[Grid]
    first_chunks: Ints
    object: Ints
    byte_offset: Ints
    nbytes: Ints

    @staticmethod
    def of(manifest: Manifest) -> StoredChunks:
        columns = manifest.columns
        return StoredChunks(manifest.grids, manifest.first_chunks, columns.object, columns.byte_offset, columns.nbytes)


@dataclass(frozen=True, eq=False)
class RangeRead:
    """One request: ``chunks`` are rows of the chunk table, by ascending byte offset."""

    object: int
    byte_offset: int
    nbytes: int
    chunks: Ints


@dataclass(frozen=True, eq=False)
class RankReads:
    """What one rank does. ``(piece[i], chunk[i])``: row of its wants, and a chunk with a part of it; by chunk."""

    reads: tuple[RangeRead, ...]
    piece: Ints
    chunk: Ints


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """All ranks' parts as columns; rank r has rows ``[ranges[r], ranges[r + 1])`` of each kind."""

    piece: Ints
    touched: Ints
    touched_ranges: Ints
    fetched: Ints
    object: Ints
    byte_offset: Ints
    nbytes: Ints
    chunk_starts: Ints
    read_ranges: Ints

    def rank(self, rank: int) -> RankReads:
        a, b = int(self.read_ranges[rank]), int(self.read_ranges[rank + 1])
        reads = tuple(
            RangeRead(
                int(self.object[i]),
                int(self.byte_offset[i]),
                int(self.nbytes[i]),
                self.fetched[self.chunk_starts[i] : self.chunk_starts[i + 1]],
            )
            for i in range(a, b)
        )
        rows = slice(int(self.touched_ranges[rank]), int(self.touched_ranges[rank + 1]))
        return RankReads(reads, self.piece[rows], self.touched[rows])


def plan_load(stored: StoredChunks, wants: Sequence[PieceTable], *, read_bytes: int) -> LoadPlan:
    """For every rank, the chunks that its wanted boxes touch, each once, as few ranged reads.

    ``wants[r].tensor`` numbers arrays of the manifest; boxes lie inside their array.
    """
    rank, piece, chunk = _touched(stored, wants)
    order = np.lexsort([chunk, rank])
    rank, piece, chunk = rank[order], piece[order], chunk[order]
    ranks = np.arange(len(wants) + 1)
    touched_ranges = np.searchsorted(rank, ranks)
    once = np.ones(len(chunk), dtype=bool)
    once[1:] = (chunk[1:] != chunk[:-1]) | (rank[1:] != rank[:-1])
    reader, fetched = rank[once], chunk[once]
    order = np.lexsort([stored.byte_offset[fetched], stored.object[fetched], reader])
    reader, fetched = reader[order], fetched[order]
    objects, offsets, sizes = stored.object[fetched], stored.byte_offset[fetched], stored.nbytes[fetched]
    starts = coalesce(reader, objects, offsets, sizes, read_bytes=read_bytes)
    ends = np.append(starts[1:], len(fetched))
    return LoadPlan(
        piece=piece,
        touched=chunk,
        touched_ranges=touched_ranges,
        fetched=fetched,
        object=objects[starts],
        byte_offset=offsets[starts],
        nbytes=(offsets[ends - 1] + sizes[ends - 1] - offsets[starts]) if len(starts) else starts,
        chunk_starts=np.append(starts, len(fetched)),
        read_ranges=np.searchsorted(reader[starts], ranks),
    )


def _touched(stored: StoredChunks, wants: Sequence[PieceTable]) -> tuple[Ints, Ints, Ints]:
    """``(rank, row of the rank's wants, chunk)`` of every overlap, over all ranks."""
    dims = max((t.offset.shape[1] for t in wants), default=0)
    rank = np.repeat(np.arange(len(wants), dtype=np.int64), [len(t) for t in wants])
    row = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(len(t), dtype=np.int64) for t in wants)])
    tensor = np.concatenate([np.zeros(0, dtype=np.int64), *(t.tensor for t in wants)])
    bounds = np.concatenate([np.zeros((0, 2 * dims), dtype=np.int64), *(padded_bounds(t, dims) for t in wants)])
    order = np.argsort(tensor, kind="stable")
    tensors, starts = np.unique(tensor[order], return_index=True)
    owners, chunks = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    # Split always returns a part, also of nothing.
    parts = np.split(order, starts[1:]) if len(order) else []
    for number, rows in zip(tensors.tolist(), parts, strict=True):
        grid = stored.grids[number]
        n = len(grid.shape)
        boxes = bounds[rows]
        box, chunk = overlaps(grid, boxes[:, :n], boxes[:, dims : dims + n])
        owners.append(rows[box])
        chunks.append(chunk + stored.first_chunks[number])
    owner = np.concatenate(owners)
    return rank[owner], row[owner], np.concatenate(chunks)
