"""Exchanges planned for random jobs, and carried out on arrays in memory, byte by byte as the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.format.box import Box
from cloudckpt.plan.exchange import ALIGNMENT, NUM_BUFFERS, ExchangePlan, Mode, decoded_bytes, plan_exchange
from cloudckpt.plan.exchange_part import ExchangePart, part_of_rank
from cloudckpt.plan.reads import StoredChunks
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.wants import Wants
from cloudckpt.plan.writes import plan_save
from tests.plan.test_plans import layouts, tensors

Array = npt.NDArray[np.uint8]

MODES: list[Mode] = ["auto", "broadcast", "alltoall"]
AMPLE = 10**9


@dataclass(frozen=True)
class Job:
    """``data[t]``: the bytes of tensor t, its last axis those of an element. ``wants``: by rank."""

    specs: list[TensorSpec]
    stored: StoredChunks
    data: list[Array]
    wants: list[PieceTable]

    def plan(self, **options: Any) -> ExchangePlan:
        return plan_exchange(self.stored, Wants.of(self.wants), **({"buffer_bytes": AMPLE} | options))

    def tensor_of(self, chunk: int) -> int:
        return int(np.searchsorted(self.stored.first_chunks, chunk, side="right")) - 1

    def decoded(self, chunk: int) -> Array:
        tensor = self.tensor_of(chunk)
        box = self.stored.grids[tensor].box(chunk - int(self.stored.first_chunks[tensor]))
        return self.data[tensor][box.slices]

    def box(self, rank: int, row: int) -> tuple[int, Box]:
        tensor = int(self.wants[rank].tensor[row])
        return tensor, self.wants[rank].box(row, len(self.specs[tensor].shape))


@st.composite
def some_wants(draw: st.DrawFn, specs: list[TensorSpec]) -> PieceTable:
    """Any boxes at all, also equal ones and ones that overlap; perhaps none."""
    boxes = []
    for number in sorted(draw(st.lists(st.integers(0, len(specs) - 1), max_size=5))):
        starts = [draw(st.integers(0, n)) for n in specs[number].shape]
        ends = [draw(st.integers(a, n)) for a, n in zip(starts, specs[number].shape, strict=True)]
        boxes.append((number, Box(tuple(starts), tuple(b - a for a, b in zip(starts, ends, strict=True)))))
    return PieceTable.build(boxes)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    specs = [replace(spec, itemsize=draw(st.sampled_from([1, 2, 4, 16]))) for spec in draw(tensors())]
    saved = plan_save(specs, draw(layouts(specs)), chunk_bytes=draw(st.sampled_from([4, 16, 60, 4096])))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    decoded = [g.stored_elements * s.itemsize + 4 for g, s in zip(saved.grids, specs, strict=True) if g.num_chunks]
    nbytes = np.concatenate([np.zeros(0, dtype=np.int64), *decoded])
    if draw(st.booleans()):  # compressed, more or less well
        nbytes = rng.integers(1, 2 * nbytes + 1)
    offset = np.zeros(len(nbytes), dtype=np.int64)
    for rank in np.unique(saved.owner).tolist():
        mine = saved.chunks_of(rank)
        offset[mine] = np.cumsum(nbytes[mine] + 100) - nbytes[mine]
    itemsizes = [spec.itemsize for spec in specs]
    stored = StoredChunks(saved.grids, saved.first_chunks, saved.owner.astype(np.int64), offset, nbytes, itemsizes)
    data = [rng.integers(0, 256, (*spec.shape, spec.itemsize), dtype=np.uint8) for spec in specs]
    if draw(st.booleans()):
        wants = draw(layouts(specs))
    else:
        tables = [draw(some_wants(specs)) for _ in range(draw(st.integers(1, 4)))]
        wants = [tables[i] for i in draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=6))]
    return Job(specs, stored, data, wants)


class Simulation:
    """All ranks' memory. Every element of a wanted piece, and every byte of a buffer, may be set once."""

    def __init__(self, job: Job, plan: ExchangePlan, parts: Sequence[ExchangePart]) -> None:
        self.job, self.plan, self.parts = job, plan, parts
        shapes = [[job.box(rank, row) for row in range(len(table))] for rank, table in enumerate(job.wants)]
        self.pieces = [[np.zeros((*box.shape, job.specs[t].itemsize), np.uint8) for t, box in rank] for rank in shapes]
        self.times_set = [[np.zeros(box.shape, int) for _, box in rank] for rank in shapes]
        self.bytes_sent = 0

    def run(self) -> None:
        for rank, part in enumerate(self.parts):
            for row, chunk in enumerate(part.own.chunk.tolist()):
                self.place(rank, part.own, row, self.job.decoded(chunk))
        for number in range(self.plan.num_rounds):
            self.pass_on(number)

    def place(self, rank: int, parts: Any, row: int, chunk: Array | None, payload: Array | None = None) -> None:
        """A part out of a whole chunk, or as it was sent."""
        piece = int(parts.piece[row])
        n = self.times_set[rank][piece].ndim
        start, at, shape = (c[row, :n].tolist() for c in (parts.in_chunk, parts.in_piece, parts.shape))
        target = tuple(slice(a, a + size) for a, size in zip(at, shape, strict=True))
        if chunk is not None:
            payload = chunk[tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))]
        else:
            assert payload is not None
            payload = payload.reshape(*shape, self.pieces[rank][piece].shape[-1])
        self.pieces[rank][piece][target] = payload
        self.times_set[rank][piece][target] += 1

    def outgoing(self, rank: int, number: int) -> Array:
        part = self.parts[rank]
        buffer = np.zeros(part.outgoing_bytes, dtype=np.uint8)
        used = np.zeros(part.outgoing_bytes, dtype=int)

        def put(at: int, data: Array) -> None:
            assert at % ALIGNMENT == 0
            flat = np.ascontiguousarray(data).reshape(-1)
            assert at + len(flat) <= len(buffer)
            buffer[at : at + len(flat)] = flat
            used[at : at + len(flat)] += 1

        readable = {c for read in part.reads if read.round == number for c in read.chunks.tolist()}
        sends = part.sends
        for row in np.nonzero(sends.round == number)[0].tolist():
            chunk = int(sends.parts.chunk[row])
            assert chunk in readable
            whole = self.job.decoded(chunk)
            n = whole.ndim - 1
            start, shape = sends.parts.in_chunk[row, :n].tolist(), sends.parts.shape[row, :n].tolist()
            data = whole[tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))]
            assert data.size == sends.nbytes[row]
            put(int(sends.byte_offset[row]), data)
            self.bytes_sent += data.size
        for item in part.broadcasts:
            if item.round == number and item.root == rank:
                for chunk, at in zip(item.chunk.tolist(), item.byte_offset.tolist(), strict=True):
                    assert chunk in readable
                    put(item.base + at, self.job.decoded(chunk))
                    self.bytes_sent += self.job.decoded(chunk).size * (len(self.plan.groups[item.group]) - 1)
        assert used.max(initial=0) <= 1, "parts lie over each other"
        return buffer

    def pass_on(self, number: int) -> None:
        ranks = range(len(self.parts))
        outgoing = [self.outgoing(rank, number) for rank in ranks]
        sends = [part.sends.splits[number] for part in self.parts]
        incoming = []
        for rank, part in enumerate(self.parts):
            stretches = []
            for peer in ranks:
                assert part.receipts.splits[number][peer] == sends[peer][rank], "the two ends agree"
                start = int(sends[peer][:rank].sum())
                stretches.append(outgoing[peer][start : start + int(sends[peer][rank])])
            received = np.concatenate(stretches)
            assert not len(received) or self.plan.has_parts[number]
            buffer = np.zeros(part.incoming_bytes, dtype=np.uint8)
            buffer[: len(received)] = received
            incoming.append(buffer)
        for rank, part in enumerate(self.parts):
            end = int(part.receipts.splits[number].sum())
            for item in part.broadcasts:
                if item.round == number and item.root != rank:
                    (base,) = (
                        b.base
                        for b in self.parts[item.root].broadcasts
                        if (b.round, b.group, b.root) == (number, item.group, item.root)
                    )
                    assert item.base >= end
                    end = item.base + item.nbytes
                    assert end <= len(incoming[rank])
                    incoming[rank][item.base : end] = outgoing[item.root][base : base + item.nbytes]
        for rank in ranks:
            self.arrive(rank, number, incoming[rank])

    def arrive(self, rank: int, number: int, buffer: Array) -> None:
        part = self.parts[rank]
        for row in np.nonzero(part.receipts.round == number)[0].tolist():
            at, nbytes = int(part.receipts.byte_offset[row]), int(part.receipts.nbytes[row])
            self.place(rank, part.receipts.parts, row, None, buffer[at : at + nbytes])
        for item in part.broadcasts:
            if item.round == number and item.root != rank:
                for chunk, at in zip(item.chunk.tolist(), item.byte_offset.tolist(), strict=True):
                    whole = self.job.decoded(chunk)
                    data = buffer[item.base + at :][: whole.size].reshape(whole.shape)
                    for row in np.nonzero(part.from_broadcasts.chunk == chunk)[0].tolist():
                        self.place(rank, part.from_broadcasts, row, data)


