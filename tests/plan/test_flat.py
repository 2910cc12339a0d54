"""Flat ranges as boxes, boxes as flat ranges, and what a layout refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.plan.flat import FlatLayout, FlatParam, c_strides, part_boxes, range_boxes, row_dims, row_starts

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_a_range_is_a_few_boxes_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = np.arange(count).reshape(shape)
    boxes = range_boxes(shape, start, stop)
    found = [element for box in boxes for element in whole[box.slices].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.num_elements for box in boxes)


@given(shapes.filter(all), st.data())
def test_a_box_is_rows_of_equal_length(shape: tuple[int, ...], data: st.DataObject) -> None:
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
    strides = c_strides(shape)
    outer = len(shape) - row_dims(shape, box)
    begin = sum(o * s for o, s in zip(offset, strides, strict=True))
    starts = begin + row_starts(box.shape[:outer], strides[:outer])
    length = box.num_elements // len(starts)
    whole = np.arange(math.prod(shape)).reshape(shape)
    assert [s + i for s in starts.tolist() for i in range(length)] == whole[box.slices].reshape(-1).tolist()


def test_whole_rows_are_one_run() -> None:
    assert row_dims((8, 4, 5), Box((2, 0, 0), (3, 4, 5))) == 3
    assert row_dims((8, 4, 5), Box((2, 1, 0), (3, 2, 5))) == 2
    assert row_dims((8, 4, 5), Box((2, 0, 1), (3, 4, 2))) == 1
    assert row_dims((), Box((), ())) == 0


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=5), st.integers(1, 7), st.integers(1, 5))
def test_the_parts_of_all_ranks_are_all_of_every_parameter(sizes: list[list[int]], align: int, ranks: int) -> None:
    layout = FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(sizes)], align=align)
    assert all(param.position % align == 0 for param in layout.params)
    part = -(-(layout.numel + 3) // ranks)
    held: dict[str, list[int]] = {param.name: [] for param in layout.params}
    for rank in range(ranks):
        for param, low, high in layout.held(rank * part, part):
            held[param.name] += range(low, high)
            assert low == high or rank * part <= param.position + low < param.position + high <= (rank + 1) * part
    assert held == {param.name: list(range(param.numel)) for param in layout.params}


def test_a_part_of_a_tensor_is_moved_to_its_place() -> None:
    param = FlatParam("w", (2, 3), 0, global_shape=(4, 6), offset=(2, 3))
    assert part_boxes(param, 2, 6) == [Box((2, 5), (1, 1)), Box((3, 3), (1, 3))]


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ((FlatParam("a", (4,), 0), FlatParam("b", (2,), 3)), "'b' begins at 3"),
        ((FlatParam("a", (4,), 0), FlatParam("a", (2,), 4)), "two parameters are called 'a'"),
        ((FlatParam("a", (-1,), 0),), "'a' has a position, shape or offset"),
        ((FlatParam("a", (1.5,), 0),), "'a' has a position, shape or offset"),  # type: ignore[arg-type]
        ((FlatParam("a", (2,), 0, global_shape=(4,)),), "needs both"),
        ((FlatParam("a", (2,), 0, global_shape=(4,), offset=(3,)),), "reaches outside"),
        ((FlatParam("a", (2,), 0, global_shape=(4, 4), offset=(0, 0)),), "reaches outside"),
    ],
)
def test_layouts_that_cannot_be(params: tuple[FlatParam, ...], fault: str) -> None:
    with pytest.raises(InvalidStateError, match=fault):
        FlatLayout(params)
