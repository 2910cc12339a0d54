"""Ranged reads into memory: verified, decoded and placed while they arrive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from cloudckpt.config import MIB, Config
from cloudckpt.errors import CorruptChunkError, InterruptedTransferError, NotFoundError, StoreError
from cloudckpt.format.codec import CHECKSUM_BYTES, Bytes1D, checksum, decompress
from cloudckpt.format.manifest import Manifest
from cloudckpt.plan.reads import RangeRead
from cloudckpt.store.base import Store
from cloudckpt.transfer.pool import ByteBudget, run_all

Advance = Callable[[int], None]

MOST_READS = 3
"""How often a chunk is read whose checksum is wrong, before what is stored is held to be wrong."""

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the decoded bytes of one chunk go."""

    def put(self, data: Bytes1D, position: int) -> None:
        """Bytes from ``position`` of the chunk on; consecutive calls cover the chunk once, or again after a retry."""

    def done(self) -> None:
        """The chunk is whole and its checksum right."""


OpenSink = Callable[[int], Sink]
"""The sink of a row of the chunk table."""

Admit = Callable[[RangeRead, threading.Event], None]
"""Waits until a read may begin; raises InterruptedTransferError once the event is set."""


def download(
    store: Store,
    manifest: Manifest,
    reads: Sequence[RangeRead],
    open_sink: OpenSink,
    *,
    config: Config,
    cancel: threading.Event,
    advance: Advance,
    admit: Admit | None = None,
    staged_bytes: Callable[[Sequence[int]], int] | None = None,
) -> None:
    """Fetch every read, begun in the order given. Raises CorruptChunkError for the first chunk that is wrong.

    ``staged_bytes``: memory that the sink of any one of some chunks takes.

    What a sink got before an error stays where it was put.
    """
    budget = ByteBudget(config.memory_bytes)
    stop = threading.Event()

    def fetch(read: RangeRead) -> None:
        if admit is not None:
            admit(read, stop)
        sink_bytes = 0 if staged_bytes is None else staged_bytes(read.chunks.tolist())
        held = budget.acquire(store.buffered_bytes(read.nbytes) + _decode_bytes(manifest, read) + sink_bytes)
        try:
            for chunk in _fetch(store, manifest, read, open_sink, stop):
                advance(int(manifest.columns.nbytes[chunk]))
        finally:
            budget.release(held)

    tasks = (partial(fetch, read) for read in reads)
    run_all(tasks, num_threads=store.num_streams, cancel=cancel, stop=stop)