def wanted_chunks(job: Job, rank: int) -> set[int]:
    found = set()
    for row in range(len(job.wants[rank])):
        tensor, box = job.box(rank, row)
        grid, first = job.stored.grids[tensor], int(job.stored.first_chunks[tensor])
        found |= {first + i for i in range(grid.num_chunks) if grid.box(i).intersect(box) is not None}
    return found


@settings(max_examples=150)
@given(jobs(), st.sampled_from(MODES), st.sampled_from([1, 40, 300, AMPLE]), st.sampled_from([1, 200, AMPLE]))
def test_every_rank_gets_its_bytes_and_every_chunk_is_read_once(
    job: Job, mode: Mode, buffer_bytes: int, read_bytes: int
) -> None:
    plan = job.plan(mode=mode, buffer_bytes=buffer_bytes)
    parts = [part_of_rank(plan, rank, read_bytes=read_bytes) for rank in range(len(job.wants))]
    wanted = [wanted_chunks(job, rank) for rank in range(len(job.wants))]
    reads = [[c for read in part.reads for c in read.chunks.tolist()] for part in parts]
    assert sorted(c for chunks in reads for c in chunks) == sorted(set().union(*wanted)), "each once, and no others"
    assert all(set(chunks) <= wanted[rank] for rank, chunks in enumerate(reads)), "by ranks that want them"
    assert plan.bytes_needed == job.stored.nbytes[sorted(set().union(*wanted))].sum()
    for part in parts:
        rounds = [read.round for read in part.reads]
        assert rounds == sorted(rounds)
        for read in part.reads:
            offsets, sizes = job.stored.byte_offset[read.chunks], job.stored.nbytes[read.chunks]
            assert (job.stored.object[read.chunks] == read.object).all()
            assert (read.byte_offset, read.byte_offset + read.nbytes) == (offsets[0], offsets[-1] + sizes[-1])

    simulation = Simulation(job, plan, parts)
    simulation.run()
    for rank in range(len(job.wants)):
        for row, (piece, times) in enumerate(zip(simulation.pieces[rank], simulation.times_set[rank], strict=True)):
            tensor, box = job.box(rank, row)
            assert (times == 1).all()
            assert np.array_equal(piece, job.data[tensor][box.slices])
    assert simulation.bytes_sent == plan.bytes_sent
    for part in parts:
        assert NUM_BUFFERS * part.outgoing_bytes + part.incoming_bytes <= plan.buffer_bytes


