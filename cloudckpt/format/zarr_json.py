"""The zarr v3 documents of a group and of an array."""

from __future__ import annotations

from typing import Any

import msgspec

from cloudckpt.format.codec import ZSTD_LEVEL
from cloudckpt.format.dtypes import dtype, fill_value
from cloudckpt.format.grid import Grid

Document = dict[str, Any]


def group_document() -> Document:
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def array_document(dtype_name: str, grid: Grid, compression: str | None) -> Document:
    """``grid`` is in elements of the tensor; types without a zarr name become bytes (docs/format.md)."""
    kind = dtype(dtype_name)
    cuts = list(grid.encode())
    shape = list(grid.shape)
    attributes: Document = {}
    if kind.zarr_name is None:
        attributes["cloudckpt_dtype"] = kind.name
        if kind.itemsize > 1:
            shape.append(kind.itemsize)
            cuts.append(kind.itemsize)
    chunk_grid: Document = (
        {"name": "regular", "configuration": {"chunk_shape": cuts}}
        if grid.is_regular
        else {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": cuts}}
    )
    byte_order: Document = {"name": "bytes"}
    if kind.itemsize > 1 and kind.zarr_name is not None:
        byte_order["configuration"] = {"endian": "little"}
    codecs: list[Document] = [byte_order]
    if compression is not None:
        codecs.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}})
    codecs.append({"name": "crc32c"})
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": kind.zarr_name or "uint8",
        "chunk_grid": chunk_grid,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value(kind),
        "codecs": codecs,
        "attributes": attributes,
    }


def encode_document(document: Document) -> bytes:
    return msgspec.json.encode(document)
