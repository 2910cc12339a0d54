"""Packs: ZIP containers of stored chunks, written front to back, each one a zarr v3 store.

Only the framing is made here; who writes the bytes where is the caller's affair. ``zipfile`` is not
used since it computes CRC-32 with zlib (3 GiB/s against 40) and copies every payload.
Layout after PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 to 4.3.16.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from isal import isal_zlib

ALIGNMENT = 64
"""Payloads start at multiples of a cache line, so that a mapped pack can be used in place."""

_STORED, _DEFLATED = 0, 8
_DOS_DATE = 0x21  # 1980-01-01: packs of equal content are equal
_PADDING_ID = 0xD935  # the extra field that Android's zipalign pads with
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True)
class _Entry:
    name: bytes
    method: int
    crc32: int
    stored_bytes: int
    full_bytes: int
    header_offset: int


class PackBuilder:
    """Frames entries in order. ``nbytes`` is the length of the pack so far."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._entries: list[_Entry] = []

    def begin_stored(self, name: str, nbytes: int, crc32: int) -> bytes:
        """The header that goes before a stored payload; ``self.nbytes`` is then the end of that payload."""
        return self._begin(_Entry(name.encode("ascii"), _STORED, crc32, nbytes, nbytes, self.nbytes), ALIGNMENT)

    def deflated(self, name: str, data: bytes) -> bytes:
        """A whole small entry, compressed."""
        packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        payload = packer.compress(data) + packer.flush()
        entry = _Entry(name.encode("ascii"), _DEFLATED, isal_zlib.crc32(data), len(payload), len(data), self.nbytes)
        return self._begin(entry, 1) + payload

    def _begin(self, entry: _Entry, alignment: int) -> bytes:
        fixed = self.nbytes + _LOCAL.size + len(entry.name)
        padding = -fixed % alignment
        # An extra field has a header of four bytes, and TensorStore refuses one without content.
        if 0 < padding < 5:
            padding += alignment
        extra = struct.pack("<2H", _PADDING_ID, padding - 4) + bytes(padding - 4) if padding else b""
        header = _LOCAL.pack(
            b"PK\x03\x04", 20, 0, entry.method, 0, _DOS_DATE,
            entry.crc32, entry.stored_bytes, entry.full_bytes, len(entry.name), len(extra),
        )  # fmt: skip
        self._entries.append(entry)
        self.nbytes = fixed + padding + entry.stored_bytes
        return header + entry.name + extra

    def finish(self) -> bytes:
        """The central directory; nothing may follow it."""
        start = self.nbytes
        directory = b"".join(_central(entry) for entry in self._entries)
        count, size = len(self._entries), len(directory)
        tail = b""
        if count > _MAX16 - 1 or start > _MAX32 - 1 or size > _MAX32 - 1:
            tail = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
            tail += _LOCATOR64.pack(b"PK\x06\x07", 0, start + size, 1)
            count, size, start = min(count, _MAX16), min(size, _MAX32), min(start, _MAX32)
        tail += _END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0)
        self.nbytes += len(directory) + len(tail)
        return directory + tail


def _central(entry: _Entry) -> bytes:
    extra, offset, version = b"", entry.header_offset, 20
    if offset >= _MAX32:
        extra, offset, version = struct.pack("<2HQ", 1, 8, entry.header_offset), _MAX32, 45
    mode = 0o100644 << 16
    made_by = (3 << 8) | version  # Unix, so that the mode is understood
    head = _CENTRAL.pack(
        b"PK\x01\x02", made_by, version, 0, entry.method, 0, _DOS_DATE, entry.crc32, entry.stored_bytes,
        entry.full_bytes, len(entry.name), len(extra), 0, 0, 0, mode, offset,
    )  # fmt: skip
    return head + entry.name + extra
