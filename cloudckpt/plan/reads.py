"""What each rank fetches for a load by itself. Pure: manifest and wanted boxes in, ranged reads out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloudckpt.format.grid import Grid, Ints
from cloudckpt.format.manifest import Manifest
from cloudckpt.plan.coalesce import coalesce
from cloudckpt.plan.overlap import chunk_bounds, group_rows, overlaps
from cloudckpt.plan.shard import PieceTable, StackedPieces


@dataclass(frozen=True, eq=False)
class StoredChunks:
    """Where the chunks are: int64 columns of the chunk table, and the first row of every array."""

    grids: Sequence[Grid]
    first_chunks: Ints
    object: Ints
    byte_offset: Ints
    nbytes: Ints
    itemsizes: Sequence[int]

    @staticmethod
    def of(manifest: Manifest) -> StoredChunks:
        columns = manifest.columns
        itemsizes = [manifest.itemsize(array) for array in range(len(manifest.arrays))]
        return StoredChunks(
            manifest.grids, manifest.first_chunks, columns.object, columns.byte_offset, columns.nbytes, itemsizes
        )


@dataclass(frozen=True, eq=False)
class RangeRead:
    """One request: ``chunks`` are rows of the chunk table, by ascending byte offset. ``round``: of the exchange."""

    object: int
    byte_offset: int
    nbytes: int
    chunks: Ints
    round: int = 0


@dataclass(frozen=True, eq=False)
class Parts:
    """What pieces and chunks have in common: row i is the part of ``chunk[i]`` that piece ``piece[i]`` wants.

    ``in_chunk``, ``in_piece``: int64[k, dims], its offset within either; ``shape``: int64[k, dims].
    Unused trailing dims are 0 (shape: 1).
    """

    piece: Ints
    chunk: Ints
    in_chunk: Ints
    in_piece: Ints
    shape: Ints

    def __len__(self) -> int:
        return len(self.piece)

    def take(self, rows: Ints) -> Parts:
        return Parts(self.piece[rows], self.chunk[rows], self.in_chunk[rows], self.in_piece[rows], self.shape[rows])


@dataclass(frozen=True, eq=False)
class RankReads:
    """What one rank does. ``parts``: where the chunks that it reads go in its own pieces; by chunk."""

    reads: tuple[RangeRead, ...]
    parts: Parts


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """All ranks' parts as columns; rank r has rows ``[ranges[r], ranges[r + 1])`` of each kind."""

    stored: StoredChunks
    wants: Sequence[PieceTable]
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
        return RankReads(reads, parts_of(self.stored, self.wants[rank], self.piece[rows], self.touched[rows]))


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
        stored=stored,
        wants=wants,
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


def parts_of(stored: StoredChunks, table: PieceTable, piece: Ints, chunk: Ints) -> Parts:
    """The common boxes of pieces and chunks that are known to meet."""
    bounds = common_boxes(stored, table.tensor[piece], table.offset[piece], table.shape[piece], chunk)
    return Parts(piece, chunk, *bounds)


def common_boxes(stored: StoredChunks, tensor: Ints, offset: Ints, shape: Ints, chunk: Ints) -> tuple[Ints, Ints, Ints]:
    """Of boxes with chunks of their tensor: ``(offset in the chunk, offset in the box, shape)``, as in `Parts`."""
    in_chunk = np.zeros_like(offset)
    in_box = np.zeros_like(offset)
    common = np.ones_like(shape)
    for number, rows in zip(*group_rows(tensor), strict=True):
        n = len(stored.grids[number].shape)
        start, end = chunk_bounds(stored.grids[number], chunk[rows] - stored.first_chunks[number])
        first = np.maximum(start, offset[rows, :n])
        last = np.minimum(end, offset[rows, :n] + shape[rows, :n])
        in_chunk[rows, :n], in_box[rows, :n], common[rows, :n] = first - start, first - offset[rows, :n], last - first
    return in_chunk, in_box, common


def _touched(stored: StoredChunks, wants: Sequence[PieceTable]) -> tuple[Ints, Ints, Ints]:
    """``(rank, row of the rank's wants, chunk)`` of every overlap, over all ranks."""
    stacked = StackedPieces.of(wants)
    dims = stacked.dims
    owners, chunks = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for number, rows in zip(*group_rows(stacked.tensor), strict=True):
        grid = stored.grids[number]
        n = len(grid.shape)
        boxes = stacked.bounds[rows]
        box, chunk = overlaps(grid, boxes[:, :n], boxes[:, dims : dims + n])
        owners.append(rows[box])
        chunks.append(chunk + stored.first_chunks[number])
    owner = np.concatenate(owners)
    return stacked.table[owner], stacked.piece[owner], np.concatenate(chunks)
