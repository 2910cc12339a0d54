"""One rank's part of an exchange: its reads, and what lies where in its buffers in every round."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from cloudckpt.format.grid import Ints
from cloudckpt.plan.coalesce import coalesce
from cloudckpt.plan.exchange import ExchangePlan, aligned, decoded_bytes
from cloudckpt.plan.reads import Parts, RangeRead, common_boxes, parts_of


@dataclass(frozen=True, eq=False)
class Transfers:
    """Parts that are sent one by one, or received; by round, then peer, then chunk and the receiver's piece.

    ``byte_offset``: where a part lies in the round's buffer, which is all peers' stretches one after
    another. ``nbytes``: of the part. ``splits``: int64[rounds, ranks], the bytes of every stretch.
    """

    round: Ints
    peer: Ints
    parts: Parts
    byte_offset: Ints
    nbytes: Ints
    splits: Ints


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Whole chunks on their way from ``root`` to the ranks of a group.

    ``base``: where they begin in the buffer of the round, behind the parts that are sent one by one (the
    root's outgoing buffer, everybody else's incoming one); ``byte_offset``: of each chunk from there.
    ``nbytes`` counts alignment, ``payload_bytes`` does not.
    """

    round: int
    group: int
    root: int
    chunk: Ints
    byte_offset: Ints
    nbytes: int
    payload_bytes: int
    base: int


@dataclass(frozen=True, eq=False)
class ExchangePart:
    """``own``: where chunks that the rank reads go in its own pieces; ``from_broadcasts``: the same for those it gets.

    ``broadcasts``: of the groups that it is in; by round, then group, then root. ``outgoing_bytes`` and
    ``incoming_bytes``: of the fullest round.
    """

    reads: tuple[RangeRead, ...]
    own: Parts
    sends: Transfers
    receipts: Transfers
    broadcasts: tuple[Broadcast, ...]
    from_broadcasts: Parts
    outgoing_bytes: int
    incoming_bytes: int


def part_of_rank(plan: ExchangePlan, rank: int, *, read_bytes: int) -> ExchangePart:
    """What ``rank`` does. The order of everything is a function of the plan alone."""
    found = plan.overlaps
    at = found.row
    is_mine = found.table == plan.wants.table[rank]
    is_read = plan.reader[at] == rank
    table = plan.wants.tables[int(plan.wants.table[rank])]

    def mine(rows: Ints) -> Parts:
        return parts_of(plan.stored, table, found.piece[rows], found.chunk[rows])

    is_sent = plan.shared[at] & (plan.group[at] < 0)
    received = np.nonzero(is_mine & ~is_read & is_sent)[0]
    sends = _sends(plan, rank, np.nonzero(is_read & is_sent)[0], at)
    receipts = _receipts(plan, mine(received), at, received)
    outgoing, incoming = sends.splits.sum(axis=1), receipts.splits.sum(axis=1)
    broadcasts = _broadcasts(plan, rank, outgoing, incoming)
    return ExchangePart(
        reads=_reads(plan, rank, read_bytes),
        own=mine(np.nonzero(is_mine & is_read)[0]),
        sends=sends,
        receipts=receipts,
        broadcasts=broadcasts,
        from_broadcasts=mine(np.nonzero(is_mine & ~is_read & (plan.group[at] >= 0))[0]),
        outgoing_bytes=int(outgoing.max(initial=0)),
        incoming_bytes=int(incoming.max(initial=0)),
    )


def _reads(plan: ExchangePlan, rank: int, read_bytes: int) -> tuple[RangeRead, ...]:
    stored = plan.stored
    rows = np.nonzero(plan.reader == rank)[0]
    chunk, number = plan.chunk[rows], plan.round[rows]
    order = np.lexsort([stored.byte_offset[chunk], stored.object[chunk], number])
    chunk, number = chunk[order], number[order]
    objects, offsets, sizes = stored.object[chunk], stored.byte_offset[chunk], stored.nbytes[chunk]
    starts = coalesce(number, objects, offsets, sizes, read_bytes=read_bytes)
    return tuple(
        RangeRead(
            object=int(objects[a]),
            byte_offset=int(offsets[a]),
            nbytes=int(offsets[b - 1] + sizes[b - 1] - offsets[a]),
            chunks=chunk[a:b],
            round=int(number[a]),
        )
        for a, b in itertools.pairwise([*starts.tolist(), len(chunk)])
    )


