"""The chunk grid of an array: a product of cuts along each dim.

Along a dim the grid is either regular (one extent, the last chunk stored padded to it, as zarr's
``regular`` grid demands) or a list of extents that add up to the dim. Chunks are numbered in C order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cloudckpt._cached import cached_property
from cloudckpt.errors import FormatError
from cloudckpt.format.box import Box

Ints: TypeAlias = npt.NDArray[np.int64]
DimCuts: TypeAlias = int | tuple[int, ...]
"""A regular extent, or every chunk's extent."""
EncodedCuts: TypeAlias = int | tuple[int | tuple[int, int], ...]
"""As in zarr's rectilinear grid: ``[extent, count]`` pairs stand for runs."""


@dataclass(frozen=True)
class Grid:
    shape: tuple[int, ...]
    cuts: tuple[DimCuts, ...]

    @staticmethod
    def from_edges(shape: Sequence[int], edges: Sequence[Ints]) -> Grid:
        """``edges[d]`` ascends from 0 to ``shape[d]``. Regular where all cuts are equally spaced."""
        cuts: list[DimCuts] = []
        for extent, marks in zip(shape, edges, strict=True):
            sizes = np.diff(marks)
            if len(sizes) == 0:
                cuts.append(max(1, extent))
            elif len(sizes) == 1 or ((sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]):
                cuts.append(int(sizes[0]))
            else:
                cuts.append(tuple(int(s) for s in sizes))
        if any(isinstance(c, tuple) for c in cuts):
            # Mixed with irregular dims a ragged regular dim is spelled out: no padding in rectilinear grids.
            cuts = [
                c if isinstance(c, tuple) or extent % c == 0 else tuple(int(s) for s in np.diff(marks))
                for c, extent, marks in zip(cuts, shape, edges, strict=True)
            ]
        return Grid(tuple(int(s) for s in shape), tuple(cuts))

    @property
    def is_regular(self) -> bool:
        return all(isinstance(c, int) for c in self.cuts)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        return tuple(-(-s // c) if isinstance(c, int) else len(c) for s, c in zip(self.shape, self.cuts, strict=True))

    @cached_property
    def num_chunks(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def edges(self) -> tuple[Ints, ...]:
        """Chunk borders along each dim, clipped to the array."""
        out = []
        for s, c, n in zip(self.shape, self.cuts, self.counts, strict=True):
            if isinstance(c, int):
                out.append(np.minimum(np.arange(n + 1, dtype=np.int64) * c, s))
            else:
                out.append(np.concatenate([[0], np.cumsum(np.asarray(c, dtype=np.int64))]))
        return tuple(out)

    def index(self, chunk: int) -> tuple[int, ...]:
        """The grid position of a chunk number."""
        index = []
        for count in reversed(self.counts):
            chunk, i = divmod(chunk, count)
            index.append(i)
        return tuple(reversed(index))

    def box(self, chunk: int) -> Box:
        """The elements of the array that a chunk holds (without padding)."""
        index = self.index(chunk)
        offset = tuple(int(e[i]) for e, i in zip(self.edges, index, strict=True))
        end = tuple(int(e[i + 1]) for e, i in zip(self.edges, index, strict=True))
        return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))

    def stored_shape(self, chunk: int) -> tuple[int, ...]:
        """The shape of a chunk as it is stored (with padding)."""
        return tuple(c if isinstance(c, int) else c[i] for c, i in zip(self.cuts, self.index(chunk), strict=True))

    @cached_property
    def stored_elements(self) -> Ints:
        """Number of elements of every chunk as stored, in chunk order."""
        total = np.ones(1, dtype=np.int64)
        for c, n in zip(self.cuts, self.counts, strict=True):
            extents = np.full(n, c, dtype=np.int64) if isinstance(c, int) else np.asarray(c, dtype=np.int64)
            total = (total[:, None] * extents[None, :]).reshape(-1)
        return total

    def encode(self) -> tuple[EncodedCuts, ...]:
        return tuple(c if isinstance(c, int) else _runs(c) for c in self.cuts)

    @staticmethod
    def decode(shape: Sequence[int], encoded: Sequence[EncodedCuts], *, max_chunks: int, what: str) -> Grid:
        """Read an untrusted grid: nothing larger than ``max_chunks`` is ever built."""
        if len(shape) != len(encoded):
            raise FormatError(f"{what}: grid has {len(encoded)} dims, shape has {len(shape)}")
        cuts: list[DimCuts] = []
        along_dim = max(max_chunks, 1)  # an array without elements has no chunks, and one cut along its other dims
        for extent, item in zip(shape, encoded, strict=True):
            if isinstance(item, int):
                if item < 1 or -(-extent // item) > along_dim:
                    raise FormatError(f"{what}: chunk extent {item} does not fit a dim of {extent}")
                cuts.append(item)
                continue
            runs = [(r, 1) if isinstance(r, int) else r for r in item]
            if any(size < 1 or count < 1 for size, count in runs):
                raise FormatError(f"{what}: chunk extents must be positive")
            if sum(count for _, count in runs) > along_dim or sum(s * n for s, n in runs) != extent:
                raise FormatError(f"{what}: chunk extents do not add up to {extent}")
            cuts.append(tuple(size for size, count in runs for _ in range(count)))
        grid = Grid(tuple(shape), tuple(cuts))
        if grid.num_chunks > max_chunks:
            raise FormatError(f"{what}: {grid.num_chunks} chunks, the manifest lists at most {max_chunks}")
        return grid


def _runs(sizes: tuple[int, ...]) -> tuple[int | tuple[int, int], ...]:
    out: list[int | tuple[int, int]] = []
    start = 0
    for i in range(1, len(sizes) + 1):
        if i == len(sizes) or sizes[i] != sizes[start]:
            out.append(sizes[start] if i - start == 1 else (sizes[start], i - start))
            start = i
    return tuple(out)
