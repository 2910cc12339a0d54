"""Archives as ``torch.save`` writes them for one tensor, as bytes around the tensor's own: for streams.

Stored records, in the order of torch's writer, the payload at a multiple of 64. The checksum of the payload is in what
follows it. `torch.load` reads them with ``weights_only=True``, in every release since 1.6.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from cloudckpt.format.dtypes import dtype
from cloudckpt.interop.torch_tensors import STORAGES
from cloudckpt.plan.flat import c_strides

MAX_PAYLOAD_BYTES = 2**32 - 2**16
"""Beyond that ZIP needs other headers."""

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_DESCRIPTOR = struct.Struct("<4s3L")
_PADDING = struct.Struct("<2sH")
_UTF8, _DESCRIBED = 0x0800, 0x0008
_ALIGNMENT = 64
_DATE = 33  # 1980-01-01, the earliest there is
_TYPES = {name: f"{prefix}Storage" for prefix, name in STORAGES.items()}


@dataclass(frozen=True, slots=True)
class _Written:
    name: bytes
    flags: int
    crc: int
    nbytes: int
    header_offset: int

    def entry(self) -> bytes:
        numbers = (self.flags, 0, 0, _DATE, self.crc, self.nbytes, self.nbytes, len(self.name))
        return _ENTRY.pack(b"PK\x01\x02", 0, 0, *numbers, 0, 0, 0, 0, 0, self.header_offset) + self.name


@dataclass(frozen=True)
class Frame:
    """What stands before the ``nbytes`` of a tensor, and, given their CRC-32, behind them. ``total_bytes``: of all."""

    front: bytes
    nbytes: int
    total_bytes: int
    _records: tuple[_Written, ...]

    def tail(self, crc: int) -> bytes:
        return _tail(self._records, len(self.front), self.nbytes, crc)


def frame(kind: str, shape: tuple[int, ...]) -> Frame:
    """Of a tensor of torch's dtype ``kind`` in C order, of at most `MAX_PAYLOAD_BYTES`."""
    count = 1
    for extent in shape:
        count *= extent
    nbytes = count * dtype(kind).itemsize
    front = bytearray()
    records = []
    for name, data in ((b"archive/data.pkl", _pickled(kind, shape, count)), (b"archive/byteorder", b"little")):
        records.append(_Written(name, _UTF8, zlib.crc32(data), len(data), len(front)))
        front += _header(records[-1], b"") + data
    name = b"archive/data/0"
    at = len(front)
    records.append(_Written(name, _UTF8 | (_DESCRIBED if nbytes else 0), 0, nbytes, at))
    shortest = at + _LOCAL.size + len(name) + _PADDING.size
    padding = -shortest % _ALIGNMENT
    front += _header(records[-1], _PADDING.pack(b"FB", padding) + b"Z" * padding)
    end = len(_tail(tuple(records), len(front), nbytes, 0))
    return Frame(bytes(front), nbytes, len(front) + nbytes + end, tuple(records))


def _header(record: _Written, extra: bytes) -> bytes:
    later = record.flags & _DESCRIBED
    crc, nbytes = (0, 0) if later else (record.crc, record.nbytes)
    fixed = _LOCAL.pack(b"PK\x03\x04", 0, record.flags, 0, 0, _DATE, crc, nbytes, nbytes, len(record.name), len(extra))
    return fixed + record.name + extra


def _tail(records: tuple[_Written, ...], front_bytes: int, nbytes: int, crc: int) -> bytes:
    data = bytearray(_DESCRIPTOR.pack(b"PK\x07\x08", crc, nbytes, nbytes) if nbytes else b"")
    *before, payload = records
    payload = _Written(payload.name, payload.flags, crc, payload.nbytes, payload.header_offset)
    version = b"3\n"
    last = _Written(b"archive/version", _UTF8, zlib.crc32(version), len(version), front_bytes + nbytes + len(data))
    data += _header(last, b"") + version
    start = front_bytes + nbytes + len(data)
    entries = b"".join(record.entry() for record in (*before, payload, last))
    data += entries + _END.pack(b"PK\x05\x06", 0, 0, len(records) + 1, len(records) + 1, len(entries), start, 0)
    return bytes(data)


class _Storage:
    """Stands for the storage, which is named by a persistent id."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args


class _Tensor:
    def __init__(self, kind: str, shape: tuple[int, ...], count: int) -> None:
        self.kind, self.shape, self.count = kind, shape, count

    def __reduce__(self) -> tuple[Any, ...]:
        place: tuple[Any, ...] = (0, self.shape, c_strides(self.shape), False, OrderedDict())
        if self.kind in _TYPES:
            storage = _Storage(("storage", getattr(torch, _TYPES[self.kind]), "0", "cpu", self.count))
            return torch._utils._rebuild_tensor_v2, (storage, *place)
        nbytes = self.count * dtype(self.kind).itemsize
        storage = _Storage(("storage", torch.storage.UntypedStorage, "0", "cpu", nbytes))
        return torch._utils._rebuild_tensor_v3, (storage, *place, getattr(torch, self.kind))


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.args if type(obj) is _Storage else None


def _pickled(kind: str, shape: tuple[int, ...], count: int) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Tensor(kind, shape, count))
    return buffer.getvalue()
