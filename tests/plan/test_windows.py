"""Windows of chunks: every chunk once, in order, as boxes, within the limit."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.format.grid import Grid
from cloudckpt.plan.windows import plan_windows


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    shape, edges = [], []
    for _ in range(draw(st.integers(0, 3))):
        sizes = draw(st.lists(st.integers(1, 5), max_size=5))
        shape.append(sum(sizes))
        edges.append(np.cumsum([0, *sizes]))
    if 0 in shape:
        edges = [np.unique([0, n]) for n in shape]
    return Grid.from_edges(shape, edges)


@given(st.lists(st.tuples(grids(), st.sampled_from([1, 2, 8])), max_size=4), st.integers(1, 400))
def test_windows(arrays: list[tuple[Grid, int]], window_bytes: int):
    windows = plan_windows([grid for grid, _ in arrays], [size for _, size in arrays], window_bytes)
    seen: dict[int, list[int]] = {}
    for window in windows:
        assert window
        total = 0
        for block in window:
            grid, itemsize = arrays[block.array]
            numbers = range(block.start, block.stop)
            seen.setdefault(block.array, []).extend(numbers)
            inside = [grid.box(number) for number in numbers]
            assert sum(box.num_elements for box in inside) == block.box.num_elements
            assert all(box.intersect(block.box) == box for box in inside)
            total += block.box.num_elements * itemsize
        assert total <= window_bytes or (len(window) == 1 and _is_needed(arrays, window[0], window_bytes))
    for number, (grid, _) in enumerate(arrays):
        assert seen.get(number, []) == list(range(grid.num_chunks))
    order = [block.array for window in windows for block in window]
    assert all(a <= b for a, b in pairwise(order))


def _is_needed(arrays: list[tuple[Grid, int]], block: object, window_bytes: int) -> bool:
    """A block above the limit is one row of chunks along the last dim, of which one may be too large by itself."""
    grid, itemsize = arrays[block.array]  # type: ignore[attr-defined]
    largest = math.prod(int(np.diff(edges).max(initial=0)) for edges in grid.edges) * itemsize
    return block.num_chunks == 1 and largest > window_bytes  # type: ignore[attr-defined]


def test_a_large_array_is_taken_in_thick_slabs():
    grid = Grid((64, 64), (8, 8))
    windows = plan_windows([grid], [4], 16 * 64 * 4)
    assert [[(block.start, block.stop, str(block.box)) for block in window] for window in windows][:2] == [
        [(0, 16, "[0:16, 0:64]")],
        [(16, 32, "[16:32, 0:64]")],
    ]
