"""The headers of safetensors files: a length of 8 bytes, little endian, and then JSON.

The rules are those of the official library, and stricter where it lets through what no writer of it makes:
tensors, metadata or fields of one name, and entries in another form than an object with a string as its dtype.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from cloudckpt.errors import FormatError
from cloudckpt.store.base import Store, byte_view

MAX_HEADER_BYTES = 100_000_000
"""The official library refuses longer ones."""

FIRST_READ_BYTES = 128 * 1024
"""Holds the header of most files, with about a thousand tensors: one request then is enough."""

LENGTH_BYTES = 8
METADATA = "__metadata__"
MAX_DEPTH = 126
"""Lists and objects within one another in one entry; the official library counts the header itself, too, up to 127."""

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        **{f"{sign}{bits}": bits for sign in ("I", "U") for bits in (8, 16, 32, 64)},
        **{f"F8_{kind}": 8 for kind in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")},
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "F16": 16,
        "BF16": 16,
        "F32": 32,
        "F64": 64,
        "C64": 64,
    }
)
"""All data types of the format, and the bits of an element."""

_FIELDS = ("dtype", "shape", "data_offsets")
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_UNSIGNED = 2**64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``dtype``: the format's name for it. ``byte_offset``: in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """``tensors``: in the order of their bytes, which fill the rest of the file without a gap."""

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    file_nbytes: int


def read_header(store: Store, key: str, nbytes: int) -> Header:
    """The checked header of a file of ``nbytes``, with one request, or with two where it is very long.

    Raises FormatError naming file and tensor, NotFoundError.
    """
    where = f"{store.url}/{key}"
    first = _fetch(store, key, 0, min(nbytes, FIRST_READ_BYTES))
    end = LENGTH_BYTES + header_length(first, nbytes, where)
    rest = _fetch(store, key, len(first), end - len(first)) if end > len(first) else b""
    return parse_header(first[LENGTH_BYTES:end] + rest, nbytes - end, where)


def _fetch(store: Store, key: str, byte_offset: int, nbytes: int) -> bytes:
    return b"".join(bytes(byte_view(part)) for part in store.stream(key, byte_offset, nbytes))


def header_length(first: bytes, nbytes: int, where: str) -> int:
    """From the first bytes of a file of ``nbytes``. What it returns is safe to read: the file has as much."""
    if nbytes < LENGTH_BYTES:
        raise FormatError(f"{where}: {nbytes} bytes are no safetensors file: its header's length alone takes 8")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"{where}: not a safetensors file: its header would be {length} bytes long, {MAX_HEADER_BYTES} are allowed"
        )
    if length > nbytes - LENGTH_BYTES:
        raise FormatError(f"{where}: cut off: the header has {length} bytes, the whole file {nbytes}")
    return length


def parse_header(data: bytes, data_nbytes: int, where: str) -> Header:
    """Check all there is to check. ``data``: the JSON; ``data_nbytes``: what of the file follows it."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: the header is not UTF-8: {error}") from None
    metadata: Mapping[str, str] | None = None
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, value in _members(text, where):
        shown = f"{where}: tensor {name!r:.200}"
        if name == METADATA:
            if metadata is not None:
                raise FormatError(f"{where}: {METADATA} is given twice")
            metadata = _metadata(value, where)
        elif name in entries:
            raise FormatError(f"{shown} is listed twice")
        else:
            entries[name] = _entry(value, shown)
    order = sorted(entries.items(), key=lambda item: item[1][2:])
    header_end = LENGTH_BYTES + len(data)
    tensors = tuple(
        StoredTensor(name, dtype, shape, header_end + start, stop - start)
        for name, (dtype, shape, start, stop) in order
    )
    _check_tiling(tensors, header_end, header_end + data_nbytes, where)
    return Header(tensors, metadata or {}, header_end + data_nbytes)