@settings(max_examples=100)
@given(jobs(), st.sampled_from(MODES))
def test_ranks_enter_broadcasts_in_one_order(job: Job, mode: Mode) -> None:
    plan = job.plan(mode=mode, buffer_bytes=100)
    told: dict[tuple[int, int, int], tuple[bytes, int]] = {}
    for rank in range(len(job.wants)):
        broadcasts = part_of_rank(plan, rank, read_bytes=AMPLE).broadcasts
        keys = [(b.round, b.group, b.root) for b in broadcasts]
        assert keys == sorted(set(keys))
        for key, item in zip(keys, broadcasts, strict=True):
            assert rank in plan.groups[item.group]
            assert item.root in plan.groups[item.group]
            same = (item.chunk.tobytes() + item.byte_offset.tobytes(), item.nbytes)
            assert told.setdefault(key, same) == same
    members = Counter(
        key
        for rank in range(len(job.wants))
        for key in ((b.round, b.group, b.root) for b in part_of_rank(plan, rank, read_bytes=AMPLE).broadcasts)
    )
    assert all(count == len(plan.groups[group]) for (_, group, _), count in members.items())


@settings(max_examples=100)
@given(jobs(), st.sampled_from(MODES), st.integers(1, 3000))
def test_buffers_stay_within_the_budget_if_one_chunk_a_round_does(job: Job, mode: Mode, buffer_bytes: int) -> None:
    plan = job.plan(mode=mode, buffer_bytes=buffer_bytes)
    ample = part_costs(job, job.plan(mode=mode))
    assert plan.buffer_bytes <= max(buffer_bytes, ample)


