"""Saves and loads planned for random jobs, and carried out on arrays in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.grid import Grid
from cloudckpt.plan.coalesce import FRAMING_BYTES, coalesce
from cloudckpt.plan.grid import build_grid
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.shard import (
    PLACED,
    UNPLACED,
    DimShard,
    PieceTable,
    TensorSpec,
    dim_runs,
    group_by_tensor,
    pieces_from_runs,
)
from cloudckpt.plan.writes import SavePlan, plan_save

ITEMSIZE = 4


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4))
    return [TensorSpec(f"t{i}", tuple(shape), ITEMSIZE) for i, shape in enumerate(shapes)]


@st.composite
def layouts(draw: st.DrawFn, specs: list[TensorSpec]) -> list[PieceTable]:
    """Every tensor cut over some axes of one mesh, replicated over the others."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    coordinates = list(np.ndindex(*mesh))
    boxes: list[list[tuple[int, Box]]] = [[] for _ in coordinates]
    for number, spec in enumerate(specs):
        dims = [draw(st.integers(-1, len(spec.shape) - 1)) for _ in mesh]
        for rank, coordinate in enumerate(coordinates):
            axes: list[list[DimShard]] = [[] for _ in spec.shape]
            for axis, dim in enumerate(dims):
                if dim >= 0:
                    axes[dim].append(DimShard(mesh[axis], coordinate[axis]))
            runs = [dim_runs(extent, shards) for extent, shards in zip(spec.shape, axes, strict=True)]
            boxes[rank].extend((number, piece.box) for piece in pieces_from_runs(runs))
    return [PieceTable.build(rank) for rank in boxes]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[TensorSpec], list[PieceTable], list[PieceTable], int, int]:
    specs = draw(tensors())
    chunk_bytes = draw(st.sampled_from([4, 16, 60, 4096]))
    return specs, draw(layouts(specs)), draw(layouts(specs)), chunk_bytes, draw(st.sampled_from([1, 64, 10_000]))


def holds(table: PieceTable, tensor: int, box: Box) -> bool:
    dims = len(box.shape)
    return any(
        number == tensor and table.box(row, dims).intersect(box) == box
        for row, number in enumerate(table.tensor.tolist())
    )


def stored(plan: SavePlan) -> StoredChunks:
    """As if every rank had written its chunks into one pack, with some framing between them."""
    nbytes = np.concatenate(
        [np.zeros(0, dtype=np.int64), *(g.stored_elements * ITEMSIZE + 4 for g in plan.grids if g.num_chunks)]
    )
    offset = np.zeros(len(nbytes), dtype=np.int64)
    for rank in np.unique(plan.owner):
        mine = plan.chunks_of(int(rank))
        ends = np.cumsum(nbytes[mine] + 100)
        offset[mine] = ends - nbytes[mine]
    return StoredChunks(
        plan.grids, plan.first_chunks, plan.owner.astype(np.int64), offset, nbytes, [4] * len(plan.grids)
    )


@settings(max_examples=150)
@given(jobs())
def test_chunks_tile_every_tensor_and_are_written_by_a_holder(
    job: tuple[list[TensorSpec], list[PieceTable], list[PieceTable], int, int],
) -> None:
    specs, tables, _, chunk_bytes, _ = job
    plan = plan_save(specs, tables, chunk_bytes=chunk_bytes)
    for number, (spec, grid) in enumerate(zip(specs, plan.grids, strict=True)):
        count = np.zeros(spec.shape, dtype=int)
        for chunk in range(grid.num_chunks):
            box = grid.box(chunk)
            count[box.slices] += 1
            assert math.prod(grid.stored_shape(chunk)) == grid.stored_elements[chunk]
            owner = int(plan.owner[plan.first_chunks[number] + chunk])
            assert holds(tables[owner], number, box)
        assert (count == 1).all()
        assert (
            math.prod(c if isinstance(c, int) else max(c) for c in grid.cuts) * ITEMSIZE <= max(chunk_bytes, ITEMSIZE)
            or not grid.num_chunks
        )


