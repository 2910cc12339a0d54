"""Tables of wants: equal ones told once, small on the way, the same after it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.format.box import Box
from cloudckpt.plan.shard import PieceTable
from cloudckpt.plan.wants import Wants, decode_table, encode_table, table_digest

LARGE = 2**62


@st.composite
def tables(draw: st.DrawFn) -> PieceTable:
    pieces = []
    for number in sorted(draw(st.lists(st.integers(0, 5), max_size=6))):
        dims = draw(st.integers(0, 3))
        offset = draw(st.lists(st.sampled_from([0, 1, 7, LARGE]), min_size=dims, max_size=dims))
        shape = draw(st.lists(st.sampled_from([1, 2, LARGE]), min_size=dims, max_size=dims))
        pieces.append((number, Box(tuple(offset), tuple(shape))))
    return PieceTable.build(pieces)


def same(a: PieceTable, b: PieceTable) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tensor", "offset", "shape"))


@settings(max_examples=200)
@given(tables(), tables())
def test_tables_survive_their_encoding_and_only_equal_ones_have_one_digest(one: PieceTable, other: PieceTable) -> None:
    again = decode_table(encode_table(one))
    assert same(again, one)
    assert again.offset.dtype == again.shape.dtype == again.tensor.dtype == np.int64
    assert table_digest(again) == table_digest(one)
    assert (table_digest(one) == table_digest(other)) == same(one, other)


def test_digests_tell_the_number_of_dims() -> None:
    flat = PieceTable.build([(0, Box((1,), (1,)))])
    scalars = PieceTable.build([(0, Box((), ())), (1, Box((), ())), (1, Box((), ()))])
    assert table_digest(flat) != table_digest(scalars)


@settings(max_examples=100)
@given(st.lists(tables(), min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_equal_tables_are_kept_once_also_among_some_ranks(
    distinct: list[PieceTable], numbers: list[int], data: st.DataObject
) -> None:
    ranks = [distinct[i % len(distinct)] for i in numbers]
    wants = Wants.of(ranks)
    assert len(wants.tables) == len({table_digest(t) for t in ranks})
    assert all(same(wants.tables[wants.table[r]], table) for r, table in enumerate(ranks))
    some = data.draw(st.lists(st.sampled_from(range(len(ranks))), unique=True, min_size=1))
    fewer = wants.among(some)
    assert len(fewer.table) == len(some)
    assert all(same(fewer.tables[fewer.table[i]], ranks[rank]) for i, rank in enumerate(some))
    assert sorted(set(fewer.table.tolist())) == list(range(len(fewer.tables))), "no table that nobody has"


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_table_of_a_large_model_takes_few_bytes_a_row(dims: int) -> None:
    """2,000 tensors, each cut in 64 along its first dim."""
    shape = (256, *(4096,) * (dims - 1))
    table = PieceTable.build((i, Box((256 * 17, *(0,) * (dims - 1)), shape)) for i in range(2000))
    assert len(encode_table(table)) <= 2000