def part_costs(job: Job, plan: ExchangePlan) -> int:
    """What buffers take if a rank reads one chunk a round, and no two read at a time."""

    def aligned(nbytes: int) -> int:
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    sent = received = 0
    for i, chunk in enumerate(plan.chunk.tolist()):
        if not plan.shared[i]:
            continue
        rows = np.nonzero(plan.overlaps.chunk == chunk)[0]
        by_table: Counter[int] = Counter()
        for table, nbytes in zip(plan.overlaps.table[rows].tolist(), plan.overlaps.nbytes[rows].tolist(), strict=True):
            by_table[table] += aligned(nbytes)
        whole = aligned(int(decoded_bytes(job.stored, np.array([chunk]))[0]))
        if plan.group[i] >= 0:
            sent, received = max(sent, whole), max(received, whole)
        else:
            holders = np.bincount(plan.wants.table)
            sent = max(sent, sum(int(holders[table]) * nbytes for table, nbytes in by_table.items()))
            received = max(received, *by_table.values())
    return NUM_BUFFERS * sent + received


@settings(max_examples=100)
@given(jobs(), st.sampled_from(MODES), st.sampled_from([50, AMPLE]), st.randoms(use_true_random=False))
def test_the_order_of_the_tables_does_not_matter(job: Job, mode: Mode, buffer_bytes: int, rng: Any) -> None:
    wants = Wants.of(job.wants)
    order = [*range(len(wants.tables))]
    rng.shuffle(order)
    place = np.argsort(np.array(order, dtype=np.int64))
    other = Wants([wants.tables[i] for i in order], place[wants.table])
    one, two = (plan_exchange(job.stored, w, mode=mode, buffer_bytes=buffer_bytes) for w in (wants, other))
    for column in ("chunk", "reader", "round", "shared", "group"):
        assert np.array_equal(getattr(one, column), getattr(two, column)), column
    assert (one.groups, one.num_rounds, one.bytes_sent, one.buffer_bytes) == (
        two.groups,
        two.num_rounds,
        two.bytes_sent,
        two.buffer_bytes,
    )