@settings(max_examples=150)
@given(jobs())
def test_a_load_fetches_just_the_chunks_that_it_needs_and_gets_every_element(
    job: tuple[list[TensorSpec], list[PieceTable], list[PieceTable], int, int],
) -> None:
    specs, tables, wants, chunk_bytes, read_bytes = job
    plan = plan_save(specs, tables, chunk_bytes=chunk_bytes)
    chunks = stored(plan)
    load = plan_load(chunks, wants, read_bytes=read_bytes)
    for rank, table in enumerate(wants):
        reads = load.rank(rank)
        fetched = [c for read in reads.reads for c in read.chunks.tolist()]
        assert len(fetched) == len(set(fetched))
        assert set(fetched) == set(reads.parts.chunk.tolist())
        for read in reads.reads:
            offsets, sizes = chunks.byte_offset[read.chunks], chunks.nbytes[read.chunks]
            assert (chunks.object[read.chunks] == read.object).all()
            assert read.byte_offset == offsets[0]
            assert read.byte_offset + read.nbytes == offsets[-1] + sizes[-1]
            gaps = offsets[1:] - offsets[:-1] - sizes[:-1]
            assert (gaps >= 100).all()
            assert (gaps <= FRAMING_BYTES).all()
        elements = dict.fromkeys(range(len(table)), 0)
        for row, chunk in zip(reads.parts.piece.tolist(), reads.parts.chunk.tolist(), strict=True):
            tensor = int(table.tensor[row])
            part = (
                plan.grids[tensor]
                .box(chunk - int(plan.first_chunks[tensor]))
                .intersect(table.box(row, len(specs[tensor].shape)))
            )
            assert part is not None
            elements[row] += part.num_elements
        assert all(
            n == table.box(row, len(specs[int(table.tensor[row])].shape)).num_elements for row, n in elements.items()
        )


@settings(max_examples=150)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 20), st.integers(1, 64))
def test_grids_survive_their_encoding(sizes: list[int], other: int, chunk_bytes: int) -> None:
    shape = (sum(sizes), other)
    offsets = np.cumsum([0, *sizes[:-1]])
    boxes = [(0, Box((int(o), 0), (s, other))) for o, s in zip(offsets, sizes, strict=True)]
    spec = TensorSpec("t", shape, 1)
    pieces = next(group_by_tensor([PieceTable.build(boxes)], [spec]))
    grid = build_grid(spec, pieces, chunk_bytes)
    again = Grid.decode(shape, grid.encode(), max_chunks=grid.num_chunks, what="t")
    assert again == grid
    for o in offsets.tolist():
        assert o in grid.edges[0]


def table(*boxes: Box) -> PieceTable:
    return PieceTable.build((0, box) for box in boxes)


def test_replicas_of_a_large_tensor_each_write_a_part() -> None:
    spec = TensorSpec("w", (1024, 1024), 4)
    whole = table(Box((0, 0), (1024, 1024)))
    plan = plan_save([spec], [whole] * 4, chunk_bytes=256 * 1024)
    assert np.bincount(plan.owner, minlength=4).tolist() == [16, 16, 16, 16]
    assert sorted(plan.owner.tolist()) == plan.owner.tolist(), "a rank's chunks are neighbours"


def test_many_small_replicas_are_spread_over_the_ranks() -> None:
    specs = [TensorSpec(f"t{i}", (100 + i,), 4) for i in range(40)]
    rank = PieceTable.build((i, Box((0,), spec.shape)) for i, spec in enumerate(specs))
    plan = plan_save(specs, [rank] * 4, chunk_bytes=4096)
    written = [sum(specs[c].shape[0] for c in plan.chunks_of(r).tolist()) for r in range(4)]
    assert max(written) - min(written) <= 140