def _members(text: str, where: str) -> Iterator[tuple[str, Any]]:
    """What the object has, one after another: a header of millions of values is never held as Python's objects."""
    may_be_broken = _SURROGATE.search(text) is not None
    name = ""
    at = _skip(text, 0)
    if not text.startswith("{", at):
        raise FormatError(f"{where}: the header is not a JSON object")
    at = _skip(text, at + 1)
    if not text.startswith("}", at):
        at -= 1
        while True:
            try:
                name, at = _pair_start(text, _skip(text, at + 1))
                value, at = _DECODER.raw_decode(text, at)
                if may_be_broken:  # half a surrogate pair is no text
                    json.dumps([name, value], ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                after = f" after {name!r:.200}" if name else ""
                raise FormatError(f"{where}: the header is not valid JSON{after}: {error}") from None
            yield name, value
            at = _skip(text, at)
            if not text.startswith(",", at):
                break
    if not text.startswith("}", at) or _skip(text, at + 1) < len(text):
        raise FormatError(f"{where}: the header is not valid JSON: unexpected text at character {at}")


def _pair_start(text: str, at: int) -> tuple[str, int]:
    """A name, and where its value begins."""
    if not text.startswith('"', at):
        raise ValueError(f"no name at character {at}")
    name, at = _DECODER.raw_decode(text, at)
    at = _skip(text, at)
    if not text.startswith(":", at):
        raise ValueError(f"no ':' at character {at}")
    return name, _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one name twice")
    return found


def _integer(text: str) -> int | float:
    """As Rust's parser reads them: what does not fit 64 bits, and a negative zero, are floats."""
    return _float(text) if text == "-0" or len(text) > len(str(_UNSIGNED)) else int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is out of range")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_no_number
)


def _metadata(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormatError(f"{where}: {METADATA} must be an object of strings")
    return value


def _entry(value: Any, shown: str) -> tuple[str, tuple[int, ...], int, int]:
    """The dtype, the shape, and where its bytes begin and end."""
    if not isinstance(value, dict):
        raise FormatError(f"{shown} must be an object with dtype, shape and data_offsets")
    if missing := [field for field in _FIELDS if field not in value]:
        raise FormatError(f"{shown} has no {', '.join(missing)}")
    dtype, shape, offsets = (value[field] for field in _FIELDS)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(f"{shown} has an unknown dtype {_short(dtype)}; known are {', '.join(sorted(DTYPE_BITS))}")
    if not _is_sizes(shape):
        raise FormatError(f"{shown}: its shape must be a list of sizes, not {_short(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise FormatError(f"{shown}: its data_offsets must be two sizes, not {_short(offsets)}")
    if len(value) > len(_FIELDS) and not _is_shallow(value):
        raise FormatError(f"{shown} is nested more than {MAX_DEPTH} levels deep")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _UNSIGNED for size in value)


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return True
    return False


def _short(value: Any) -> str:
    """Of a value that may be of any size and depth."""
    if isinstance(value, list):
        shown = [_short(item) if not isinstance(item, list) else "[...]" for item in value[:8]]
        return f"[{', '.join(shown)}{', ...' if len(value) > 8 else ''}]"
    return "{...}" if isinstance(value, dict) else f"{value!r:.100}"


def _check_tiling(tensors: tuple[StoredTensor, ...], start: int, end: int, where: str) -> None:
    """Whether they fill the bytes of the file from ``start`` to ``end``, each with its own size."""
    before = ""
    for tensor in tensors:
        shown = f"{where}: tensor {tensor.name!r:.200}"
        if tensor.nbytes < 0:
            raise FormatError(f"{shown} ends {-tensor.nbytes} bytes before it begins")
        if tensor.byte_offset < start:
            raise FormatError(f"{shown} overlaps {before}, by {start - tensor.byte_offset} bytes")
        if tensor.byte_offset > start:
            raise FormatError(f"{shown}: the {tensor.byte_offset - start} bytes before it belong to no tensor")
        nbytes = _nbytes(tensor, shown)
        if nbytes != tensor.nbytes:
            shape = _short(list(tensor.shape))
            raise FormatError(f"{shown} of {tensor.dtype} {shape} takes {nbytes} bytes, its offsets {tensor.nbytes}")
        start += nbytes
        if start > end:
            raise FormatError(f"{shown} ends at byte {start}, the file at {end}: it is cut off")
        before = f"tensor {tensor.name!r:.200}"
    if start != end:
        raise FormatError(f"{where}: the {end - start} bytes at its end belong to no tensor")


def _nbytes(tensor: StoredTensor, shown: str) -> int:
    """Counted as the official library does: an overflow on the way is one, even where a zero follows."""
    bits = DTYPE_BITS[tensor.dtype]
    num_elements = 1
    for extent in tensor.shape:
        num_elements *= extent
        if num_elements >= _UNSIGNED:
            break
    if num_elements * bits >= _UNSIGNED:
        raise FormatError(f"{shown}: the shape {_short(list(tensor.shape))} is of more bytes than 64 bits can count")
    if num_elements * bits % 8:
        raise FormatError(f"{shown}: {num_elements} elements of {bits} bits do not end at a byte")
    return num_elements * bits // 8
