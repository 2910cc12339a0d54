"""Runs cover every element once and in C order; chunks are read once where a window can hold a layer of them."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.format.box import Box
from cloudckpt.format.grid import Grid
from cloudckpt.plan.runs import RunPlan, RunSizes, Window, plan_runs
from cloudckpt.plan.virtual import VirtualArray, concatenate, permute, split, stack, stored_array, unstack


def grid_of(shape: tuple[int, ...], *chunk: int) -> Grid:
    return Grid(shape, tuple(chunk))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=4)))
    cuts = []
    for extent in shape:
        inner = draw(st.sets(st.integers(1, extent - 1))) if extent > 1 else set()
        cuts.append(np.array([0, *sorted(inner), *([extent] if extent else [])], dtype=np.int64))
    return Grid.from_edges(shape, cuts)


@st.composite
def changed(draw: st.DrawFn, array: VirtualArray) -> VirtualArray:
    """What rename rules may make of an array."""
    dims = len(array.shape)
    for change in draw(st.lists(st.sampled_from(["permute", "split", "stack", "unstack"]), max_size=3)):
        if change == "stack" and dims < 5:
            array = stack([array, array], draw(st.integers(0, dims)))
        elif dims and change == "permute":
            array = permute(array, draw(st.permutations(range(dims))))
        elif dims and change == "split":
            dim = draw(st.integers(0, dims - 1))
            at = draw(st.integers(0, array.shape[dim]))
            parts = split(array, dim, (at, array.shape[dim] - at))
            array = concatenate(parts[::-1], dim)
        elif dims and change == "unstack" and array.shape[0]:
            array = unstack(array, 0)[-1]
        dims = len(array.shape)
    return array


SIZES = st.builds(RunSizes, st.integers(1, 64), st.integers(1, 256), st.integers(1, 512))


def elements(plan: RunPlan, windows: tuple[Window, ...]) -> list[tuple[int, int]]:
    """Array and C-order number of every element, in the order of the runs."""
    found = []
    for run in (run for window in windows for run in window):
        shape = plan.arrays[run.array].shape
        numbers = np.arange(math.prod(shape)).reshape(shape)[run.box.slices]
        found += [(run.array, n) for n in numbers.reshape(-1).tolist()]
    return found


@settings(max_examples=40)
@given(st.data(), st.lists(grids(), min_size=1, max_size=3), SIZES)
def test_every_element_once_and_in_order(data: st.DataObject, stored: list[Grid], sizes: RunSizes):
    arrays = [data.draw(changed(stored_array(i, "float32", grid.shape))) for i, grid in enumerate(stored)]
    plan = plan_runs(arrays, [4] * len(arrays), stored, sizes)
    expected = [(i, n) for i, array in enumerate(arrays) for n in range(math.prod(array.shape))]
    assert elements(plan, plan.windows) == expected
    for window in plan.windows:
        assert window
        assert sum(run.box.num_elements * 4 for run in window) <= max(sizes.largest_bytes, sizes.window_bytes, 4)
        assert all(run.box.num_elements * 4 <= max(sizes.run_bytes, 4) for run in window)


def num_reads(plan: RunPlan, grid: Grid) -> Counter[int]:
    """In how many windows each chunk of array 0, which is stored as such, is read."""
    reads: Counter[int] = Counter()
    for window in plan.windows:
        reads.update({c for run in window for c in range(grid.num_chunks) if grid.box(c).intersect(run.box)})
    return reads


@settings(max_examples=40)
@given(grids().filter(lambda grid: grid.num_chunks), SIZES)
def test_chunks_are_read_once_where_a_layer_fits(grid: Grid, sizes: RunSizes):
    plan = plan_runs([stored_array(0, "uint8", grid.shape)], [1], [grid], sizes)
    layer = int(np.diff(grid.edges[0]).max()) * math.prod(grid.shape[1:]) if grid.shape else 1
    if layer <= sizes.largest_bytes:
        assert set(num_reads(plan, grid).values()) == {1}


def test_a_window_holds_whole_layers():
    grid = grid_of((64, 64), 8, 8)
    plan = plan_runs([stored_array(0, "uint8", grid.shape)], [1], [grid], RunSizes(128, 1100, 2000))
    assert [sum(run.box.shape[0] for run in window) for window in plan.windows] == [16, 16, 16, 16]
    assert {run.box.shape for window in plan.windows for run in window} == {(2, 64)}


def test_a_layer_too_thick_is_read_in_equal_parts():
    grid = grid_of((64, 64), 32, 8)
    plan = plan_runs([stored_array(0, "uint8", grid.shape)], [1], [grid], RunSizes(128, 256, 1000))
    assert [sum(run.box.shape[0] for run in window) for window in plan.windows] == [10, 11, 11] * 2
    assert set(num_reads(plan, grid).values()) == {3}


def test_rows_too_long_are_cut_along_the_next_dim():
    grid = grid_of((4, 10, 10), 2, 5, 10)
    plan = plan_runs([stored_array(0, "uint8", grid.shape)], [1], [grid], RunSizes(100, 60, 60))
    assert [window[0].box for window in plan.windows[:2]] == [
        Box((0, 0, 0), (1, 5, 10)),
        Box((0, 5, 0), (1, 5, 10)),
    ]
    assert set(num_reads(plan, grid).values()) == {2}


def test_small_arrays_share_a_window():
    grids = [grid_of((10,), 10)] * 7
    arrays = [stored_array(i, "float32", (10,)) for i in range(7)]
    plan = plan_runs(arrays, [4] * 7, grids, RunSizes(64, 120, 120))
    assert [[run.array for run in window] for window in plan.windows] == [[0, 1, 2], [3, 4, 5], [6]]


def test_an_array_made_of_many_is_cut_between_them():
    grids = [grid_of((5, 6), 2, 3)] * 4
    parts = [stored_array(i, "uint8", (5, 6)) for i in range(4)]
    plan = plan_runs([concatenate(parts, 0)], [1], grids, RunSizes(1000, 60, 60))
    assert [window[0].box.shape for window in plan.windows] == [(10, 6), (10, 6)]
    plan = plan_runs([concatenate(parts, 1)], [1], grids, RunSizes(1000, 60, 60))
    assert [window[0].box.shape for window in plan.windows] == [(2, 24), (2, 24), (1, 24)]


def test_what_is_stored_flat_is_read_as_it_is_stored():
    array = stored_array(0, "float32", (6, 8), flat=True)
    plan = plan_runs([array], [4], [grid_of((48,), 10)], RunSizes(1000, 80, 80))
    assert [window[0].box for window in plan.windows] == [Box((0,), (20,)), Box((20,), (20,)), Box((40,), (8,))]
    assert plan.arrays[0].shape == (48,)
    turned = plan_runs([permute(array, (1, 0))], [4], [grid_of((48,), 10)], RunSizes(1000, 80, 80))
    assert turned.arrays[0].shape == (8, 6)
    assert elements(turned, turned.windows) == [(0, n) for n in range(48)]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)])
def test_arrays_without_elements_have_no_runs(shape: tuple[int, ...]):
    grid = Grid(shape, tuple(max(1, n) for n in shape))
    assert plan_runs([stored_array(0, "float32", shape)], [4], [grid], RunSizes(8, 8, 8)).windows == ()