def test_replicas_make_up_for_what_ranks_hold_alone() -> None:
    specs = [TensorSpec("alone", (1000,), 4), TensorSpec("both", (1000,), 4)]
    first = PieceTable.build([(0, Box((0,), (1000,))), (1, Box((0,), (1000,)))])
    second = PieceTable.build([(1, Box((0,), (1000,)))])
    plan = plan_save(specs, [first, second], chunk_bytes=4000)
    assert set(plan.owner[plan.first_chunks[1] :].tolist()) == {1}


def test_a_gap_is_named() -> None:
    spec = TensorSpec("model.w", (10, 4), 4)
    with pytest.raises(InvalidStateError, match=r"'model.w': no rank holds \[3:5, 0:4\]"):
        plan_save([spec], [table(Box((0, 0), (3, 4))), table(Box((5, 0), (5, 4)))], chunk_bytes=4096)


def test_a_tensor_that_nobody_holds_is_a_gap() -> None:
    with pytest.raises(InvalidStateError, match="no rank holds"):
        plan_save([TensorSpec("w", (2,), 4)], [table()], chunk_bytes=64)


def test_a_piece_outside_is_named() -> None:
    with pytest.raises(InvalidStateError, match=r"'w': piece \[8:12\] of ranks \[1\] reaches outside"):
        plan_save([TensorSpec("w", (10,), 4)], [table(Box((0,), (8,))), table(Box((8,), (4,)))], chunk_bytes=64)


def numbered(replica: int, *boxes: Box) -> PieceTable:
    return PieceTable.build(((0, box) for box in boxes), {0: replica})


@pytest.mark.parametrize(("first", "second"), [(PLACED, PLACED), (0, 1), (3, 0)])
def test_replicas_that_are_cut_in_other_ways_are_written_once(first: int, second: int) -> None:
    spec = TensorSpec("w", (8,), 4)
    plan = plan_save([spec], [numbered(first, Box((0,), (8,))), numbered(second, Box((4,), (4,)))], chunk_bytes=64)
    assert 4 in plan.grids[0].edges[0]
    assert plan.owner[: plan.grids[0].num_chunks // 2].tolist() == [0] * (plan.grids[0].num_chunks // 2)


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (UNPLACED, UNPLACED), (UNPLACED, PLACED), (1, UNPLACED), (PLACED, 2)]
)
def test_other_pieces_that_overlap_are_named_with_their_ranks(first: int, second: int) -> None:
    spec = TensorSpec("model.w", (8, 2), 4)
    whole, half = Box((0, 0), (8, 2)), Box((4, 0), (4, 2))
    tables = [numbered(first, whole), numbered(second, half), numbered(first, whole)]
    with pytest.raises(InvalidStateError) as caught:
        plan_save([spec], tables, chunk_bytes=64)
    assert "tensor 'model.w': piece [0:8, 0:2] of ranks [0, 2] and piece [4:8, 0:2] of ranks [1] overlap" in str(
        caught.value
    )


def test_equal_pieces_are_replicas_whatever_their_numbers() -> None:
    spec = TensorSpec("w", (8,), 4)
    halves = Box((0,), (4,)), Box((4,), (4,))
    plan = plan_save([spec], [numbered(0, *halves), numbered(0, *halves), numbered(5, *halves)], chunk_bytes=64)
    assert set(plan.owner.tolist()) == {0, 1, 2}


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 4)), max_size=5), st.integers(2, 16))
def test_overlaps_are_refused_just_where_they_are_no_replicas(
    held: list[tuple[int, int, int]], chunk_bytes: int
) -> None:
    """Rank 0 holds all as a replica of its own; the others what they hold, as replica 0 or 1."""
    boxes = [(replica, Box((start,), (stop - start,))) for replica, start, stop in held if start < stop]
    tables = [numbered(7, Box((0,), (4,))), *(numbered(replica, box) for replica, box in boxes)]
    clash = any(
        a != b and r == s and a.intersect(b) is not None for i, (r, a) in enumerate(boxes) for s, b in boxes[:i]
    )
    if clash:
        with pytest.raises(InvalidStateError, match="overlap without being equal"):
            plan_save([TensorSpec("w", (4,), 1)], tables, chunk_bytes=chunk_bytes)
    else:
        plan_save([TensorSpec("w", (4,), 1)], tables, chunk_bytes=chunk_bytes)


