"""The headers of safetensors files, byte for byte as the official library writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.dtypes import dtype
from cloudckpt.interop.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, METADATA

_PACKED = "float4_e2m1fn_x2"
"""Two elements of the format in one of torch's, along the last dim."""

DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "uint64": "U64",
        "int64": "I64",
        "float64": "F64",
        "complex64": "C64",
        "float32": "F32",
        "uint32": "U32",
        "int32": "I32",
        "bfloat16": "BF16",
        "float16": "F16",
        "uint16": "U16",
        "int16": "I16",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int8": "I8",
        "uint8": "U8",
        _PACKED: "F4",
        "bool": "BOOL",
    }
)
"""From torch's names to those of the format, in the order in which tensors of these types stand in a file."""

_RANK = {name: rank for rank, name in enumerate(DTYPE_NAMES)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; ``dtype`` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        nbytes = dtype(self.dtype).itemsize
        for extent in self.shape:
            nbytes *= extent
        return nbytes


def has_dtype(name: str, shape: Sequence[int]) -> bool:
    """Whether the format can tell of such a tensor."""
    return name in DTYPE_NAMES and (name != _PACKED or len(shape) > 0)


def in_file_order(entries: Sequence[Entry]) -> list[int]:
    """Numbers of the entries as they stand in a file: by type, so that all are aligned, then by name."""
    return sorted(range(len(entries)), key=lambda i: (_RANK[entries[i].dtype], entries[i].name.encode()))


def encode_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file, padded to 8. ``entries``: in the order of their bytes.

    Raises InvalidStateError where there are too many.
    """
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        shape = list(entry.shape)
        if entry.dtype == _PACKED:
            shape[-1] *= 2
        header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidStateError(
            f"{len(entries)} tensors make a header of {len(text)} bytes, and readers take {MAX_HEADER_BYTES} at most: "
            "ask for smaller files with max_shard_bytes"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
