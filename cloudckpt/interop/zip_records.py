"""Where the records of a ZIP archive lie, found with one or two small reads from its end.

See PKWARE's APPNOTE.TXT: the names of the fields are those of its sections 4.3.7 to 4.3.16.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cloudckpt.errors import FormatError
from cloudckpt.interop.ranges import Part

TAIL_BYTES = 1024
"""What is read of an archive's end at first: the directory of an archive of one tensor is smaller."""
MAX_DIRECTORY_BYTES = 256 * 1024 * 1024

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_NO_16, _NO_32 = 0xFFFF, 0xFFFFFFFF
_MAX_COMMENT = 65535
_DESCRIBED = 0x0008
_DESCRIPTOR_SIZES = (16, 24)
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Record:
    """``header_offset``: of the local header, in the archive; its payload is somewhere behind it.

    ``is_torchs``: the entry is as torch's writer makes it, so that its padding is known, too.
    """

    name: str
    nbytes: int
    header_offset: int
    next_offset: int
    is_torchs: bool


def read_directory(part: Part, where: str) -> dict[str, Record]:
    """The records by name. FormatError for what is no ZIP archive of stored records, whole to its end."""
    start, size, count = _directory(part, where)
    if size > MAX_DIRECTORY_BYTES or start + size > part.nbytes:
        raise FormatError(f"{where}: the directory of the ZIP archive is malformed")
    found = list(_entries(part.read(start, start + size), count, where))
    ends = sorted({record.header_offset for record in found} | {start})
    following = dict(itertools.pairwise(ends))
    records: dict[str, Record] = {}
    for record in found:
        if record.name in records:
            raise FormatError(f"{where}: record {record.name!r:.200} is in the ZIP archive twice")
        if record.header_offset + _LOCAL.size + record.nbytes > start:
            raise FormatError(f"{where}: record {record.name!r:.200} reaches into the directory of the ZIP archive")
        records[record.name] = replace(record, next_offset=following[record.header_offset])
    return records


def payload_offset(part: Part, record: Record, where: str) -> int:
    """Where the record's bytes begin, in the archive; without a read where torch's own padding tells."""
    start = _padded_offset(record)
    if record.is_torchs and record.nbytes and record.next_offset - record.nbytes - start in _DESCRIPTOR_SIZES:
        return start
    header = part.read(record.header_offset, record.header_offset + _LOCAL.size)
    if len(header) != _LOCAL.size or header[:4] != b"PK\x03\x04":
        raise FormatError(f"{where}: record {record.name!r:.200} has no header in the ZIP archive")
    *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
    start = record.header_offset + _LOCAL.size + name_bytes + extra_bytes
    if start + record.nbytes > record.next_offset:
        raise FormatError(f"{where}: record {record.name!r:.200} reaches into the next one in the ZIP archive")
    return int(start)


def _padded_offset(record: Record) -> int:
    """Where torch's writer puts the payload: at the next multiple of 64 behind the shortest possible header."""
    start = record.header_offset + _LOCAL.size + len(record.name.encode()) + 4
    if record.nbytes >= _NO_32 or record.header_offset >= _NO_32:
        start += 4 + 8 * (record.nbytes >= _NO_32) + 8 * (record.header_offset >= _NO_32)
    return -(-start // _ALIGNMENT) * _ALIGNMENT


def _directory(part: Part, where: str) -> tuple[int, int, int]:
    """``(offset, size, number of entries)`` of the central directory."""
    tail = part.read(part.nbytes - TAIL_BYTES, part.nbytes)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 and part.nbytes > TAIL_BYTES:
        tail = part.read(part.nbytes - _MAX_COMMENT - TAIL_BYTES, part.nbytes)
        at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + _END.size:
        raise FormatError(f"{where}: not a ZIP archive, or cut off")
    _, disk, _, _, count, size, start, _ = _END.unpack_from(tail, at)
    if disk not in (0, _NO_16):
        raise FormatError(f"{where}: a ZIP archive in several files")
    if _NO_16 not in (count, disk) and _NO_32 not in (size, start):
        return start, size, count
    locator = tail[at - _END64_LOCATOR.size : at] if at >= _END64_LOCATOR.size else b""
    if locator[:4] != b"PK\x06\x07":
        raise FormatError(f"{where}: the ZIP64 archive is cut off")
    _, _, end64, _ = _END64_LOCATOR.unpack(locator)
    raw = part.read(end64, end64 + _END64.size)
    if len(raw) != _END64.size or raw[:4] != b"PK\x06\x06":
        raise FormatError(f"{where}: the ZIP64 archive is cut off")
    *_, count, size, start = _END64.unpack(raw)
    return start, size, count


def _entries(raw: bytes, count: int, where: str) -> Iterator[Record]:
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(raw) or raw[at : at + 4] != b"PK\x01\x02":
            raise FormatError(f"{where}: the directory of the ZIP archive is malformed")
        entry = _ENTRY.unpack_from(raw, at)
        made_by, flags, method = entry[1], entry[3], entry[4]
        packed, nbytes, name_bytes, extra_bytes, comment_bytes = entry[8:13]
        header_offset = entry[16]
        at += _ENTRY.size
        try:
            name = raw[at : at + name_bytes].decode()
        except UnicodeDecodeError:
            raise FormatError(f"{where}: a record of the ZIP archive has a name that is not UTF-8") from None
        extra = raw[at + name_bytes : at + name_bytes + extra_bytes]
        nbytes, packed, header_offset = _wide(extra, nbytes, packed, header_offset, where)
        at += name_bytes + extra_bytes + comment_bytes
        if method or flags & 1 or packed != nbytes:
            raise FormatError(f"{where}: record {name!r:.200} of the ZIP archive is compressed; torch.save stores all")
        # Other tools tell their version, and have fields of their own in the local header, such as times.
        yield Record(name, nbytes, header_offset, 0, is_torchs=made_by == 0 and flags & _DESCRIBED != 0)


def _wide(extra: bytes, nbytes: int, packed: int, header_offset: int, where: str) -> tuple[int, int, int]:
    """Those that do not fit 32 bits are in the ZIP64 field, in this order."""
    numbers = [nbytes, packed, header_offset]
    if _NO_32 not in numbers:
        return nbytes, packed, header_offset
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        field = extra[at + 4 : at + 4 + size]
        at += 4 + size
        if kind != 1:
            continue
        for number, value in enumerate(numbers):
            if value == _NO_32:
                if len(field) < 8:
                    raise FormatError(f"{where}: the directory of the ZIP64 archive is malformed")
                numbers[number] = int.from_bytes(field[:8], "little")
                field = field[8:]
        break
    return numbers[0], numbers[1], numbers[2]
