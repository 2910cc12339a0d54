"""A load that reads every stored byte once: who reads which chunk, when, and what it passes on to whom.

Pure: the manifest's chunks and all ranks' wants in, numpy columns out, the same on every rank. Ranks
are numbered within the scope of the exchange (the job, or one node). The reads of all ranks go
through rounds in step; what a round has read travels while the next one is being read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from cloudckpt.config import MIB
from cloudckpt.format.grid import Grid, Ints
from cloudckpt.plan.overlap import chunk_bounds, group_rows, overlaps, runs, stable_order
from cloudckpt.plan.reads import StoredChunks
from cloudckpt.plan.shard import PieceTable, StackedPieces
from cloudckpt.plan.share import Sets, choose_owners, group_into_sets
from cloudckpt.plan.wants import Wants

Mode = Literal["auto", "broadcast", "alltoall"]

ROUND_BYTES = 8 * MIB
"""What a rank reads per round, at most: the last round is passed on when there is nothing left to read meanwhile."""

NUM_BUFFERS = 4
"""Rounds that are being read, or have been and wait to be passed on: enough requests in flight for a far store."""

ALIGNMENT = 16
"""Every part in a buffer starts at a multiple of this, so that it can be seen as elements of any dtype."""

BROADCAST_MIN_RANKS = 3
BROADCAST_MIN_USE = 0.75
"""A chunk is broadcast if so many ranks want, on average, so much of it; else its parts are sent one by one."""

MAX_GROUPS = 8
"""Process groups that a rank may have to make and join for broadcasts. Each holds connections."""


@dataclass(frozen=True, eq=False)
class Overlaps:
    """What tables and chunks have in common; by chunk, then table, then piece. ``nbytes``: of the common part.

    ``row``: the number of the chunk among those that anybody wants.
    """

    table: Ints
    piece: Ints
    chunk: Ints
    nbytes: Ints
    row: Ints


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """``chunk``: the rows of the chunk table that anybody wants, ascending; the columns beside it are about these.

    ``group``: the number in ``groups`` of the ranks that the chunk is broadcast to, -1 where its parts are
    sent one by one (or nobody else wants it). ``buffer_bytes``: the most that any rank holds at a time.
    """

    stored: StoredChunks
    wants: Wants
    overlaps: Overlaps
    chunk: Ints
    reader: Ints
    round: Ints
    shared: npt.NDArray[np.bool_]
    group: Ints
    groups: tuple[tuple[int, ...], ...]
    num_rounds: int
    bytes_needed: int
    bytes_sent: int
    buffer_bytes: int

    @property
    def num_ranks(self) -> int:
        return len(self.wants.table)

    @property
    def kind(self) -> str:
        """For people: how chunks are passed on."""
        kinds = []
        if (self.group >= 0).any():
            kinds.append("broadcast")
        if (self.shared & (self.group < 0)).any():
            kinds.append("alltoall")
        return "+".join(kinds) or "none"

    @property
    def has_parts(self) -> npt.NDArray[np.bool_]:
        """Of every round: whether any rank sends parts one by one, so that all take part."""
        found = np.zeros(self.num_rounds, dtype=bool)
        found[self.round[self.shared & (self.group < 0)]] = True
        return found


def plan_exchange(
    stored: StoredChunks,
    wants: Wants,
    *,
    mode: Mode = "auto",
    buffer_bytes: int,
    free_groups: Collection[tuple[int, ...]] = (),
    max_groups: int = MAX_GROUPS,
) -> ExchangePlan:
    """``buffer_bytes``: host memory for parts under way, per rank. ``free_groups``: ranks that have a group already."""
    found = wanted_overlaps(stored, wants.tables)
    num_holders = np.bincount(wants.table, minlength=len(wants.tables))
    new_pair, pair_bytes, pair_room = _pairs(found)
    pair_row, pair_table = found.row[new_pair], found.table[new_pair]
    _, first = runs(pair_row)
    chunk = found.chunk[new_pair[first]]
    num_pairs = np.diff(np.append(first, len(pair_row)))
    num_ranks = np.add.reduceat(num_holders[pair_table], first) if len(chunk) else chunk
    sets = group_into_sets(pair_table, first, num_pairs, wants.table)
    nbytes = stored.nbytes[chunk]
    order = np.lexsort([stored.byte_offset[chunk], stored.object[chunk]])
    reader = choose_owners(nbytes, sets, order, num_ranks=len(wants.table))
    used, room = (
        np.add.reduceat(n * num_holders[pair_table], first) if len(chunk) else chunk for n in (pair_bytes, pair_room)
    )
    decoded = decoded_bytes(stored, chunk)
    shared = num_ranks > 1
    group, groups = _broadcasts(sets, shared, decoded, used, mode, free_groups, max_groups)
    sent = np.where(group >= 0, aligned(decoded), room) * shared
    received = np.where(group >= 0, aligned(decoded), 0)[pair_row]
    received = np.where(received, received, pair_room) * shared[pair_row]
    rounds = _Rounds(nbytes, reader, order, sent, received, pair_table, pair_row)
    number, peak = rounds.fit(buffer_bytes) if shared.any() else (np.zeros_like(chunk), 0)
    others = np.where(group >= 0, decoded * (num_ranks - 1), used - _own_bytes(found, wants, chunk, reader))
    return ExchangePlan(
        stored=stored,
        wants=wants,
        overlaps=found,
        chunk=chunk,
        reader=reader,
        round=number,
        shared=shared,
        group=group,
        groups=groups,
        num_rounds=int(number[shared].max()) + 1 if shared.any() else 0,
        bytes_needed=int(nbytes.sum()),
        bytes_sent=int(others[shared].sum()),
        buffer_bytes=peak,
    )


def wanted_overlaps(stored: StoredChunks, tables: Sequence[PieceTable]) -> Overlaps:
    """Every overlap of a wanted piece with a chunk."""
    # Half the memory, which is what takes the time; larger tensors are rare.
    largest = max((extent for grid in stored.grids for extent in grid.shape), default=0)
    stacked = StackedPieces.of(tables, np.int32 if largest < 2**31 else np.int64)
    dims = stacked.dims
    columns: list[tuple[Ints, ...]] = [(np.zeros(0, dtype=np.int64),) * 4]
    # The layers of a model are alike: what was found for one tensor holds for the others of its kind.
    known: dict[tuple[Grid, int, bytes], tuple[Ints, Ints, Ints]] = {}
    for number, rows in zip(*group_rows(stacked.tensor), strict=True):
        grid, boxes = stored.grids[number], stacked.bounds[rows]
        key = (grid, len(rows), hashlib.blake2b(boxes.tobytes(), digest_size=16).digest())  # 0-dim: boxes without bytes
        if key not in known:
            known[key] = _common(grid, boxes[:, : len(grid.shape)], boxes[:, dims : dims + len(grid.shape)])
        box, chunk, elements = known[key]
        held = rows[box]
        chunk, size = chunk + stored.first_chunks[number], elements * stored.itemsizes[number]
        columns.append((stacked.table[held], stacked.piece[held], chunk, size))
    held_by, wanted, chunk, nbytes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    new = np.ones(len(chunk), dtype=bool)
    new[1:] = chunk[1:] != chunk[:-1]
    return Overlaps(held_by, wanted, chunk, nbytes, np.cumsum(new) - 1)


def _common(grid: Grid, offset: Ints, shape: Ints) -> tuple[Ints, Ints, Ints]:
    """``(box, chunk, number of common elements)`` of every pair that meets, by chunk, then box."""
    box, chunk = overlaps(grid, offset, shape)
    order = stable_order(chunk)
    box, chunk = box[order], chunk[order]
    start, end = chunk_bounds(grid, chunk)
    common = np.minimum(end, (offset + shape)[box]) - np.maximum(start, offset[box])
    return box, chunk, common.prod(axis=1)


def decoded_bytes(stored: StoredChunks, chunk: Ints) -> Ints:
    """Of whole chunks, without padding; ``chunk`` ascends."""
    out = np.zeros(len(chunk), dtype=np.int64)
    first = stored.first_chunks
    # Arrays without chunks share their first chunk with the next: they have no rows here.
    starts = np.searchsorted(chunk, np.append(first, chunk[-1:] + 1))
    known: dict[Grid, Ints] = {}
    for number in np.nonzero(np.diff(starts))[0].tolist():
        grid = stored.grids[number]
        if grid not in known:
            known[grid] = _chunk_elements(grid)
        rows = slice(starts[number], starts[number + 1])
        out[rows] = known[grid][chunk[rows] - first[number]] * stored.itemsizes[number]
    return out


def _chunk_elements(grid: Grid) -> Ints:
    elements = np.ones(1, dtype=np.int64)
    for edges in grid.edges:
        elements = (elements[:, None] * np.diff(edges)[None, :]).reshape(-1)
    return elements


def aligned(nbytes: Ints) -> Ints:
    """What parts take in a buffer."""
    return (nbytes + (ALIGNMENT - 1)) & -ALIGNMENT


def _pairs(found: Overlaps) -> tuple[Ints, Ints, Ints]:
    """The first overlap of every table with every chunk, the bytes of all overlaps of both, and those in a buffer."""
    new = np.ones(len(found.chunk), dtype=bool)
    new[1:] = (found.chunk[1:] != found.chunk[:-1]) | (found.table[1:] != found.table[:-1])
    first = np.nonzero(new)[0]
    if len(first) == len(new):
        return first, found.nbytes, aligned(found.nbytes)
    return first, np.add.reduceat(found.nbytes, first), np.add.reduceat(aligned(found.nbytes), first)


def _own_bytes(found: Overlaps, wants: Wants, chunk: Ints, reader: Ints) -> Ints:
    """What the reader of every chunk wants of it itself."""
    own = wants.table[reader[found.row]] == found.table
    return np.bincount(found.row[own], weights=found.nbytes[own], minlength=len(chunk)).astype(np.int64)


def _broadcasts(
    sets: Sets,
    shared: npt.NDArray[np.bool_],
    decoded: Ints,
    used: Ints,
    mode: Mode,
    free_groups: Collection[tuple[int, ...]],
    max_groups: int,
) -> tuple[Ints, tuple[tuple[int, ...], ...]]:
    """The group of every chunk, and the groups: sets of ranks for which a broadcast is worth it, largest first."""
    group = np.full(len(decoded), -1, dtype=np.int64)
    if mode == "alltoall" or not shared.any():
        return group, ()
    sizes = np.array([len(ranks) for ranks in sets.ranks], dtype=np.int64)
    total = np.bincount(sets.number, weights=decoded, minlength=len(sizes))
    use = np.bincount(sets.number, weights=used, minlength=len(sizes)) / np.maximum(total * sizes, 1)
    worth = sizes > 1 if mode == "broadcast" else (sizes >= BROADCAST_MIN_RANKS) & (use >= BROADCAST_MIN_USE)
    saved = total * (sizes - 1)
    joined: dict[int, int] = {}
    chosen: dict[tuple[int, ...], int] = {}
    numbers = np.full(len(sizes), -1, dtype=np.int64)
    for number in sorted(np.nonzero(worth)[0].tolist(), key=lambda s: (-saved[s], sets.ranks[s].tolist())):
        ranks = tuple(sets.ranks[number].tolist())
        if ranks not in free_groups:
            if max(joined.get(rank, 0) for rank in ranks) >= max_groups:
                continue
            for rank in ranks:
                joined[rank] = joined.get(rank, 0) + 1
        numbers[number] = chosen.setdefault(ranks, len(chosen))
    group = np.where(shared, numbers[sets.number], -1)
    return group, tuple(chosen)


class _Rounds:
    """Cuts every reader's sequence of chunks into rounds, so that nobody holds more than fits.

    ``sent``: bytes that a chunk takes in its reader's buffers. ``received``: by pair (of table and
    chunk), what the chunk takes in the buffers of each rank of the table.
    """

    def __init__(
        self, nbytes: Ints, reader: Ints, order: Ints, sent: Ints, received: Ints, table: Ints, row: Ints
    ) -> None:
        by_reader = order[stable_order(reader[order])]
        start = np.cumsum(nbytes[by_reader]) - nbytes[by_reader]
        _, first = runs(reader[by_reader])
        self._start = np.empty_like(nbytes)
        self._place = np.empty_like(nbytes)
        lengths = np.diff(np.append(first, len(start)))
        self._start[by_reader] = start - np.repeat(start[first], lengths)
        self._place[by_reader] = np.arange(len(start)) - np.repeat(first, lengths)
        self._reader, self._sent, self._received, self._table = reader, sent, received, table
        self._row = row
        self._largest = int(nbytes.max(initial=1))

    def fit(self, buffer_bytes: int) -> tuple[Ints, int]:
        """The round of every chunk, and the bytes of buffers that the fullest rank then holds."""
        quota, phases, singly = max(ROUND_BYTES, self._largest), 1, False
        while True:
            at = self._place if singly else self._start // quota
            number = at * phases + self._reader % phases
            peak = self._peak(number)
            if peak <= buffer_bytes:
                return number, peak
            if quota > self._largest:
                quota = max(self._largest, min(quota // 2, int(quota * buffer_bytes / peak)))
            elif phases < int(self._reader.max()) + 1:
                # A chunk or two a reader are still too much for those who receive from many: readers take turns.
                phases = min(int(self._reader.max()) + 1, max(phases + 1, -(-phases * peak // buffer_bytes)))
            elif not singly:
                singly = True  # a quota of the largest chunk lets nearly two of them through
            else:
                return number, peak

    def _peak(self, number: Ints) -> int:
        """All rounds of sends that there are buffers for, and one of receipts."""
        sends = _sums(self._reader, number, self._sent)
        receipts = _sums(self._table, number[self._row], self._received)
        return NUM_BUFFERS * int(sends.max(initial=0)) + int(receipts.max(initial=0))


def _sums(who: Ints, number: Ints, nbytes: Ints) -> npt.NDArray[np.float64]:
    width = int(number.max(initial=0)) + 1
    return np.bincount(who * width + number, weights=nbytes).astype(np.float64)
