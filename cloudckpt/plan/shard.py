"""What ranks hold of the tensors, and which indices a placement gives to a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from cloudckpt.format.box import Box
from cloudckpt.format.grid import Ints


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A global tensor as planning sees it. ``path`` is for messages."""

    path: str
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class PieceBox:
    """One rectangular part of a shard: where it is in the local tensor, and in the global one."""

    local_offset: tuple[int, ...]
    global_offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.global_offset, self.shape)


PLACED = -1
"""The "replica number" of shards whose placement says what is a replica: DTensors."""

UNPLACED = -2
"""That of plain tensors: copies of the whole, or cut by a rule that is the same on all ranks."""


@dataclass(frozen=True, eq=False)
class PieceTable:
    """All pieces that one rank holds or wants, as columns. Unused trailing dims are 0 (shape: 1).

    ``tensor``: int64[k], ascending. ``offset``, ``shape``: int64[k, max dims], global. ``replica``:
    int32[k], the replica number that the shard was declared with, `PLACED` or `UNPLACED`; None: all placed.
    """

    tensor: Ints
    offset: Ints
    shape: Ints
    replica: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: Ints, tensor: Ints) -> PieceTable:
        """Some of the rows, with other tensor numbers."""
        replica = None if self.replica is None else self.replica[rows]
        return PieceTable(tensor, self.offset[rows], self.shape[rows], replica)

    @staticmethod
    def build(pieces: Iterable[tuple[int, Box]], replicas: Mapping[int, int] | None = None) -> PieceTable:
        """From (tensor number, box) pairs with ascending numbers; boxes without elements are left out.

        ``replicas``: the replica number of every tensor.
        """
        kept = [(tensor, box) for tensor, box in pieces if 0 not in box.shape]
        dims = max((len(box.shape) for _, box in kept), default=0)
        none, one = ([(value,) * n for n in range(dims + 1)] for value in (0, 1))
        offset = [box.offset + none[dims - len(box.offset)] for _, box in kept]
        shape = [box.shape + one[dims - len(box.shape)] for _, box in kept]
        replica = None
        if replicas is not None and any(number != PLACED for number in replicas.values()):
            replica = np.array([replicas[t] for t, _ in kept], dtype=np.int32)
        return PieceTable(
            np.array([t for t, _ in kept], dtype=np.int64),
            np.array(offset, dtype=np.int64).reshape(len(kept), dims),
            np.array(shape, dtype=np.int64).reshape(len(kept), dims),
            replica,
        )

    def box(self, row: int, dims: int) -> Box:
        return Box(tuple(map(int, self.offset[row, :dims])), tuple(map(int, self.shape[row, :dims])))


@dataclass(frozen=True, eq=False)
class TensorPieces:
    """The pieces of one tensor over all ranks, equal ones put together.

    ``offset``, ``shape``: int64[u, dims], distinct. The ascending ranks that hold piece i are
    ``ranks[starts[i] : starts[i + 1]]``, and ``replica`` has the number that each declared.
    """

    offset: Ints
    shape: Ints
    ranks: Ints
    starts: Ints
    replica: npt.NDArray[np.int32]

    def holders(self, piece: int) -> Ints:
        return self.ranks[self.starts[piece] : self.starts[piece + 1]]


def group_by_tensor(tables: Sequence[PieceTable], specs: Sequence[TensorSpec]) -> Iterator[TensorPieces]:
    """For every tensor, in order, who holds what of it."""
    dims = max((*(t.offset.shape[1] for t in tables), *(len(s.shape) for s in specs)), default=0)
    tensor = np.concatenate([t.tensor for t in tables]) if tables else np.zeros(0, dtype=np.int64)
    rank = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    replicas = [np.full(len(t), PLACED, dtype=np.int32) if t.replica is None else t.replica for t in tables]
    replica = np.concatenate([np.zeros(0, dtype=np.int32), *replicas])
    bounds = (
        np.concatenate([padded_bounds(t, dims) for t in tables]) if tables else np.zeros((0, 2 * dims), dtype=np.int64)
    )
    order = np.argsort(tensor, kind="stable")
    tensor, rank, bounds, replica = tensor[order], rank[order], bounds[order], replica[order]
    ends = np.searchsorted(tensor, np.arange(len(specs)), side="right")
    start = 0
    for spec, end in zip(specs, ends.tolist(), strict=True):
        n = len(spec.shape)
        columns = [*range(n), *range(dims, dims + n)]
        yield _unique_pieces(bounds[start:end][:, columns], rank[start:end], replica[start:end], n)
        start = end


def padded_bounds(table: PieceTable, dims: int) -> Ints:
    """``int64[k, 2 * dims]``: offsets, then shapes."""
    bounds = np.zeros((len(table), 2 * dims), dtype=np.int64)
    own = table.offset.shape[1]
    bounds[:, :own] = table.offset
    bounds[:, dims : dims + own] = table.shape
    return bounds


