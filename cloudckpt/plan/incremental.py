"""Which chunks of a committed checkpoint may serve a new save. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cloudckpt.format.grid import Grid, Ints
from cloudckpt.format.manifest import Manifest


def match_chunks(
    names: Sequence[str], dtypes: Sequence[str], grids: Sequence[Grid], compression: str | None, base: Manifest
) -> Ints:
    """For every chunk of the save, the row of the base's chunk table at the same box of the same array, or -1.

    Only of arrays of the same type and compression, so that equal elements are equal stored bytes. Each row serves
    one chunk at most, for no bytes of an object may stand for two chunks.
    """
    rows = [np.zeros(0, dtype=np.int64)]
    for name, dtype, grid in zip(names, dtypes, grids, strict=True):
        number = base.array_index.get(name)
        entry = None if number is None else base.arrays[number]
        if (
            number is None
            or entry is None
            or (entry.dtype, entry.compression) != (dtype, compression)
            or len(entry.shape) != len(grid.shape)
        ):
            rows.append(np.full(grid.num_chunks, -1, dtype=np.int64))
            continue
        found = _same_boxes(grid, base.grids[number])
        rows.append(np.where(found < 0, -1, found + entry.first_chunk))
    return np.concatenate(rows)


def _same_boxes(grid: Grid, other: Grid) -> Ints:
    """For every chunk of ``grid`` the number of the chunk of ``other`` at the same place, of the same shape; or -1."""
    found = np.zeros(1, dtype=np.int64)
    is_there = np.ones(1, dtype=bool)
    for d, count in enumerate(other.counts):
        starts, sizes = grid.edges[d][:-1], _sizes(grid, d)
        others, other_sizes = other.edges[d][:-1], _sizes(other, d)
        at = np.minimum(np.searchsorted(others, starts), max(count - 1, 0))
        same = (others[at] == starts) & (other_sizes[at] == sizes) if count else np.zeros(len(starts), dtype=bool)
        found = (found[:, None] * count + at[None, :]).reshape(-1)
        is_there = (is_there[:, None] & same[None, :]).reshape(-1)
    return np.where(is_there, found, -1)


def _sizes(grid: Grid, d: int) -> npt.NDArray[np.int64]:
    """The extents of the chunks along a dim, as stored."""
    cuts = grid.cuts[d]
    return np.full(grid.counts[d], cuts, dtype=np.int64) if isinstance(cuts, int) else np.array(cuts, dtype=np.int64)
