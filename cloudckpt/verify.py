"""Reading everything that a checkpoint is made of, and naming every fault. Works without torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from crc32c import crc32c

from cloudckpt.checkpoint import open_checkpoint
from cloudckpt.config import MIB, Config
from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.format.box import Box
from cloudckpt.format.codec import CHECKSUM_BYTES
from cloudckpt.format.manifest import Manifest
from cloudckpt.progress import Advance, Progress, start_progress
from cloudckpt.store.base import Store, byte_view
from cloudckpt.transfer.pool import ByteBudget, run_all

SEGMENT_BYTES = 32 * MIB
_POLYNOMIAL = 0x82F63B78
"""CRC-32C's, bits reversed."""


@dataclass(frozen=True)
class Fault:
    """``path`` and ``box`` are those of the damaged chunk; None where the damage is in no chunk."""

    what: str
    key: str
    byte_offset: int
    path: str | None = None
    box: Box | None = None

    def __str__(self) -> str:
        where = f"tensor {self.path!r} {self.box}: " if self.path is not None else ""
        return f"{where}{self.what} (object {self.key}, byte offset {self.byte_offset})"


@dataclass(frozen=True)
class VerifyReport:
    """``nbytes`` counts what was to be read. Faults are ordered by object and byte offset."""

    url: str
    step: int | None
    num_objects: int
    num_chunks: int
    nbytes: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = None,
    config: Config | None = None,
) -> VerifyReport:
    """Read every object from its first byte to its last, and check its size, its checksum and those of its chunks.

    What is wrong with objects is reported, not raised. An object with a faulty chunk is not searched for
    damage outside of its chunks. Raises NotFoundError and FormatError where no manifest can be read.
    """
    config = config or Config()
    with open_checkpoint(url, storage_options=storage_options, config=config) as checkpoint:
        manifest = checkpoint.manifest
        checkpoint.tree  # noqa: B018  # raises FormatError where it is malformed
        total = sum(entry.nbytes for entry in manifest.objects)
        with start_progress(progress, "verify", total, show=True) as advance:
            faults = check_objects(checkpoint.store, manifest, range(len(manifest.objects)), config, advance)
        return VerifyReport(
            url=checkpoint.url,
            step=checkpoint.step,
            num_objects=len(manifest.objects),
            num_chunks=len(manifest.columns),
            nbytes=total,
            faults=tuple(faults),
        )


def check_objects(
    store: Store, manifest: Manifest, numbers: Sequence[int], config: Config, advance: Advance = lambda _: None
) -> list[Fault]:
    """What is wrong with some of the objects, ordered by object and byte offset."""
    faults = _Check(store, manifest, numbers, config, advance).run()
    order = {entry.key: i for i, entry in enumerate(manifest.objects)}
    return sorted(faults, key=lambda fault: (order[fault.key], fault.byte_offset))


@dataclass(frozen=True)
class _Segment:
    """A part of an object that is read in one go; ``chunks`` lie in it whole, by ascending byte offset."""

    start: int
    end: int
    chunks: Sequence[int]


@dataclass
class _ObjectState:
    segments: Sequence[_Segment]
    checksums: dict[int, int] = field(default_factory=dict)
    """CRC-32C of the segments that could be read to their end, by number."""
    faults: list[Fault] = field(default_factory=list)


