"""Which indices a placement gives to a rank; torch itself is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cloudckpt.format.box import Box
from cloudckpt.plan.overlap import first_overlap, uncovered
from cloudckpt.plan.shard import (
    DimShard,
    PieceTable,
    Runs,
    TensorSpec,
    dim_runs,
    group_by_tensor,
    nested_runs,
    pieces_from_runs,
)


def indices(runs: Runs) -> list[int]:
    return [i for start, stop in runs for i in range(start, stop)]


def torch_indices(extent: int, shards: list[DimShard]) -> list[int]:
    held = torch.arange(extent)
    for shard in shards:
        placement = Shard(0) if shard.split_factor == 1 else _StridedShard(0, split_factor=shard.split_factor)
        parts, _ = placement._split_tensor(held, shard.size, with_padding=False, contiguous=False)
        held = parts[shard.coordinate]
    return held.tolist()


@st.composite
def shards(draw: st.DrawFn) -> list[DimShard]:
    axes = []
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(1, 5))
        axes.append(DimShard(size, draw(st.integers(0, size - 1)), draw(st.integers(1, 4))))
    return axes


@given(st.integers(0, 40), shards())
def test_runs_are_what_torch_holds(extent: int, axes: list[DimShard]) -> None:
    assert indices(dim_runs(extent, axes)) == torch_indices(extent, axes)


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))
def test_nested_runs_tile_the_dim(extent: int, dp: int, tp: int) -> None:
    held: list[int] = []
    for i in range(dp):
        for j in range(tp):
            factor = max(1, tp)
            runs = nested_runs(extent, [DimShard(dp, i, factor), DimShard(tp, j)])
            assert runs is not None
            held += indices(runs)
    assert sorted(held) == list(range(extent))


def test_nested_is_how_fsdp2_cuts() -> None:
    """9 rows, tp 2 first (5 and 4), each then over dp 4: the last of tp 0 is empty."""
    held = [nested_runs(9, [DimShard(4, dp, 2), DimShard(2, tp)]) for tp in range(2) for dp in range(4)]
    assert [indices(runs or ()) for runs in held] == [[0, 1], [2, 3], [4], [], [5], [6], [7], [8]]


def test_nested_says_so_when_the_factors_do_not_fit() -> None:
    assert nested_runs(8, [DimShard(2, 0), DimShard(2, 0, 2)]) is None


@pytest.mark.parametrize(("runs", "count"), [([((0, 3),), ((1, 2), (4, 6))], 2), ([()], 0), ([], 1)])
def test_pieces_are_the_product_of_runs(runs: list[Runs], count: int) -> None:
    pieces = pieces_from_runs(runs)
    assert len(pieces) == count
    if count == 2:
        assert [p.local_offset for p in pieces] == [(0, 0), (0, 1)]
        assert [p.box for p in pieces] == [Box((0, 1), (3, 1)), Box((0, 4), (3, 2))]


def test_group_by_tensor_puts_equal_pieces_together() -> None:
    specs = [TensorSpec("a", (4,), 4), TensorSpec("b", (), 4), TensorSpec("c", (2, 2), 4)]
    rank0 = PieceTable.build([(0, Box((0,), (2,))), (1, Box((), ())), (2, Box((0, 0), (2, 2)))])
    rank1 = PieceTable.build([(0, Box((2,), (2,))), (2, Box((0, 0), (2, 2)))])
    a, b, c = group_by_tensor([rank0, rank1], specs)
    assert a.offset.tolist() == [[0], [2]]
    assert [a.holders(i).tolist() for i in range(2)] == [[0], [1]]
    assert b.holders(0).tolist() == [0]
    assert c.holders(0).tolist() == [0, 1]
    assert c.shape.tolist() == [[2, 2]]


def test_empty_pieces_are_left_out() -> None:
    table = PieceTable.build([(0, Box((0, 3), (5, 0))), (1, Box((1,), (1,)))])
    assert table.tensor.tolist() == [1]


@st.composite
def boxes(draw: st.DrawFn) -> list[Box]:
    dims = draw(st.integers(0, 3))
    spans = st.tuples(*(st.integers(0, 6) for _ in range(dims))), st.tuples(*(st.integers(1, 3) for _ in range(dims)))
    return [Box(*pair) for pair in draw(st.lists(st.tuples(*spans), max_size=12))]


@given(boxes())
def test_first_overlap_finds_one_if_there_is_one(some: list[Box]) -> None:
    meeting = {(i, j) for j in range(len(some)) for i in range(j) if some[i].intersect(some[j]) is not None}
    found = first_overlap(some)
    assert found in meeting if meeting else found is None


@given(boxes())
def test_uncovered_is_the_rest(some: list[Box]) -> None:
    dims = len(some[0].shape) if some else 1
    count = np.zeros((9,) * dims, dtype=int)
    for box in some:
        count[box.slices] = 1
    offset = np.array([box.offset for box in some], dtype=np.int64).reshape(len(some), dims)
    shape = np.array([box.shape for box in some], dtype=np.int64).reshape(len(some), dims)
    for box in uncovered(count.shape, offset, shape):
        assert (count[box.slices] == 0).all()
        count[box.slices] = 1
    assert (count == 1).all()
