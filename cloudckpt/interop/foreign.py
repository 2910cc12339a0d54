"""States in files of other formats, described as a checkpoint would be: then what reads those reads them, too."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cloudckpt.config import Config
from cloudckpt.format import values
from cloudckpt.format.array_names import array_names
from cloudckpt.format.document import FORMAT, VERSION, ArrayEntry, ChunkColumns, ChunkTable, Document, ObjectEntry
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.grid import DimCuts, Grid
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import Node
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.store.base import Store
from cloudckpt.store.paths import parent
from cloudckpt.store.resolve import url_text

CHUNK_BYTES = 1024 * 1024
"""How finely bytes without checksums are addressed: neighbouring chunks are read in one go all the same."""


@dataclass(frozen=True, eq=False)
class Origin:
    """Where files of another format are: all below ``store``, or only the one called ``name``."""

    store: Store
    name: str | None
    config: Config
    allow_pickle: bool = False


def file_in(url: str | os.PathLike[str], suffixes: tuple[str, ...]) -> tuple[str, str | None]:
    """The folder that a URL with one of these suffixes lies in, and its name; the URL itself and None for others."""
    text = url_text(url)
    if not suffixes or not text.endswith(suffixes):
        return text, None
    folder, name = parent(text)
    return folder or text[: -len(name)], name


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """A tensor whose bytes lie in C order, little endian, one after another, in one object.

    ``name``: any text, as long as no two arrays have the same. ``dtype``: torch's name. ``object``: its number.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    object: int
    byte_offset: int


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Where an array is in a state, by its name: one that is given to `describe`, or one of `Foreign.made`."""

    name: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """Where a value is in a state that has been encoded already (`format.values`)."""

    node: Node


@dataclass(frozen=True, eq=False)
class Foreign:
    """A state in files of another format.

    ``manifest``: of arrays without checksums (`describe`). ``made``: arrays that its tree names and that are made of
    boxes of those. ``notes``: to warn the caller of. ``is_cut``: arrays are best read by the grids of the manifest, and
    a rewrite keeps them.
    """

    manifest: Manifest
    made: Mapping[str, VirtualArray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_cut: bool = False


def describe(
    objects: Sequence[tuple[str, int]],
    arrays: Sequence[ForeignArray],
    state: Any = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a state whose bytes are elsewhere.

    ``objects``: ``(key, size in bytes)`` below the URL of the source. ``state``: nested containers of plain values,
    with an `ArrayRef` where a tensor is; without one, a flat dict of all arrays. The caller has checked that all arrays
    lie in their objects. Raises InvalidStateError for values that are not plain.
    """
    if state is None:
        state = {array.name: ArrayRef(array.name) for array in arrays}
    grids = [Grid(array.shape, _row_cuts(array.shape, dtype(array.dtype).itemsize, chunk_bytes)) for array in arrays]
    nbytes = [grid.stored_elements * dtype(array.dtype).itemsize for array, grid in zip(arrays, grids, strict=True)]
    starts = [array.byte_offset + np.cumsum(size) - size for array, size in zip(arrays, nbytes, strict=True)]
    counts = [grid.num_chunks for grid in grids]
    none = np.zeros(0, dtype=np.int64)
    columns = ChunkColumns.pack(
        np.repeat(np.array([array.object for array in arrays], dtype=np.int64), counts),
        np.concatenate([none, *starts]),
        np.concatenate([none, *nbytes]),
        np.zeros(sum(counts), dtype=np.int64),
    )
    kinds = [(array.name, array.dtype, grid) for array, grid in zip(arrays, grids, strict=True)]
    return manifest_of(kinds, state, objects=objects, chunks=columns, step=step, metadata=metadata)


def manifest_of(
    arrays: Sequence[tuple[str, str, Grid]],
    state: Any,
    *,
    objects: Sequence[tuple[str, int]] = (),
    chunks: ChunkTable | None = None,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of arrays that are cut in some way: name, torch's dtype, grid.

    Without ``chunks`` nothing tells where they lie, so that only a fetch of their own can read them.
    """
    names = dict(zip((name for name, _, _ in arrays), array_names([(name,) for name, _, _ in arrays]), strict=True))
    assert len(names) == len(arrays), "two arrays have one name"
    firsts = itertools.accumulate((grid.num_chunks for _, _, grid in arrays), initial=0)
    entries = tuple(
        ArrayEntry(name=names[name], dtype=kind, shape=grid.shape, grid=grid.encode(), first_chunk=first)
        for (name, kind, grid), first in zip(arrays, firsts, strict=False)
    )
    if chunks is None:
        nothing = np.zeros(sum(grid.num_chunks for _, _, grid in arrays), dtype=np.int64)
        chunks = ChunkColumns.pack(nothing, nothing, nothing, nothing)
    document = Document(
        format=FORMAT,
        version=VERSION,
        commit_id="",
        attempt="",
        step=step,
        created="",
        writer="",
        world_size=1,
        layout="packed",
        meshes=(),
        metadata=values.encode(dict(metadata or {})),
        tree=values.encode(state, leaf=lambda _, value: _node(value, names)),
        arrays=entries,
        objects=tuple(ObjectEntry(key=key, nbytes=size, crc32c=0, rank=0) for key, size in objects),
        chunks=chunks,
    )
    return Manifest(document, has_checksums=False)


def _node(value: Any, names: Mapping[str, str]) -> Node | None:
    if isinstance(value, Encoded):
        return value.node
    if not isinstance(value, ArrayRef):
        return None
    return {"$": "tensor", "array": names.get(value.name, value.name)}


def _row_cuts(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> tuple[DimCuts, ...]:
    """Cuts whose every chunk is one run of bytes: whole rows, as many as fit, or parts of a single row."""
    if 0 in shape:
        return tuple(max(1, extent) for extent in shape)
    room = max(1, chunk_bytes // itemsize)
    dim = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= room), 0)
    rows = max(1, room // math.prod(shape[dim + 1 :]))
    return tuple(1 if d < dim else _unpadded(extent, rows) if d == dim else extent for d, extent in enumerate(shape))


def _unpadded(extent: int, size: int) -> DimCuts:
    """A regular grid would have the last chunk as large as the others."""
    size = min(size, extent)
    whole, rest = divmod(extent, size)
    return (size,) * whole + (rest,) if rest else size
