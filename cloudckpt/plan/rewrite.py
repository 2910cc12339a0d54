"""From a stored state and the view of it that is wanted to the arrays of a checkpoint that holds just that. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.array_names import array_names
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.grid import Grid, Ints
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import Node, array_leaves, map_arrays, path_text, tree_keys
from cloudckpt.plan.changes import Changes
from cloudckpt.plan.overlap import chunk_bounds
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.tree import LeafSpec
from cloudckpt.plan.view import View
from cloudckpt.plan.virtual import VirtualArray, stored_array
from cloudckpt.plan.writes import SavePlan, plan_save


@dataclass(frozen=True, eq=False)
class Rewrite:
    """The new arrays by number: what they are (``leaves``, ``names``), and what each is made of (``arrays``).

    A leaf has another dtype than its array where it is cast. ``tree``: the new one.
    """

    leaves: tuple[LeafSpec, ...]
    names: tuple[str, ...]
    arrays: tuple[VirtualArray, ...]
    chunks: SavePlan
    tree: Node


def plan_rewrite(
    manifest: Manifest, view: View, casts: Mapping[str, str], *, chunk_bytes: int, window_bytes: int | None
) -> Rewrite:
    """``casts``: dtypes by pattern of dotted paths (``fnmatch``), for float tensors; the first that matches counts.

    Arrays that no rule touches keep their chunks. Where those are but runs of bytes in somebody's file, chunks are cut
    anew, so that a window of ``window_bytes`` over them is one run, too, and nothing is read for two windows; None: all
    are more than that, and stay. Raises InvalidStateError for casts that cannot be, or match nothing.
    """
    Changes.of(set(casts.values()), None)  # refuses what is never converted
    numbers: dict[str, int] = {}
    leaves: list[LeafSpec] = []
    arrays: list[VirtualArray] = []
    cuts: list[tuple[Ints, Ints]] = []
    used: set[str] = set()
    for path, node in array_leaves(view.tree):
        if node["array"] in numbers:
            continue
        numbers[node["array"]] = len(numbers)
        array, bounds = _source(manifest, view, node, window_bytes)
        kind = array.dtype
        pattern = _pattern_of(path_text(path), casts)
        if pattern is not None and node["$"] == "tensor" and _is_float(kind):
            used.add(pattern)
            kind = casts[pattern]
        leaves.append(LeafSpec(path_text(path), tree_keys(path), kind, array.shape))
        arrays.append(array)
        cuts.append(bounds)
    idle = [pattern for pattern in casts if pattern not in used]
    if idle:
        raise InvalidStateError(f"cast: no tensor of floats matches {', '.join(map(repr, idle))}")
    names = array_names([leaf.path for leaf in leaves])
    specs = [TensorSpec(leaf.id, leaf.shape, dtype(leaf.dtype).itemsize) for leaf in leaves]
    return Rewrite(
        leaves=tuple(leaves),
        names=tuple(names),
        arrays=tuple(arrays),
        chunks=plan_save(specs, [_table(cuts)], chunk_bytes=chunk_bytes),
        tree=map_arrays(view.tree, lambda node: {**node, "array": names[numbers[node["array"]]]}),
    )


def _source(
    manifest: Manifest, view: View, node: dict[str, Any], window_bytes: int | None
) -> tuple[VirtualArray, tuple[Ints, Ints]]:
    """What an array is made of, and ``(start, end)`` of the boxes whose edges its chunks are to have."""
    number = manifest.array_index.get(node["array"])
    if number is not None:
        entry, grid = manifest.arrays[number], manifest.grids[number]
        # As it is stored: what is flat stays flat, and its leaf goes on telling the shape.
        array = stored_array(number, entry.dtype, entry.shape)
        if not manifest.has_checksums and window_bytes is not None:
            grid = _bands(entry.shape, max(1, window_bytes // dtype(entry.dtype).itemsize))
        return array, chunk_bounds(grid, np.arange(grid.num_chunks))
    array = view.array(node)
    boxes = [part.box for part in array.parts if part.box.num_elements]
    start = np.array([box.offset for box in boxes], dtype=np.int64).reshape(len(boxes), len(array.shape))
    return array, (start, start + np.array([box.shape for box in boxes], dtype=np.int64).reshape(start.shape))


def _bands(shape: tuple[int, ...], max_elements: int) -> Grid:
    """As few boxes as hold so many elements each, one after another in C order, and equally thick if that can be."""
    if 0 in shape:
        return Grid(shape, tuple(max(1, extent) for extent in shape))
    inner = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    dim = next((d for d, size in enumerate(inner) if size <= max_elements), 0)
    cuts = [1 if d < dim else extent for d, extent in enumerate(shape)]
    if shape:
        few = -(-shape[dim] // max(1, max_elements // inner[dim]))
        count = next((n for n in range(few, min(2 * few, shape[dim]) + 1) if shape[dim] % n == 0), few)
        cuts[dim] = -(-shape[dim] // count)
    return Grid(shape, tuple(cuts))


def _pattern_of(text: str, casts: Mapping[str, str]) -> str | None:
    return next((pattern for pattern in casts if pattern == text or fnmatchcase(text, pattern)), None)


def _is_float(name: str) -> bool:
    return name in ("bfloat16", "float16", "float32", "float64") or name.startswith("float8_")


def _table(cuts: Sequence[tuple[Ints, Ints]]) -> PieceTable:
    dims = max((start.shape[1] for start, _ in cuts), default=0)
    rows = [len(start) for start, _ in cuts]
    offset = np.zeros((sum(rows), dims), dtype=np.int64)
    shape = np.ones((sum(rows), dims), dtype=np.int64)
    first = 0
    for start, end in cuts:
        offset[first : first + len(start), : start.shape[1]] = start
        shape[first : first + len(start), : start.shape[1]] = end - start
        first += len(start)
    return PieceTable(np.repeat(np.arange(len(cuts)), rows), offset, shape)
