"""Bytes of chunks, in parts of any size, end up where plain indexing would put them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.format.place import Placement


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    dims = draw(st.integers(0, 4))
    stored = tuple(draw(st.integers(1, 5)) for _ in range(dims))
    start = tuple(draw(st.integers(0, n - 1)) for n in stored)
    shape = tuple(draw(st.integers(1, n - s)) for n, s in zip(stored, start, strict=True))
    margin = tuple(draw(st.integers(0, 2)) for _ in range(dims))
    order = tuple(draw(st.permutations(range(dims))))
    return stored, start, shape, margin, order, draw(st.sampled_from([1, 2, 4, 16]))


@settings(max_examples=400)
@given(cases(), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_parts_are_put_where_indexing_puts_the_whole(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int],
    sizes: list[int],
) -> None:
    stored, start, shape, margin, order, itemsize = case
    chunk = np.random.default_rng(0).integers(0, 256, (*stored, itemsize), dtype=np.uint8)
    # A part of a larger array whose axes lie in memory in any order.
    outer = [n + m for n, m in zip(shape, margin, strict=True)]
    memory = np.full((*(outer[axis] for axis in order), itemsize), 7, dtype=np.uint8)
    target = memory.transpose(*np.argsort(order).tolist(), len(shape))[tuple(slice(0, n) for n in shape)]
    expected = memory.copy()
    expected.transpose(*np.argsort(order).tolist(), len(shape))[tuple(slice(0, n) for n in shape)] = chunk[
        tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
    ]
    placement = Placement.of_box(target, stored, start)
    flat, position, turn = chunk.reshape(-1), 0, 0
    while position < len(flat):
        size = sizes[turn % len(sizes)]
        placement.put(flat[position : position + size], position)
        position, turn = position + size, turn + 1
    assert np.array_equal(memory, expected)


def test_a_whole_chunk_of_contiguous_memory_is_one_row() -> None:
    target = np.zeros((4, 8, 4), dtype=np.uint8)
    assert Placement.of_box(target, (4, 8), (0, 0)).extents == (128,)
    assert Placement.of_box(target[1:3], (4, 8), (1, 0)).target.shape == (64,)
