"""Safetensors files made by hand, so that they can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entry(dtype: str = "F32", shape: Any = (1,), data_offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets), **more}


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """``header``: JSON as text or bytes, or what it is made of. ``length``: what is said of it, if not the truth."""
    text = header if isinstance(header, (str, bytes)) else json.dumps(header)
    encoded = text if isinstance(text, bytes) else text.encode()
    return (len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json", **more: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map, **more}))
    return path