class _Check:
    def __init__(
        self, store: Store, manifest: Manifest, numbers: Sequence[int], config: Config, advance: Advance
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._config = config
        self._advance = advance
        self._budget = ByteBudget(config.memory_bytes)
        self._lock = threading.Lock()
        chunks = _chunks_by_object(manifest)
        self._objects = {
            number: _ObjectState(_segments(manifest, manifest.objects[number].nbytes, chunks.get(number, ())))
            for number in numbers
        }

    def run(self) -> list[Fault]:
        run_all(self._tasks(), num_threads=self._config.num_threads)
        return [fault for state in self._objects.values() for fault in state.faults]

    def _tasks(self) -> Iterator[Callable[[], None]]:
        for number, state in self._objects.items():
            for i in range(len(state.segments)):
                yield partial(self._check, number, i)

    def _check(self, number: int, index: int) -> None:
        entry, state = self._manifest.objects[number], self._objects[number]
        segment = state.segments[index]
        held = self._budget.acquire(self._store.buffered_bytes(segment.end - segment.start))
        try:
            checksum, faults = self._read(entry.key, segment)
            if checksum is not None and segment.end == entry.nbytes:
                faults += self._trailing(entry.key, entry.nbytes)
        finally:
            self._budget.release(held)
        self._advance(segment.end - segment.start)
        with self._lock:
            state.faults += faults
            if checksum is not None:
                state.checksums[index] = checksum
            if len(state.checksums) == len(state.segments) and not state.faults:
                state.faults += self._whole(number)

    def _read(self, key: str, segment: _Segment) -> tuple[int | None, list[Fault]]:
        """The segment's checksum, None if it cannot be read to its end, and its faults."""
        scan = _Scan(self._manifest, segment)
        try:
            scan.feed(self._store, key, segment.end)
        except NotFoundError:
            return None, self._unread(key, segment, scan, "the object is missing")
        except StoreError as error:
            size = self._size(key)
            if size is None or size >= segment.end:
                return None, self._unread(key, segment, scan, f"the object cannot be read: {error}")
            scan = _Scan(self._manifest, segment)
            if size > segment.start:
                try:
                    scan.feed(self._store, key, size)
                except StoreError as second:
                    return None, self._unread(key, segment, scan, f"the object cannot be read: {second}")
            return None, self._unread(key, segment, scan, f"the object is cut off at byte {size}")
        return scan.checksum, self._mismatches(scan)

    def _unread(self, key: str, segment: _Segment, scan: _Scan, what: str) -> list[Fault]:
        faults = [self._fault(chunk, what) for chunk in segment.chunks if chunk not in scan.done]
        return self._mismatches(scan) + (faults or [Fault(what, key, segment.start)])

    def _mismatches(self, scan: _Scan) -> list[Fault]:
        faults = []
        for chunk, (found, suffix) in scan.done.items():
            expected = int(self._manifest.columns.crc32c[chunk])
            if found != expected:
                faults.append(self._fault(chunk, f"checksum mismatch: CRC-32C is {found:08x}, not {expected:08x}"))
            elif suffix != expected:
                faults.append(self._fault(chunk, f"the stored checksum is {suffix:08x}, not {expected:08x}"))
        return faults

    def _fault(self, chunk: int, what: str) -> Fault:
        manifest = self._manifest
        array, position = manifest.locate(chunk)
        key = manifest.objects[int(manifest.columns.object[chunk])].key
        box = manifest.grids[array].box(position)
        return Fault(what, key, int(manifest.columns.byte_offset[chunk]), manifest.path(array), box)

    def _trailing(self, key: str, nbytes: int) -> list[Fault]:
        size = self._size(key)
        return [] if size in (None, nbytes) else [Fault(f"the object has {size} bytes, not {nbytes}", key, nbytes)]

    def _whole(self, number: int) -> list[Fault]:
        entry, state = self._manifest.objects[number], self._objects[number]
        checksum = 0
        for i, segment in enumerate(state.segments):
            checksum = _joined(checksum, state.checksums[i], segment.end - segment.start)
        if checksum == entry.crc32c:
            return []
        what = f"damage outside of the chunks: CRC-32C of the object is {checksum:08x}, not {entry.crc32c:08x}"
        return [Fault(what, entry.key, 0)]

    def _size(self, key: str) -> int | None:
        try:
            return self._store.size(key)
        except (NotFoundError, StoreError):
            return None  # some stores let read, and not ask


class _Scan:
    """Checksums of a part of an object and of the chunks in it, which may overlap."""

    def __init__(self, manifest: Manifest, segment: _Segment) -> None:
        self.checksum = 0
        self.done: dict[int, tuple[int, int]] = {}
        """Chunks that were read whole: CRC-32C of the payload, and the suffix."""
        self._manifest = manifest
        self._segment = segment
        self._next = 0
        self._open: list[_OpenChunk] = []

    def feed(self, store: Store, key: str, end: int) -> None:
        position = self._segment.start
        for part in store.stream(key, position, end - position):
            data = byte_view(part)
            self.checksum = crc32c(data, self.checksum)
            self._begin(position + len(data))
            for chunk in self._open:
                chunk.take(data, position)
            position += len(data)
            self._finish(position)

    def _begin(self, end: int) -> None:
        columns, chunks = self._manifest.columns, self._segment.chunks
        while self._next < len(chunks) and int(columns.byte_offset[chunks[self._next]]) < end:
            chunk = chunks[self._next]
            start = int(columns.byte_offset[chunk])
            self._open.append(_OpenChunk(chunk, start, start + int(columns.nbytes[chunk])))
            self._next += 1

    def _finish(self, position: int) -> None:
        for chunk in self._open:
            if chunk.end <= position:
                self.done[chunk.number] = (chunk.checksum, int.from_bytes(chunk.suffix, "little"))
        self._open = [chunk for chunk in self._open if chunk.end > position]


@dataclass
class _OpenChunk:
    number: int
    start: int
    end: int
    checksum: int = 0
    suffix: bytes = b""

    def take(self, data: memoryview, position: int) -> None:
        """``data`` stands at ``position`` of the object."""
        middle = self.end - CHECKSUM_BYTES
        payload = data[max(self.start - position, 0) : max(middle - position, 0)]
        self.checksum = crc32c(payload, self.checksum)
        self.suffix += bytes(data[max(middle - position, 0) : max(self.end - position, 0)])


def _chunks_by_object(manifest: Manifest) -> dict[int, Sequence[int]]:
    columns = manifest.columns
    order = np.lexsort([columns.byte_offset, columns.object])
    numbers, starts = np.unique(columns.object[order], return_index=True)
    parts = np.split(order, starts[1:]) if len(order) else []
    return {int(number): part.tolist() for number, part in zip(numbers, parts, strict=True)}


def _segments(manifest: Manifest, nbytes: int, chunks: Sequence[int]) -> list[_Segment]:
    """Cut an object where no chunk is cut, into parts of at least `SEGMENT_BYTES`."""
    segments: list[_Segment] = []
    first, start, end = 0, 0, 0
    for i, chunk in enumerate(chunks):
        offset = int(manifest.columns.byte_offset[chunk])
        if end <= offset and offset - start >= SEGMENT_BYTES:
            segments.append(_Segment(start, offset, chunks[first:i]))
            first, start = i, offset
        end = max(end, offset + int(manifest.columns.nbytes[chunk]))
    return [*segments, _Segment(start, nbytes, chunks[first:])]


def _joined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32C of two texts, one behind the other, from theirs; ``nbytes``: length of the second."""
    power, factor = 1 << 31, 1 << 23  # x**0 and x**8: the highest bit is the lowest power
    while nbytes:
        if nbytes & 1:
            power = _multiplied(factor, power)
        factor = _multiplied(factor, factor)
        nbytes >>= 1
    return _multiplied(power, first) ^ second


def _multiplied(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo CRC-32C's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
