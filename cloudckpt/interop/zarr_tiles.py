"""How a zarr array is cut to be read, so that each of its chunks is decoded about once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import zarr

from cloudckpt.format.grid import DimCuts, Grid
from cloudckpt.plan.grid import SMALLEST_SHARE


def object_grid(array: zarr.Array[Any]) -> Grid:
    """One cell for each object that the array has in its store: a shard, or a chunk where there are no shards."""
    try:
        return _grid(array.shape, array.shards or array.chunks)
    except NotImplementedError:  # irregular
        return _grid(array.shape, array.write_chunk_sizes)  # type: ignore[attr-defined]  # since zarr 3.2


def room_bytes(chunk_bytes: int) -> int:
    """The most that planning leaves as it is: what is larger it may cut along any dim, for the sake of slices."""
    return max(1, 2 * (chunk_bytes // SMALLEST_SHARE) - 1)


def tiles(array: zarr.Array[Any], itemsize: int, chunk_bytes: int) -> Grid:
    """What is read at a time: as many whole chunks as fit, next to one another, but one at least.

    Of a shard that does not fit chunks are read by themselves.
    """
    grid, room = object_grid(array), room_bytes(chunk_bytes)
    if _widest_bytes(grid, itemsize) > room:
        try:
            grid = _grid(array.shape, array.chunks)
        except NotImplementedError:
            grid = _grid(array.shape, array.read_chunk_sizes)  # type: ignore[attr-defined]
    cuts = list(grid.cuts)
    size = _widest_bytes(grid, itemsize)
    for dim in reversed(range(len(cuts))):
        cut, count = cuts[dim], grid.counts[dim]
        at_a_time = _even(max(1, count), max(1, min(count, room // max(1, size))))
        if isinstance(cut, int):
            cuts[dim] = min(cut * at_a_time, max(1, array.shape[dim]))
            size *= at_a_time
        if not isinstance(cut, int) or at_a_time < count:
            break
    return Grid(grid.shape, tuple(cuts))


def cells(tiled: Grid, itemsize: int, chunk_bytes: int) -> Grid:
    """Tiles, and parts of those that do not fit: such that the parts of a tile follow each other in C order.

    They do if it is cut along dims that come after, or are, the last along which there is more than one tile.
    """
    cuts, room = list(tiled.cuts), room_bytes(chunk_bytes)
    size = _widest_bytes(tiled, itemsize)
    last = max((dim for dim, count in enumerate(tiled.counts) if count > 1), default=0)
    for dim in [*range(last, len(cuts)), *reversed(range(last))]:
        if size <= room:
            break
        widest = _widest(tiled, dim)
        width = _even(widest, max(1, widest * room // size))
        cuts[dim] = _split(tiled, dim, width)
        size = size // widest * width
    return Grid(tiled.shape, tuple(cuts))


def _grid(shape: tuple[int, ...], sizes: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> Grid:
    return Grid(tuple(shape), tuple(max(1, s) if isinstance(s, int) else tuple(s) for s in sizes))


def _widest(grid: Grid, dim: int) -> int:
    cut = grid.cuts[dim]
    return min(cut, grid.shape[dim]) if isinstance(cut, int) else max(cut, default=0)


def _widest_bytes(grid: Grid, itemsize: int) -> int:
    return itemsize * math.prod(_widest(grid, dim) for dim in range(len(grid.shape)))


def _even(count: int, at_a_time: int) -> int:
    """At most ``at_a_time``, such that all parts are equal, or the last one lacks little: it is padded."""
    divisor = next((n for n in range(at_a_time, at_a_time // 4, -1) if count % n == 0), None)
    return divisor or -(-count // -(-count // at_a_time))


def _split(grid: Grid, dim: int, width: int) -> DimCuts:
    cut, extent = grid.cuts[dim], grid.shape[dim]
    if isinstance(cut, int) and (cut % width == 0 or cut >= extent):
        return width
    edges = itertools.pairwise(grid.edges[dim].tolist())
    return tuple(min(width, end - at) for start, end in edges for at in range(start, end, width))
