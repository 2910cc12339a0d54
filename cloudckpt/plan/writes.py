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
from cloudckpt.plan.shard import PLACED, PieceTable, TensorPieces, TensorSpec, group_by_tensor


@dataclass(frozen=True, eq=False)
class SavePlan:
    """``owner``: int32, the writing rank of every chunk; tensor i's chunks start at ``first_chunks[i]``.

    ``replicated``: whether several ranks hold one piece of tensor i.
    """

    grids: tuple[Grid, ...]
    first_chunks: Ints
    owner: npt.NDArray[np.int32]
    replicated: npt.NDArray[np.bool_]

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

    ``tables[r]`` holds the pieces of rank r. Raises InvalidStateError, naming tensor, box and ranks,
    where the pieces leave a gap, overlap without being replicas, or reach outside of the tensor.
    """
    grids: list[Grid] = []
    owners: list[npt.NDArray[np.int32]] = []
    rows: list[Ints] = []
    shares: list[_Share] = []
    load = np.zeros(len(tables), dtype=np.int64)
    firsts = np.zeros(len(specs), dtype=np.int64)
    replicated = np.zeros(len(specs), dtype=bool)
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
        replicated[number] = not alone.all()
        first += grid.num_chunks
    owner = np.concatenate([np.zeros(0, dtype=np.int32), *owners])
    if shares:
        owner[np.concatenate(rows)] = _share_out(shares, load.tolist(), num_rows)
    return SavePlan(tuple(grids), firsts, owner, replicated)


def _check_inside(spec: TensorSpec, pieces: TensorPieces) -> None:
    outside = (pieces.offset < 0) | (pieces.offset + pieces.shape > np.array(spec.shape, dtype=np.int64))
    if outside.any():
        row = int(np.nonzero(outside.any(axis=1))[0][0])
        box = Box(tuple(map(int, pieces.offset[row])), tuple(map(int, pieces.shape[row])))
        ranks = _some(pieces.holders(row))
        raise InvalidStateError(f"tensor {spec.path!r}: piece {box} of ranks {ranks} reaches outside of {spec.shape}")


def _providers(spec: TensorSpec, grid: Grid, pieces: TensorPieces) -> tuple[Ints, Ints]:
    """``(piece, chunk)``, by piece: for every chunk of the grid, once, a piece that contains it."""
    piece, chunk = overlaps(grid, pieces.offset, pieces.shape)
    covered = np.zeros(grid.num_chunks, dtype=bool)
    covered[chunk] = True
    if not covered.all():
        ranks = _some(np.unique(pieces.ranks))
        raise InvalidStateError(
            f"tensor {spec.path!r}: no rank holds {_gap(grid, covered)} of {spec.shape}; every element must be held"
            f" (ranks that hold some: {ranks})"
        )
    if len(chunk) > grid.num_chunks:
        _check_overlaps(spec, grid, pieces, piece, chunk)
        # Replicas that are cut in different ways: the first of them provides the common chunks.
        chunk, index = np.unique(chunk, return_index=True)
        order = np.argsort(piece[index], kind="stable")
        piece, chunk = piece[index][order], chunk[order]
    return piece, chunk


def _gap(grid: Grid, covered: npt.NDArray[np.bool_]) -> Box:
    """The first chunk that nobody holds, grown along every dim as far as nobody holds its neighbours."""
    held = covered.reshape(grid.counts)
    low = list(grid.index(int(np.nonzero(~covered)[0][0])))
    high = [i + 1 for i in low]
    for d, count in reversed(list(enumerate(grid.counts))):
        span = [slice(a, b) for a, b in zip(low, high, strict=True)]
        while high[d] < count:
            span[d] = slice(high[d], high[d] + 1)
            if held[tuple(span)].any():
                break
            high[d] += 1
    offset = tuple(int(e[i]) for e, i in zip(grid.edges, low, strict=True))
    end = tuple(int(e[i]) for e, i in zip(grid.edges, high, strict=True))
    return Box(offset, tuple(b - a for a, b in zip(offset, end, strict=True)))


def _check_overlaps(spec: TensorSpec, grid: Grid, pieces: TensorPieces, piece: Ints, chunk: Ints) -> None:
    """Unequal pieces may only overlap where all are placed by DTensors, or declared as different replicas.

    ``(piece, chunk)``: all pairs that meet. Raises InvalidStateError naming two pieces and their ranks.
    """
    shared = np.bincount(chunk, minlength=grid.num_chunks)[chunk] > 1
    piece, chunk = piece[shared], chunk[shared]
    holder_piece = np.repeat(np.arange(len(pieces.offset)), np.diff(pieces.starts))
    numbers = np.unique(np.stack([holder_piece, pieces.replica], axis=1), axis=0)
    first = np.searchsorted(numbers[:, 0], piece)
    counts = np.searchsorted(numbers[:, 0], piece, side="right") - first
    row = np.repeat(np.arange(len(piece)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    piece, chunk, replica = piece[row], chunk[row], numbers[first[row] + within, 1]
    order = np.lexsort([piece, replica, chunk])
    piece, chunk, replica = piece[order], chunk[order], replica[order]
    same = (replica[1:] == replica[:-1]) & (replica[1:] != PLACED)
    mixed = (replica[1:] != replica[:-1]) & (replica[:-1] < 0)
    clash = np.nonzero((chunk[1:] == chunk[:-1]) & (piece[1:] != piece[:-1]) & (same | mixed))[0]
    if not len(clash):
        return
    a, b = sorted(piece[clash[0] : clash[0] + 2].tolist())
    texts = [
        f"{Box(tuple(pieces.offset[p].tolist()), tuple(pieces.shape[p].tolist()))} of ranks {_some(pieces.holders(p))}"
        for p in (a, b)
    ]
    raise InvalidStateError(
        f"tensor {spec.path!r}: piece {texts[0]} and piece {texts[1]} overlap without being equal; "
        "cut all replicas alike, or give ShardedTensors of different cuts different replica numbers"
    )


def _some(ranks: Ints) -> str:
    shown = ", ".join(map(str, ranks[:8].tolist()))
    return f"[{shown}]" if len(ranks) <= 8 else f"[{shown}, ... {len(ranks)} in all]"


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
