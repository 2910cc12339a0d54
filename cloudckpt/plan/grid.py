"""From the edges of all pieces to a chunk grid."""

from __future__ import annotations

import itertools
import math

import numpy as np

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.grid import Grid, Ints
from cloudckpt.plan.shard import TensorPieces, TensorSpec

WANTED_DIVISIONS = 8
"""Cuts along every dim that a tensor should have, so that a slice along any dim reads little more than it needs."""

SMALLEST_SHARE = 8
"""...unless chunks would get smaller than 1/8 of the bound: requests would outweigh the bytes saved."""

MAX_CHUNKS = 2**24
"""Per tensor. Product grids of wild tilings can grow without bound; a manifest must not."""


def build_grid(spec: TensorSpec, pieces: TensorPieces, chunk_bytes: int) -> Grid:
    """The product grid of all piece edges, subdivided to chunks of at most ``chunk_bytes``.

    Every piece is a union of whole chunks.
    """
    edges = [_edges(spec.shape[d], pieces.offset[:, d], pieces.shape[:, d]) for d in range(len(spec.shape))]
    cells = [int(np.diff(e).max(initial=0)) for e in edges]
    if 0 in spec.shape:
        return Grid.from_edges(spec.shape, edges)
    extents = _chunk_extents(spec.shape, cells, spec.itemsize, chunk_bytes)
    grid = Grid.from_edges(spec.shape, [_subdivide(e, x) for e, x in zip(edges, extents, strict=True)])
    if grid.num_chunks > MAX_CHUNKS:
        raise InvalidStateError(
            f"tensor {spec.path!r}: the edges of its shards make a grid of {grid.num_chunks} chunks; "
            f"at most {MAX_CHUNKS} are possible"
        )
    return grid


def _edges(extent: int, offset: Ints, shape: Ints) -> Ints:
    ends = np.array([0, extent], dtype=np.int64)
    return np.unique(np.concatenate([ends, offset, offset + shape]))


def _chunk_extents(shape: tuple[int, ...], cells: list[int], itemsize: int, chunk_bytes: int) -> list[int]:
    """Upper bounds of a chunk's extents: halved where the tensor has the fewest cuts so far."""
    extents = list(cells)
    smallest = chunk_bytes // SMALLEST_SHARE
    while True:
        nbytes = math.prod(extents) * itemsize
        divisions = [-(-s // x) for s, x in zip(shape, extents, strict=True)]
        wanted = [d for d, x in enumerate(extents) if x > 1]
        if nbytes <= chunk_bytes:
            wanted = [d for d in wanted if divisions[d] < WANTED_DIVISIONS and nbytes >= 2 * smallest]
        if not wanted:
            return extents
        dim = min(wanted, key=lambda d: (divisions[d], -extents[d]))
        extents[dim] = -(-extents[dim] // 2)


def _subdivide(edges: Ints, extent: int) -> Ints:
    """Cut every cell into parts of at most ``extent``; keep equally spaced cells equally spaced."""
    sizes = np.diff(edges)
    largest = int(sizes.max(initial=0))
    if largest <= extent:
        return edges
    parts = -(-largest // extent)
    regular = len(sizes) == 1 or ((sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0])
    if regular:
        even = next((p for p in range(parts, 2 * parts + 1) if largest % p == 0), None)
        if even is not None or len(sizes) == 1:
            step = -(-largest // (even or parts))
            return np.append(np.arange(0, edges[-1], step, dtype=np.int64), edges[-1])
    cuts = [np.linspace(a, b, -(-int(b - a) // extent) + 1).astype(np.int64)[:-1] for a, b in itertools.pairwise(edges)]
    return np.append(np.concatenate(cuts), edges[-1])