def _sends(plan: ExchangePlan, rank: int, rows: Ints, at: Ints) -> Transfers:
    """``rows``: the overlaps of any rank with chunks that ``rank`` reads and sends on in parts."""
    found, wants = plan.overlaps, plan.wants
    by_table = np.argsort(wants.table, kind="stable")
    ends = np.searchsorted(wants.table[by_table], np.arange(len(wants.tables) + 1))
    counts = np.diff(ends)[found.table[rows]]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.repeat(rows, counts)
    peer = by_table[ends[found.table[rows]] + within]
    rows, peer = rows[peer != rank], peer[peer != rank]
    number = plan.round[at[rows]]
    order = np.lexsort([found.piece[rows], found.chunk[rows], peer, number])
    rows, peer = rows[order], peer[order]
    tables, table, piece, chunk = wants.tables, found.table[rows], found.piece[rows], found.chunk[rows]
    dims = max((t.offset.shape[1] for t in tables), default=0)
    tensor = np.zeros(len(rows), dtype=np.int64)
    offset = np.zeros((len(rows), dims), dtype=np.int64)
    shape = np.ones_like(offset)
    for t in np.unique(table).tolist():
        held, n = table == t, tables[t].offset.shape[1]
        tensor[held] = tables[t].tensor[piece[held]]
        offset[held, :n], shape[held, :n] = tables[t].offset[piece[held]], tables[t].shape[piece[held]]
    parts = Parts(piece, chunk, *common_boxes(plan.stored, tensor, offset, shape, chunk))
    return _transfers(plan, number[order], peer, parts, found.nbytes[rows])


def _receipts(plan: ExchangePlan, parts: Parts, at: Ints, rows: Ints) -> Transfers:
    """``rows``: the overlaps of a rank with chunks that others read and send it parts of."""
    found = plan.overlaps
    number, peer = plan.round[at[rows]], plan.reader[at[rows]]
    order = np.lexsort([found.piece[rows], found.chunk[rows], peer, number])
    return _transfers(plan, number[order], peer[order], parts.take(order), found.nbytes[rows[order]])


def _transfers(plan: ExchangePlan, number: Ints, peer: Ints, parts: Parts, nbytes: Ints) -> Transfers:
    room = aligned(nbytes)
    splits = np.zeros((plan.num_rounds, plan.num_ranks), dtype=np.int64)
    np.add.at(splits, (number, peer), room)
    return Transfers(number, peer, parts, _restarted_sums(room, number), nbytes, splits)


def _broadcasts(plan: ExchangePlan, rank: int, outgoing: Ints, incoming: Ints) -> tuple[Broadcast, ...]:
    """``outgoing``, ``incoming``: bytes in use of every round's buffers; grow by what the broadcasts take."""
    joined = np.array([rank in ranks for ranks in plan.groups], dtype=bool)
    rows = np.nonzero((plan.group >= 0) & joined[plan.group])[0] if len(joined) else np.zeros(0, dtype=np.int64)
    rows = rows[np.lexsort([plan.chunk[rows], plan.reader[rows], plan.group[rows], plan.round[rows]])]
    keys = np.stack([plan.round[rows], plan.group[rows], plan.reader[rows]])
    starts = np.nonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))[0] if len(rows) else rows
    found = []
    for first, last in itertools.pairwise([*starts.tolist(), len(rows)]):
        number, group, root = keys[:, first].tolist()
        chunk = plan.chunk[rows[first:last]]
        payload = decoded_bytes(plan.stored, chunk)
        sizes = aligned(payload)
        buffer = outgoing if root == rank else incoming
        nbytes = int(sizes.sum())
        offset, base = np.cumsum(sizes) - sizes, int(buffer[number])
        found.append(Broadcast(number, group, root, chunk, offset, nbytes, int(payload.sum()), base))
        buffer[number] += nbytes
    return tuple(found)


def _restarted_sums(nbytes: Ints, run: Ints) -> Ints:
    """The sum of what lies before each row in its run (rows of equal, ascending ``run``)."""
    before = np.cumsum(nbytes) - nbytes
    return before - before[np.searchsorted(run, run)]