@dataclass(frozen=True, eq=False)
class StackedPieces:
    """The rows of several tables one behind the other: whose (``table``), and which of its rows (``piece``).

    ``bounds``: offsets, then shapes, of ``dims`` columns each.
    """

    table: Ints
    piece: Ints
    tensor: Ints
    bounds: Ints
    dims: int

    @staticmethod
    def of(tables: Sequence[PieceTable], kind: type[np.signedinteger[Any]] = np.int64) -> StackedPieces:
        """``kind``: of the bounds."""
        none = np.zeros(0, dtype=np.int64)
        dims = max((t.offset.shape[1] for t in tables), default=0)
        return StackedPieces(
            table=np.repeat(np.arange(len(tables), dtype=np.int64), [len(t) for t in tables]),
            piece=np.concatenate([none, *(np.arange(len(t), dtype=np.int64) for t in tables)]),
            tensor=np.concatenate([none, *(t.tensor for t in tables)]),
            bounds=np.concatenate(
                [np.zeros((0, 2 * dims), kind), *(padded_bounds(t, dims).astype(kind) for t in tables)]
            ),
            dims=dims,
        )


def _unique_pieces(bounds: Ints, rank: Ints, replica: npt.NDArray[np.int32], dims: int) -> TensorPieces:
    # lexsort sees the last key as the first: rows ordered by offset, then shape, then rank.
    order = np.lexsort([rank, *bounds.T[::-1]])
    bounds, rank, replica = bounds[order], rank[order], replica[order]
    new_piece = np.ones(len(bounds), dtype=bool)
    new_piece[1:] = (bounds[1:] != bounds[:-1]).any(axis=1)
    new_holder = new_piece.copy()
    new_holder[1:] |= rank[1:] != rank[:-1]
    starts = np.append(np.nonzero(new_piece[new_holder])[0], int(new_holder.sum()))
    distinct = bounds[new_piece]
    return TensorPieces(distinct[:, :dims], distinct[:, dims:], rank[new_holder], starts, replica[new_holder])


@dataclass(frozen=True, slots=True)
class DimShard:
    """One mesh axis that cuts a tensor dim: ``size`` ranks, of which this is number ``coordinate``.

    ``split_factor`` > 1 is torch's ``_StridedShard``: the dim is first cut in that many parts (by
    axes further right), and each of them over this axis.
    """

    size: int
    coordinate: int
    split_factor: int = 1


Runs = tuple[tuple[int, int], ...]
"""Ascending, disjoint ``(start, stop)`` ranges of indices."""


def dim_runs(extent: int, shards: Sequence[DimShard]) -> Runs:
    """The indices along one dim that a rank holds, the axes applied left to right.

    Follows ``torch.chunk`` (every part ceil(n / size) long, the last ones short or empty), and for
    strided shards torch.distributed.tensor's ``_StridedShard._split_tensor`` (2.13).
    """
    runs: Runs = ((0, extent),) if extent else ()
    for shard in shards:
        taken: list[tuple[int, int]] = []
        for i in range(shard.split_factor):
            block = _take_chunk(runs, shard.split_factor, i)
            taken.extend(_take_chunk(block, shard.size, shard.coordinate))
        runs = _merge(taken)
    return runs


def nested_runs(extent: int, shards: Sequence[DimShard]) -> Runs | None:
    """The same, the way FSDP2 really cuts a parameter that other axes have cut before: right to left.

    Differs from ``dim_runs`` only where the cuts are uneven. None where the split factors do not
    say that the axes are nested like this.
    """
    inner = 1
    for shard in reversed(shards):
        if shard.split_factor not in (1, inner) or (shard.split_factor == 1 and inner > 1):
            return None
        inner *= shard.size
    runs: Runs = ((0, extent),) if extent else ()
    for shard in reversed(shards):
        runs = _take_chunk(runs, shard.size, shard.coordinate)
    return runs


def cut_in_segments(
    extent: int, segments: Sequence[int], each: Sequence[DimShard], together: Sequence[DimShard]
) -> Runs:
    """The indices along a dim that several tensors were packed into, one after another.

    The axes of ``each`` cut every segment by itself; those of ``together`` then cut what this rank
    has of all of them as one. ``segments`` add up to ``extent``.
    """
    runs: list[tuple[int, int]] = []
    start = 0
    for size in segments:
        runs.extend((a + start, b + start) for a, b in dim_runs(size, each))
        start += size
    assert start == extent
    held = _merge(runs)
    for shard in together:
        held = _take_chunk(held, shard.size, shard.coordinate)
    return held


def pieces_from_runs(runs: Sequence[Runs]) -> list[PieceBox]:
    """The pieces of a shard that holds, along each dim, the given indices one after another."""
    per_dim = []
    for dim in runs:
        local, spans = 0, []
        for start, stop in dim:
            spans.append((local, start, stop - start))
            local += stop - start
        per_dim.append(spans)
    return [
        PieceBox(tuple(s[0] for s in combo), tuple(s[1] for s in combo), tuple(s[2] for s in combo))
        for combo in product(*per_dim)
    ]


def _take_chunk(runs: Runs, parts: int, index: int) -> Runs:
    """Part ``index`` of ``torch.chunk(parts)`` of the indices."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // parts)
    lo, hi = min(size * index, total), min(size * (index + 1), total)
    taken, position = [], 0
    for start, stop in runs:
        a, b = max(lo - position, 0), min(hi - position, stop - start)
        if a < b:
            taken.append((start + a, start + b))
        position += stop - start
    return tuple(taken)


def _merge(runs: list[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
