"""Who writes which chunk of a save. Pure: the same pieces give the same plan everywhere."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.grid import Grid, Ints
from cloudckpt.plan.grid import build_grid
from cloudckpt.plan.overlap import overlaps
from cloudckpt.plan.shard import PieceTable, TensorPieces, TensorSpec, group_by_tensor


@dataclass(frozen=True, eq=False)
class SavePlan:
    """``owner``: int32, the writing rank of every chunk; tensor i's chunks start at ``first_chunks[i]``."""

    grids: tuple[Grid, ...]
    first_chunks: Ints
    owner: npt.NDArray[np.int32]

    def chunks_of(self, rank: int) -> Ints:
        """The chunks that a rank writes, in the order in which it writes them."""
        return np.nonzero(self.owner == rank)[0]

    def tensors_of(self, chunks: Ints) -> Ints:
        """The tensor that each of the chunks belongs to."""
        # Tensors without chunks share their first chunk with the next: "right" skips them.
        return np.searchsorted(self.first_chunks, chunks, side="right") - 1


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows ``[start, stop)`` of the chunks that any of ``holders`` could write; one piece's, alike in size."""

    start: int
    stop: int
    nbytes: int
    holders: tuple[int, ...]


def plan_save(specs: Sequence[TensorSpec], tables: Sequence[PieceTable], *, chunk_bytes: int) -> SavePlan:
    """Grids for all tensors, and one owner for every chunk, so that the bytes written per rank are even.

    ``tables[r]`` holds the pieces of rank r. Raises InvalidStateError, naming tensor and box, where
    the pieces leave a gap or reach outside of the tensor.
    """
    grids: list[Grid] = []
    owners: list[npt.NDArray[np.int32]] = []
    rows: list[Ints] = []
    shares: list[_Share] = []
    load = np.zeros(len(tables), dtype=np.int64)
    firsts = np.zeros(len(specs), dtype=np.int64)
    first = num_rows = 0
    for number, (spec, pieces) in enumerate(zip(specs, group_by_tensor(tables, specs), strict=True)):
        _check_inside(spec, pieces)
        grid = build_grid(spec, pieces, chunk_bytes)
        piece, chunk = _providers(spec, grid, pieces)
        nbytes = grid.stored_elements[chunk] * spec.itemsize if len(chunk) else chunk
        alone = (np.diff(pieces.starts) == 1)[piece]
        owner = np.full(grid.num_chunks, -1, dtype=np.int32)
        ranks = pieces.ranks[pieces.starts[piece[alone]]]
        owner[chunk[alone]] = ranks
        np.add.at(load, ranks, nbytes[alone])
        shares.extend(_shares(pieces, piece[~alone], nbytes[~alone], num_rows))
        rows.append(chunk[~alone] + first)
        num_rows += len(rows[-1])
        grids.append(grid)
        owners.append(owner)
        firsts[number] = first
        first += grid.num_chunks
    owner = np.concatenate([np.zeros(0, dtype=np.int32), *owners])
    if shares:
        owner[np.concatenate(rows)] = _share_out(shares, load.tolist(), num_rows)
    return SavePlan(tuple(grids), firsts, owner)


def _check_inside(spec: TensorSpec, pieces: TensorPieces) -> None:
    outside = (pieces.offset < 0) | (pieces.offset + pieces.shape > np.array(spec.shape, dtype=np.int64))
    if outside.any():
        row = int(np.nonzero(outside.any(axis=1))[0][0])
        box = Box(tuple(map(int, pieces.offset[row])), tuple(map(int, pieces.shape[row])))
        ranks = pieces.holders(row).tolist()
        raise InvalidStateError(f"tensor {spec.path!r}: piece {box} of ranks {ranks} reaches outside of {spec.shape}")


def _providers(spec: TensorSpec, grid: Grid, pieces: TensorPieces) -> tuple[Ints, Ints]:
    """``(piece, chunk)``, by piece: for every chunk of the grid, once, a piece that contains it."""
    piece, chunk = overlaps(grid, pieces.offset, pieces.shape)
    covered = np.zeros(grid.num_chunks, dtype=bool)
    covered[chunk] = True
    if not covered.all():
        gap = grid.box(int(np.nonzero(~covered)[0][0]))
        raise InvalidStateError(
            f"tensor {spec.path!r}: no rank holds {gap} of {spec.shape}; every element must be held"
        )
    if len(chunk) > grid.num_chunks:
        # Pieces that overlap without being equal: the first of them provides the common chunks.
        chunk, index = np.unique(chunk, return_index=True)
        order = np.argsort(piece[index], kind="stable")
        piece, chunk = piece[index][order], chunk[order]
    return piece, chunk


def _shares(pieces: TensorPieces, piece: Ints, nbytes: Ints, first_row: int) -> Iterator[_Share]:
    if not len(piece):
        return
    used, starts = np.unique(piece, return_index=True)
    sizes = np.maximum.reduceat(nbytes, starts).tolist()
    stops = [*starts[1:].tolist(), len(piece)]
    known: dict[bytes, tuple[int, ...]] = {}
    for p, start, stop, size in zip(used.tolist(), starts.tolist(), stops, sizes, strict=True):
        ranks = pieces.holders(p)
        holders = known.get(key := ranks.tobytes())
        if holders is None:
            holders = known[key] = tuple(ranks.tolist())
        yield _Share(start + first_row, stop + first_row, size, holders)


def _share_out(shares: list[_Share], load: list[int], num_rows: int) -> npt.NDArray[np.int32]:
    """Largest chunks first onto the least loaded holder; a holder's chunks of one piece stay neighbours."""
    owner = np.empty(num_rows, dtype=np.int32)
    for share in sorted(shares, key=lambda s: -s.nbytes):  # stable: the plan does not hang on the sort
        if share.stop - share.start == 1:
            rank = min(share.holders, key=load.__getitem__)
            owner[share.start] = rank
            load[rank] += share.nbytes
            continue
        heap = [(load[r], r) for r in share.holders]
        heapq.heapify(heap)
        counts = dict.fromkeys(share.holders, 0)
        for _ in range(share.stop - share.start):
            nbytes, rank = heap[0]
            counts[rank] += 1
            heapq.heapreplace(heap, (nbytes + share.nbytes, rank))
        row = share.start
        for rank, count in counts.items():
            owner[row : row + count] = rank
            load[rank] += share.nbytes * count
            row += count
    return owner