def test_plans_say_which_tensors_have_replicas() -> None:
    specs = [TensorSpec(name, (8,), 4) for name in ("cut", "copied", "partly")]
    low, high, whole = Box((0,), (4,)), Box((4,), (4,)), Box((0,), (8,))
    tables = [
        PieceTable.build([(0, low), (1, whole), (2, low), (2, high)]),
        PieceTable.build([(0, high), (1, whole), (2, high)]),
    ]
    assert plan_save(specs, tables, chunk_bytes=16).replicated.tolist() == [False, True, True]


def test_a_gap_is_named_in_full_with_the_ranks_that_hold_the_rest() -> None:
    spec = TensorSpec("w", (1024, 1024), 4)
    tables = [table(Box((0, 0), (512, 1024))), table(Box((512, 0), (512, 256)), Box((512, 768), (512, 256)))]
    with pytest.raises(InvalidStateError, match=r"'w': no rank holds \[512:1024, 256:768\].*some: \[0, 1\]"):
        plan_save([spec], tables, chunk_bytes=4096)


def test_large_tensors_can_be_sliced_along_any_dim() -> None:
    """Rows over 4 ranks; columns over 4 ranks then read no chunk that they do not want."""
    spec = TensorSpec("w", (4096, 4096), 4)
    rows = [table(Box((1024 * r, 0), (1024, 4096))) for r in range(4)]
    columns = [table(Box((0, 1024 * r), (4096, 1024))) for r in range(4)]
    plan = plan_save([spec], rows, chunk_bytes=4 * 2**20)
    chunks = stored(plan)
    load = plan_load(chunks, columns, read_bytes=16 * 2**20)
    assert [int(chunks.nbytes[load.rank(r).parts.chunk].sum()) for r in range(4)] == [int(chunks.nbytes.sum()) // 4] * 4
    assert plan.grids[0].is_regular


@pytest.mark.parametrize(
    ("shape", "boxes", "cuts"),
    [
        ((10,), [Box((3 * i,), (min(3, 10 - 3 * i),)) for i in range(4)], (3,)),
        ((10,), [Box((0,), (4,)), Box((4,), (6,))], ((4, 6),)),
        ((10,), [Box((0,), (7,)), Box((7,), (3,))], (7,)),
        ((0, 3), [], (1, 3)),
        ((), [Box((), ())], ()),
        ((1, 1), [Box((0, 0), (1, 1))], (1, 1)),
    ],
)
def test_grids_are_regular_where_they_can_be(
    shape: tuple[int, ...], boxes: list[Box], cuts: tuple[object, ...]
) -> None:
    spec = TensorSpec("t", shape, 4)
    pieces = next(group_by_tensor([table(*boxes)], [spec]))
    assert build_grid(spec, pieces, 4096).cuts == cuts


def test_coalescing_joins_neighbours_only() -> None:
    readers = np.zeros(6, dtype=np.int64)
    objects = np.array([0, 0, 0, 1, 1, 1])
    offsets = np.array([0, 110, 300 + FRAMING_BYTES, 0, 100, 200])
    sizes = np.array([100, 100, 100, 100, 100, 100])
    assert coalesce(readers, objects, offsets, sizes, read_bytes=1000).tolist() == [0, 2, 3]
    assert coalesce(readers, objects, offsets, sizes, read_bytes=200).tolist() == [0, 1, 2, 3, 5]
    assert coalesce(readers[:0], objects[:0], offsets[:0], sizes[:0], read_bytes=200).tolist() == []