def effective_read_bytes(config: Config) -> int:
    """The size of one ranged read at which all threads together stay within the memory budget."""
    return max(MIB, min(config.read_bytes, config.memory_bytes // (2 * config.num_threads)))


def describe_chunk(manifest: Manifest, chunk: int) -> str:
    array, number = manifest.locate(chunk)
    return f"tensor {manifest.path(array)!r}, chunk {manifest.grids[array].box(number)}"


def corrupt(manifest: Manifest, chunk: int, fault: str) -> CorruptChunkError:
    array, number = manifest.locate(chunk)
    box = manifest.grids[array].box(number)
    key = manifest.objects[int(manifest.columns.object[chunk])].key
    offset = int(manifest.columns.byte_offset[chunk])
    return CorruptChunkError(
        f"{describe_chunk(manifest, chunk)}: {fault} (object {key}, byte offset {offset})",
        array=manifest.path(array),
        box=(box.offset, box.shape),
        key=key,
        byte_offset=offset,
    )


def decoded_bytes(manifest: Manifest, chunk: int) -> int:
    array, number = manifest.locate(chunk)
    return int(manifest.grids[array].stored_elements[number]) * manifest.itemsize(array)


def _decode_bytes(manifest: Manifest, read: RangeRead) -> int:
    """Memory for the largest compressed chunk of a read, packed and unpacked."""
    sizes = [
        decoded_bytes(manifest, chunk) + int(manifest.columns.nbytes[chunk])
        for chunk in read.chunks.tolist()
        if manifest.arrays[manifest.locate(chunk)[0]].compression is not None
    ]
    return max(sizes, default=0)


def _fetch(
    store: Store, manifest: Manifest, read: RangeRead, open_sink: OpenSink, stop: threading.Event
) -> Iterator[int]:
    key = manifest.objects[read.object].key
    reader = _RangeReader(manifest, read, open_sink)
    end = read.byte_offset + read.nbytes
    suspect, times = -1, 0
    try:
        while True:
            try:
                for part in store.stream(key, reader.position, end - reader.position):
                    if stop.is_set():  # the targets may be in other use by now
                        raise InterruptedTransferError("stopped, since another part of the load failed")
                    yield from reader.feed(np.frombuffer(part, dtype=np.uint8))
                return
            except CorruptChunkError as error:
                # What is stored may be right, and what arrived not: bits flip on the way, and answers get mixed up.
                times = times + 1 if suspect == reader.chunk else 1
                suspect = reader.chunk
                if times == MOST_READS:
                    raise
                logger.warning("%s; reading it again from %s", error, store.url)
                reader.begin_again()
    except NotFoundError as error:
        raise corrupt(manifest, reader.chunk, f"its object is missing from the store: {error}") from error
    except StoreError as error:
        if not error.retryable and _is_short(store, manifest, read):
            raise corrupt(manifest, reader.chunk, f"its object is cut off: {error}") from error
        where = f"bytes {read.byte_offset} to {read.byte_offset + read.nbytes} of {key}"
        text = f"{describe_chunk(manifest, reader.chunk)}, {where}: {error}"
        raise StoreError(text, key=error.key, retryable=error.retryable) from error


def _is_short(store: Store, manifest: Manifest, read: RangeRead) -> bool:
    entry = manifest.objects[read.object]
    try:
        return store.size(entry.key) < read.byte_offset + read.nbytes
    except StoreError:
        return False  # the first error tells more


class _RangeReader:
    """Cuts the bytes of one ranged read into chunks."""

    def __init__(self, manifest: Manifest, read: RangeRead, open_sink: OpenSink) -> None:
        self._manifest = manifest
        self._chunks = read.chunks.tolist()
        self._open_sink = open_sink
        self.position = read.byte_offset
        self._next = 0
        self._begin()

    @property
    def chunk(self) -> int:
        """The chunk that is being read (the last one when all are done)."""
        return int(self._chunks[min(self._next, len(self._chunks) - 1)])

    def _begin(self) -> None:
        chunk = self.chunk
        columns = self._manifest.columns
        self._start = int(columns.byte_offset[chunk])
        self._end = self._start + int(columns.nbytes[chunk])
        self._suffix_start = self._end - (CHECKSUM_BYTES if self._manifest.has_checksums else 0)
        self._clear()
        array, _ = self._manifest.locate(chunk)
        self._sink = self._open_sink(chunk)
        self._packed = (
            None
            if self._manifest.arrays[array].compression is None
            else np.empty(self._suffix_start - self._start, dtype=np.uint8)
        )

    def begin_again(self) -> None:
        """Go back to where the current chunk starts."""
        self.position = self._start
        self._clear()

    def _clear(self) -> None:
        self._crc32c = 0
        self._suffix = b""

    def feed(self, data: Bytes1D) -> Iterator[int]:
        """Take the next bytes; yields every chunk that they complete."""
        while len(data) and self._next < len(self._chunks):
            if self.position < self._start:  # framing between two chunks
                taken = min(self._start - self.position, len(data))
            elif self.position < self._suffix_start:
                taken = min(self._suffix_start - self.position, len(data))
                self._take(data[:taken])
            else:
                taken = min(self._end - self.position, len(data))
                self._suffix += data[:taken].tobytes()
            data = data[taken:]
            self.position += taken
            if self.position == self._end:
                yield self._finish()

    def _take(self, data: Bytes1D) -> None:
        if self._manifest.has_checksums:
            self._crc32c = checksum(data, self._crc32c)
        offset = self.position - self._start
        if self._packed is None:
            self._sink.put(data, offset)
        else:
            self._packed[offset : offset + len(data)] = data

    def _finish(self) -> int:
        chunk = self.chunk
        expected = int(self._manifest.columns.crc32c[chunk]) if self._manifest.has_checksums else None
        if expected is not None and (self._crc32c != expected or int.from_bytes(self._suffix, "little") != expected):
            raise corrupt(
                self._manifest, chunk, f"checksum mismatch: CRC-32C is {self._crc32c:08x}, not {expected:08x}"
            )
        if self._packed is not None:
            size = decoded_bytes(self._manifest, chunk)
            self._sink.put(decompress(self._packed, size, describe_chunk(self._manifest, chunk)), 0)
        self._sink.done()
        self._next += 1
        if self._next < len(self._chunks):
            self._begin()
        return chunk
