"""``cloudckpt show``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from cloudckpt.checkpoint import ArrayInfo, Checkpoint, open_checkpoint
from cloudckpt.cli.text import human_bytes, printable, shortened, table
from cloudckpt.format.grid import Grid
from cloudckpt.format.keys import split_key
from cloudckpt.format.tree import array_leaves, path_text

MAX_VALUE_WIDTH = 60


def show_checkpoint(url: str, storage_options: Mapping[str, Any] | None, *, as_json: bool) -> None:
    with open_checkpoint(url, storage_options=storage_options) as checkpoint:
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(_everything(checkpoint)), indent=2).decode())
        else:
            print(*_lines(checkpoint), sep="\n")


def _lines(checkpoint: Checkpoint) -> Iterator[str]:
    document = checkpoint.manifest.document
    yield f"url        {printable(checkpoint.url)}"
    yield f"step       {document.step}"
    yield f"committed  {printable(document.created)} by {printable(document.writer)}, commit id {document.commit_id}"
    yield f"format     {document.version}, layout {printable(document.layout)}"
    yield f"ranks      {document.world_size}{''.join(f', mesh {m}' for m in _meshes(checkpoint))}"
    yield f"stored     {human_bytes(checkpoint.manifest.nbytes)} in {document.chunks.count} chunks"
    if not checkpoint.manifest.is_new.all():
        yield from _new_and_referenced(checkpoint)
    if document.model_version is not None:
        yield f"model      version {printable(document.model_version)}"
    if checkpoint.metadata:
        yield f"metadata   {printable(repr(checkpoint.metadata))}"
    yield ""
    yield from table(("tensor", "type", "shape", "chunks", "stored"), list(_array_rows(checkpoint)), right="4")
    yield ""
    yield from table(("value", ""), list(_value_rows(checkpoint)))
    yield ""
    rows = [[str(row[key]) for key in _RANK_COLUMNS] for row in _ranks(checkpoint)]
    yield from table(("rank", "tensors", "chunks", "chunk bytes", "objects", "object bytes"), rows, right="012345")


def _new_and_referenced(checkpoint: Checkpoint) -> Iterator[str]:
    manifest = checkpoint.manifest
    yield f"new        {human_bytes(manifest.nbytes_new)}"
    for step_dir, nbytes in _referenced(checkpoint).items():
        yield f"referenced {human_bytes(nbytes)} in {step_dir}"


def _referenced(checkpoint: Checkpoint) -> dict[str, int]:
    """Stored bytes of the chunks that earlier saves wrote, by step directory ("." for the checkpoint's own)."""
    manifest = checkpoint.manifest
    held = np.bincount(manifest.columns.object, manifest.columns.nbytes, minlength=len(manifest.objects))
    found: dict[str, int] = {}
    for entry, is_new, nbytes in zip(manifest.objects, manifest.is_new, held.tolist(), strict=True):
        if not is_new:
            step_dir = split_key(entry.key)[0] or "."
            found[step_dir] = found.get(step_dir, 0) + int(nbytes)
    return found


def _meshes(checkpoint: Checkpoint) -> list[str]:
    return [
        " x ".join(map(str, mesh.shape)) + (f" ({printable(', '.join(mesh.dim_names))})" if mesh.dim_names else "")
        for mesh in checkpoint.manifest.document.meshes
    ]


def _array_rows(checkpoint: Checkpoint) -> Iterator[list[str]]:
    seen: dict[str, str] = {}
    for path, node in array_leaves(checkpoint.manifest.document.tree):
        info = checkpoint.arrays[node["array"]]
        text = path_text(path)
        if info.name in seen:
            yield [text, "same as", seen[info.name], "", ""]
            continue
        seen[info.name] = text
        kind = info.dtype if node["$"] == "tensor" else f"numpy {node.get('numpy')}"
        shape = list(info.shape) if node["$"] == "tensor" else node.get("shape")
        yield [text, kind, shortened(str(shape), MAX_VALUE_WIDTH), _grid_text(info), human_bytes(info.nbytes)]


def _grid_text(info: ArrayInfo) -> str:
    """``4 x 2 of [256, 512]``, and ``~`` where chunks differ in size."""
    grid: Grid = info.grid
    sizes = [str(c) if isinstance(c, int) else f"~{max(c, default=0)}" for c in grid.cuts]
    packed = f", {info.compression}" if info.compression else ""
    return f"{' x '.join(map(str, grid.counts)) or '1'} of [{', '.join(sizes)}]{packed}"


def _value_rows(checkpoint: Checkpoint) -> Iterator[list[str]]:
    for path, value in _values(checkpoint.tree, ()):
        yield [".".join(path), shortened(_text(value), MAX_VALUE_WIDTH)]


def _text(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an int with more digits than Python prints
        return f"<{type(value).__name__} with a number of over 4300 digits>"


def _values(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What is no array, by dotted path; a sequence without arrays is one value."""
    if isinstance(value, ArrayInfo):
        return
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _values(item, (*path, key if isinstance(key, str) else repr(key)))
    elif isinstance(value, (list, tuple)) and any(
        isinstance(item, (ArrayInfo, Mapping, list, tuple)) for item in value
    ):
        for i, item in enumerate(value):
            yield from _values(item, (*path, str(i)))
    else:
        yield path, value


_RANK_COLUMNS = ("rank", "num_tensors", "num_chunks", "chunk_bytes", "num_objects", "object_bytes")


def _ranks(checkpoint: Checkpoint) -> list[dict[str, int]]:
    """Who wrote what of the new objects."""
    manifest = checkpoint.manifest
    columns = manifest.columns
    ranks = [entry.rank if new else -1 for entry, new in zip(manifest.objects, manifest.is_new, strict=True)]
    writer = np.array(ranks, dtype=np.int64)
    sizes = np.array([entry.nbytes for entry in manifest.objects], dtype=np.int64)
    chunk_writer = writer[columns.object]
    arrays = np.searchsorted(manifest.first_chunks, np.arange(len(columns)), side="right")
    rows = []
    for rank in np.unique(writer[manifest.is_new]).tolist():
        chunks = chunk_writer == rank
        numbers = (
            rank,
            len(np.unique(arrays[chunks])),
            int(chunks.sum()),
            int(columns.nbytes[chunks].sum()),
            int((writer == rank).sum()),
            int(sizes[writer == rank].sum()),
        )
        rows.append(dict(zip(_RANK_COLUMNS, numbers, strict=True)))
    return rows


def _everything(checkpoint: Checkpoint) -> dict[str, Any]:
    document = checkpoint.manifest.document
    about = ("step", "branch", "model_version", "topology")
    fields = (*about, "version", "commit_id", "attempt", "created", "writer", "layout", "world_size")
    return {
        "url": checkpoint.url,
        **{name: getattr(document, name) for name in fields},
        "nbytes": checkpoint.manifest.nbytes,
        "nbytes_new": checkpoint.manifest.nbytes_new,
        "nbytes_referenced": _referenced(checkpoint),
        "num_chunks": document.chunks.count,
        "meshes": document.meshes,
        "metadata": document.metadata,
        "tree": document.tree,
        "arrays": [_array(info) for info in checkpoint.arrays.values()],
        "objects": document.objects,
        "ranks": _ranks(checkpoint),
    }


def _array(info: ArrayInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "path": info.path,
        "dtype": info.dtype,
        "shape": info.shape,
        "grid": info.grid.encode(),
        "num_chunks": info.grid.num_chunks,
        "compression": info.compression,
        "nbytes": info.nbytes,
    }
