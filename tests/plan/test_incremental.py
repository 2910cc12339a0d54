"""Which chunks of a base are compared with those of a save: those at the same place, of the same shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.format.grid import Grid
from cloudckpt.plan.incremental import match_chunks


@st.composite
def grids(draw: Any, dims: int) -> Grid:
    shape = [draw(st.integers(0, 9)) for _ in range(dims)]
    edges = []
    for extent in shape:
        inner = draw(st.sets(st.integers(1, extent - 1), max_size=4)) if extent > 1 else set()
        edges.append(np.array(sorted({0, extent, *inner}), dtype=np.int64))
    return Grid.from_edges(shape, edges)


def base_of(**arrays: tuple[str, Grid, str | None]) -> Any:
    entries, first = [], 0
    for name, (dtype, grid, compression) in arrays.items():
        entries.append(
            SimpleNamespace(name=name, dtype=dtype, shape=grid.shape, compression=compression, first_chunk=first)
        )
        first += grid.num_chunks
    return SimpleNamespace(
        arrays=entries,
        array_index={entry.name: i for i, entry in enumerate(entries)},
        grids=[g for _, g, _ in arrays.values()],
    )


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(grids(dims), grids(dims), grids(dims))))
def test_chunks_are_matched_by_box(three: tuple[Grid, Grid, Grid]):
    ours, theirs, other = three
    base = base_of(other=("float32", other, None), w=("float32", theirs, None))
    rows = match_chunks(["w", "new"], ["float32", "float32"], [ours, other], None, base)
    assert len(rows) == ours.num_chunks + other.num_chunks
    assert (rows[ours.num_chunks :] == -1).all()
    there = {(theirs.box(i).offset, theirs.stored_shape(i)): other.num_chunks + i for i in range(theirs.num_chunks)}
    expected = [there.get((ours.box(i).offset, ours.stored_shape(i)), -1) for i in range(ours.num_chunks)]
    assert rows[: ours.num_chunks].tolist() == expected
    used = rows[rows >= 0]
    assert len(np.unique(used)) == len(used)


def test_other_types_and_compressions_do_not_match():
    grid = Grid((8,), (4,))
    base = base_of(a=("float32", grid, None), b=("int32", grid, None), c=("float32", grid, "zstd"))
    rows = match_chunks(["a", "b", "c"], ["float32"] * 3, [grid] * 3, None, base)
    assert rows.tolist() == [0, 1, -1, -1, -1, -1]
    assert match_chunks(["c"], ["float32"], [grid], "zstd", base).tolist() == [4, 5]
    assert match_chunks(["a"], ["float32"], [Grid((8, 1), (4, 1))], None, base).tolist() == [-1, -1]