@settings(max_examples=100)
@given(jobs(), st.integers(2, 6), st.sampled_from([1, AMPLE]))
def test_where_all_want_all_the_reads_are_even(job: Job, num_ranks: int, buffer_bytes: int) -> None:
    everything = PieceTable.build((i, Box((0,) * len(s.shape), s.shape)) for i, s in enumerate(job.specs))
    plan = replace(job, wants=[everything] * num_ranks).plan(buffer_bytes=buffer_bytes)
    loads = np.bincount(plan.reader, weights=job.stored.nbytes[plan.chunk], minlength=num_ranks)
    assert loads.max() - loads.min() <= 2 * job.stored.nbytes.max(initial=0)
    assert plan.shared.all()
    assert plan.kind == ("none" if not len(plan.chunk) else "broadcast" if num_ranks >= 3 else "alltoall")
    assert plan.groups == ((tuple(range(num_ranks)),) if plan.kind == "broadcast" else ())


def simple_job(specs: list[TensorSpec], wants: list[PieceTable], chunk_bytes: int) -> Job:
    """All in one object."""
    everything = PieceTable.build((i, Box((0,) * len(s.shape), s.shape)) for i, s in enumerate(specs))
    saved = plan_save(specs, [everything], chunk_bytes=chunk_bytes)
    nbytes = np.concatenate([g.stored_elements * s.itemsize + 4 for g, s in zip(saved.grids, specs, strict=True)])
    zeros, offset = np.zeros_like(nbytes), np.cumsum(nbytes) - nbytes
    stored = StoredChunks(saved.grids, saved.first_chunks, zeros, offset, nbytes, [s.itemsize for s in specs])
    return Job(specs, stored, [], wants)


def whole_and_halves() -> Job:
    """Ranks 0 to 3 want the whole of one tensor, 4 and 5 a half each; 6 wants nothing."""
    whole = PieceTable.build([(0, Box((0, 0), (64, 16)))])
    halves = [PieceTable.build([(0, Box((start, 0), (32, 16)))]) for start in (0, 32)]
    return simple_job([TensorSpec("w", (64, 16), 4)], [whole] * 4 + halves + [PieceTable.build([])], 1024)


def test_broadcasts_go_to_those_who_want_a_chunk() -> None:
    plan = whole_and_halves().plan()
    assert plan.groups == ((0, 1, 2, 3, 4), (0, 1, 2, 3, 5))
    assert plan.kind == "broadcast"


def test_groups_that_exist_need_not_be_counted() -> None:
    job = whole_and_halves()
    assert job.plan(max_groups=0).kind == "alltoall"
    assert job.plan(max_groups=0, free_groups={(0, 1, 2, 3, 5)}).kind == "broadcast+alltoall"
    assert job.plan(max_groups=1).groups == ((0, 1, 2, 3, 4),)


def test_nobody_joins_more_groups_than_allowed() -> None:
    """Every two ranks share a tensor of their own."""
    pairs = [(a, b) for a in range(5) for b in range(a)]
    box = Box((0,), (8,))
    wants = [PieceTable.build((i, box) for i, pair in enumerate(pairs) if rank in pair) for rank in range(5)]
    job = simple_job([TensorSpec(f"t{i}", (8,), 4) for i in range(len(pairs))], wants, 64)
    plan = job.plan(mode="broadcast", max_groups=2)
    joined = Counter(rank for group in plan.groups for rank in group)
    assert max(joined.values()) == 2
    assert plan.kind == "broadcast+alltoall"
    assert plan.bytes_sent == len(pairs) * 32


def test_no_rounds_where_nothing_is_wanted_twice() -> None:
    job = whole_and_halves()
    plan = replace(job, wants=job.wants[4:]).plan()
    assert (plan.num_rounds, plan.buffer_bytes, plan.bytes_sent, plan.kind) == (0, 0, 0, "none")
    assert len(set(np.bincount(plan.reader).tolist())) == 1


def test_scalars_are_not_alike_for_having_no_offsets() -> None:
    specs = [TensorSpec(f"t{i}", (), 4) for i in range(3)]
    wants = [PieceTable.build((i, Box((), ())) for i in numbers) for numbers in ([0], [0, 1, 2], [2])]
    plan = simple_job(specs, wants, 64).plan()
    assert plan.chunk.tolist() == [0, 1, 2]
    assert plan.shared.tolist() == [True, False, True]
