"""What must be true of a manifest before later code may rely on it. All raise FormatError.

In the order in which `decode_manifest` asks, each relies on those before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cloudckpt.errors import FormatError
from cloudckpt.format.array_names import check_name
from cloudckpt.format.codec import DIGEST_BYTES
from cloudckpt.format.document import COLUMNS, MAX_BYTES, MAX_DIMS, ArrayEntry, ChunkColumns, ChunkTable, Document
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.grid import EncodedCuts, Grid
from cloudckpt.format.keys import MAX_STEP, check_key, is_of_attempt
from cloudckpt.format.tree import MAX_RANKS, array_leaves, children, path_text, per_rank_leaves, values_by_rank
from cloudckpt.format.values import MAX_DEPTH


def check_numbers(document: Document) -> None:
    if not 1 <= document.world_size <= MAX_RANKS:
        raise FormatError(f"impossible world size {_shown(document.world_size)}")
    if document.step is not None and not 0 <= document.step <= MAX_STEP:
        raise FormatError(f"impossible step {_shown(document.step)}")
    if not 0 <= document.branch <= MAX_STEP:
        raise FormatError(f"impossible branch {_shown(document.branch)}")
    if any(not 0 <= extent < MAX_BYTES for mesh in document.meshes for extent in mesh.shape):
        raise FormatError("impossible shape of a mesh")


def _shown(number: int) -> str:
    """Of any size: Python refuses to print what has more than 4300 decimal digits."""
    return str(number) if number.bit_length() <= 64 else f"of {number.bit_length()} bits"


def check_table(table: ChunkTable) -> None:
    for name, kind in COLUMNS:
        if len(getattr(table, name)) != table.count * np.dtype(kind).itemsize:
            raise FormatError(f"chunk table: column {name!r} does not hold {table.count} rows")
    if table.digest is not None and len(table.digest) != table.count * DIGEST_BYTES:
        raise FormatError(f"chunk table: column 'digest' does not hold {table.count} rows")


def check_objects(document: Document, columns: ChunkColumns) -> None:
    keys = set()
    for entry in document.objects:
        check_key(entry.key)
        if entry.key in keys:
            raise FormatError(f"object {entry.key!r} is listed twice")
        if not 0 <= entry.nbytes < MAX_BYTES or not 0 <= entry.crc32c < 2**32:
            raise FormatError(f"object {entry.key!r}: impossible size or checksum")
        # Other attempts may have had more ranks: those of siblings, and one that this replaced, whose objects it keeps.
        is_new = is_of_attempt(entry.key, document.attempt)
        if not 0 <= entry.rank < (document.world_size if is_new else MAX_RANKS):
            raise FormatError(f"object {entry.key!r}: impossible rank {_shown(entry.rank)}")
        keys.add(entry.key)
    if not len(columns):
        return
    if int(columns.object.max()) >= len(document.objects):
        raise FormatError("chunk table: a chunk lies in an object that is not listed")
    if int(columns.byte_offset.min()) < 0:
        raise FormatError("chunk table: a byte offset does not fit 63 bits")
    sizes = np.array([o.nbytes for o in document.objects], dtype=np.int64)[columns.object]
    outside = np.nonzero((columns.byte_offset > sizes) | (columns.nbytes > sizes - columns.byte_offset))[0]
    if len(outside):
        chunk = int(outside[0])
        key = document.objects[int(columns.object[chunk])].key
        raise FormatError(f"chunk table: chunk {chunk} ends behind the end of object {key!r}")
    _check_overlaps(document, columns)


def _check_overlaps(document: Document, columns: ChunkColumns) -> None:
    """What all chunks claim together must not be more than what is stored: no bytes serve twice."""
    order = np.lexsort((columns.byte_offset, columns.object))
    holder, start = columns.object[order], columns.byte_offset[order]
    end = start + columns.nbytes[order]
    overlaps = np.nonzero((holder[1:] == holder[:-1]) & (start[1:] < end[:-1]))[0]
    if len(overlaps):
        first, second = sorted(order[overlaps[0] : overlaps[0] + 2].tolist())
        key = document.objects[int(holder[overlaps[0]])].key
        raise FormatError(f"chunk table: chunks {first} and {second} overlap in object {key!r}")


def check_arrays(arrays: Sequence[ArrayEntry]) -> None:
    if len({entry.name.lower() for entry in arrays}) != len(arrays):
        raise FormatError("two arrays have one name")
    for entry in arrays:
        check_name(entry.name)
        if len(entry.shape) > MAX_DIMS:
            raise FormatError(f"array {entry.name!r}: {len(entry.shape)} dims; more than {MAX_DIMS} cannot be read")
        if entry.compression not in (None, "zstd"):
            raise FormatError(f"array {entry.name!r}: unknown compression {entry.compression!r}")
        if (
            any(not 0 <= s < MAX_BYTES for s in entry.shape)
            or math.prod(entry.shape) * dtype(entry.dtype).itemsize >= MAX_BYTES
        ):
            raise FormatError(f"array {entry.name!r}: impossible shape [{', '.join(map(_shown, entry.shape))}]")
        if any(_largest(cuts) >= MAX_BYTES for cuts in entry.grid):
            raise FormatError(f"array {entry.name!r}: impossible grid")


def check_chunks(document: Document, columns: ChunkColumns, grids: Sequence[Grid]) -> None:
    next_chunk = 0
    for entry, grid in zip(document.arrays, grids, strict=True):
        if entry.first_chunk != next_chunk:
            raise FormatError(f"array {entry.name!r}: its chunks do not follow those of the array before it")
        next_chunk += grid.num_chunks
        if next_chunk > document.chunks.count:
            raise FormatError(f"array {entry.name!r}: the chunk table ends before its chunks do")
        _check_chunk_sizes(entry, columns, grid)
    if next_chunk != document.chunks.count:
        raise FormatError(f"the arrays have {next_chunk} chunks, the chunk table {document.chunks.count}")


def _largest(cuts: EncodedCuts) -> int:
    if isinstance(cuts, int):
        return cuts
    return max((n for run in cuts for n in ((run,) if isinstance(run, int) else run)), default=0)


def _check_chunk_sizes(entry: ArrayEntry, columns: ChunkColumns, grid: Grid) -> None:
    """What a chunk claims to unpack to must be in proportion to what is stored: no bombs, no short reads."""
    if not grid.num_chunks:
        return
    stored = columns.nbytes[entry.first_chunk : entry.first_chunk + grid.num_chunks] - 4
    if int(stored.min()) < 0:
        raise FormatError(f"array {entry.name!r}: the stored bytes of a chunk do not even hold its checksum")
    if math.prod(float(c if isinstance(c, int) else max(c, default=1)) for c in grid.cuts) > 2**31:
        raise FormatError(f"array {entry.name!r}: its chunks are larger than 2 GiB")
    full = grid.stored_elements * dtype(entry.dtype).itemsize
    if int(full.max()) > 2**31:
        raise FormatError(f"array {entry.name!r}: its chunks are larger than 2 GiB")
    if entry.compression is None and not (stored == full).all():
        raise FormatError(f"array {entry.name!r}: stored bytes of a chunk differ from its size in the grid")


def check_tree(document: Document) -> None:
    _check_depth(document.tree)
    names = {entry.name for entry in document.arrays}
    for path, node in array_leaves(document.tree):
        if not isinstance(node["array"], str) or node["array"] not in names:
            raise FormatError(
                f"the tree refers to an array {node['array']!r} at {path_text(path)!r} that is not listed"
            )
    for path, node in per_rank_leaves(document.tree):
        if max(values_by_rank(node), default=0) >= document.world_size:
            raise FormatError(f"{path_text(path)!r}: a per-rank value of a rank beyond the world size")


def _check_depth(tree: Any) -> None:
    """What walks a tree later may do so by recursion."""
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        level = [child for node in level for _, child in children(node) or ()]
        if not level:
            return
    raise FormatError(f"the tree is nested more than {MAX_DEPTH} levels deep")
