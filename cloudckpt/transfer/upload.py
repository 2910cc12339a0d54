"""Writing a rank's chunks: as one stream of packs, or as one object each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from cloudckpt.config import Config
from cloudckpt.errors import InterruptedTransferError
from cloudckpt.format.codec import Bytes1D, EncodedChunk, checksum, chunk_digest, encode_chunk
from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.grid import Ints
from cloudckpt.format.keys import pack_key, plain_root
from cloudckpt.format.pack import PackBuilder
from cloudckpt.store.base import Buffer, Store, Upload, UploadBrokenError
from cloudckpt.store.retry import Backoff
from cloudckpt.transfer.places import DigestColumn, Places, digest_column
from cloudckpt.transfer.pool import run_all

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """One chunk to write: its row in the chunk table, its array's name, its zarr key, its unencoded size."""

    chunk: int
    array: str
    key: str
    nbytes: int


@dataclass(frozen=True)
class UploadJob:
    """Everything that one rank writes.

    ``documents``: the zarr.json of its arrays, by name. ``own_documents``: what it writes of them in the
    plain layout, by key.
    """

    attempt: str
    rank: int
    writes: Sequence[ChunkWrite]
    documents: Mapping[str, bytes]
    own_documents: Mapping[str, bytes]
    group_document: bytes
    compression: str | None


@dataclass(frozen=True, eq=False)
class UploadReceipt:
    """What lies where; row i of the columns is about chunk ``chunk[i]``, ``object`` counts in ``objects``.

    Of an incremental save also the digests, and objects that were there before.
    """

    objects: tuple[ObjectEntry, ...]
    chunk: Ints
    object: Ints
    byte_offset: Ints
    nbytes: Ints
    crc32c: npt.NDArray[np.uint32]
    digest: DigestColumn | None = None

    def places(self) -> Places:
        """The same for a later save of the same plan, of an incremental save."""
        assert self.digest is not None
        order = np.argsort(self.chunk)
        return Places(
            self.objects,
            self.chunk[order],
            self.object[order],
            self.byte_offset[order],
            self.nbytes[order],
            self.crc32c[order],
            self.digest[order],
        )


class _Rows:
    """The columns of a receipt while they grow. ``written`` grows with every object that is there."""

    def __init__(self, written: list[ObjectEntry], base: Places | None) -> None:
        self.written = written
        self._base = base
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._digests: list[bytes] = []
        self._referred: dict[int, int] = {}
        """From object of the base to the number that rows give it: below zero, since more may be written yet."""

    @property
    def is_incremental(self) -> bool:
        return self._base is not None

    @property
    def count(self) -> int:
        """Rows so far: they are in the order of the writes."""
        return len(self._rows)

    def forget(self, first: int) -> None:
        """Row ``first`` and all that follow."""
        del self._rows[first:], self._digests[first:]

    def add(self, chunk: int, number: int, byte_offset: int, encoded: EncodedChunk, digest: bytes) -> None:
        self._rows.append((chunk, number, byte_offset, encoded.nbytes, encoded.crc32c))
        self._digests.append(digest)

    def refer(self, chunk: int, digest: bytes) -> bool:
        """Take the chunk from where it is in the base, if it is there."""
        base = self._base
        row = None if base is None else base.find(chunk, digest)
        if base is None or row is None:
            return False
        number = self._referred.setdefault(int(base.object[row]), -1 - len(self._referred))
        self._rows.append((chunk, number, int(base.byte_offset[row]), int(base.nbytes[row]), int(base.crc32c[row])))
        self._digests.append(digest)
        return True

    def receipt(self) -> UploadReceipt:
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 5)
        number = np.where(table[:, 1] < 0, len(self.written) - 1 - table[:, 1], table[:, 1])
        referred = () if self._base is None else tuple(self._base.objects[i] for i in self._referred)
        digests = None if self._base is None else digest_column(self._digests)
        return UploadReceipt(
            (*self.written, *referred),
            table[:, 0],
            number,
            table[:, 2],
            table[:, 3],
            table[:, 4].astype(np.uint32),
            digests,
        )


ReadChunk = Callable[[ChunkWrite], Bytes1D]
"""The unencoded bytes of a chunk. What it returns must stay as it is until the upload is closed."""


def upload(
    store: Store,
    job: UploadJob,
    read_chunk: ReadChunk,
    *,
    layout: str,
    config: Config,
    cancel: threading.Event,
    advance: Advance,
    written: list[ObjectEntry],
    base: Places | None = None,
) -> UploadReceipt:
    """Write everything in ``job``, durable on return. Raises InterruptedTransferError once ``cancel`` is set.

    ``written`` grows with every object that is there, also if an error follows. ``base``: None, or what need not
    be written if its digest is that of the chunk; only for packs.
    """
    assert base is None or layout == "packed"
    done = _Rows(written, base)
    stop = threading.Event()
    if layout == "zarr":
        # A chunk that is being put is held up to three times: gathered, joined to its checksum, in the client's hands.
        largest = max((write.nbytes for write in job.writes), default=1)
        num_threads = max(1, min(config.num_threads, config.memory_bytes // (3 * largest)))
        tasks = _plain_tasks(store, job, read_chunk, stop, advance, done)
    else:
        # One thread: the client library sends in its own. Not this one, which must stay free to give up.
        num_threads = 1
        tasks = iter([partial(_upload_packs, store, job, read_chunk, config, stop, advance, done)])
    run_all(tasks, num_threads=num_threads, cancel=cancel, stop=stop)
    return done.receipt()


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise InterruptedTransferError("stopped, since another part of the save failed")


class _Pack:
    """One pack on its way to the store. ``first``: its first chunk's row; ``filled``: unencoded bytes of its chunks."""

    def __init__(self, store: Store, key: str, nbytes_hint: int, first: int) -> None:
        self.key = key
        self.first = first
        self.crc32c = 0
        self.filled = 0
        self.arrays: dict[str, None] = {}
        self.builder = PackBuilder()
        self.upload: Upload = store.open_upload(key, nbytes_hint)

    def write(self, *buffers: Buffer) -> None:
        for data in buffers:
            self.crc32c = checksum(data, self.crc32c)
            self.upload.write(data)

    def add_chunk(self, write: ChunkWrite, chunk: EncodedChunk) -> int:
        """Append; returns where the chunk starts in the pack."""
        header = self.builder.begin_stored(write.key, chunk.nbytes, chunk.crc32)
        self.write(header, chunk.payload, chunk.suffix)
        self.filled += write.nbytes
        self.arrays[write.array] = None
        return self.builder.nbytes - chunk.nbytes

    def close(self, job: UploadJob) -> ObjectEntry:
        documents = {"zarr.json": job.group_document} | {f"{n}/zarr.json": job.documents[n] for n in self.arrays}
        for key, document in documents.items():
            self.write(self.builder.deflated(key, document))
        self.write(self.builder.finish())
        self.upload.close()
        return ObjectEntry(key=self.key, nbytes=self.builder.nbytes, crc32c=self.crc32c, rank=job.rank)


class _Packs:
    """The packs of one rank, one after the other, begun when there is something to put in and closed when full."""

    def __init__(self, store: Store, job: UploadJob, config: Config, done: _Rows) -> None:
        self._store = store
        self._job = job
        self._config = config
        self._done = done
        self._open: _Pack | None = None
        self._ends = np.cumsum([0, *(write.nbytes for write in job.writes)], dtype=np.int64)
        self._backoff: Backoff | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def add(self, write: ChunkWrite, encoded: EncodedChunk, digest: bytes) -> None:
        pack_bytes = self._config.pack_bytes
        if self._open is not None and self._open.filled + write.nbytes > pack_bytes:
            self.close()
        row, number = self._done.count, len(self._done.written)
        if self._open is None:
            ahead = int(self._ends[-1] - self._ends[row])
            hint = min(ahead, max(pack_bytes, write.nbytes)) + 1024 * (len(self._job.writes) - row)
            self._open = _Pack(self._store, pack_key(self._job.attempt, self._job.rank, number), hint, row)
        offset = self._open.add_chunk(write, encoded)
        self._done.add(write.chunk, number, offset, encoded, digest)

    def close(self) -> None:
        if self._open is not None:
            self._done.written.append(self._open.close(self._job))
            self._open = self._backoff = None

    def go_back(self) -> int:
        """Give up the pack that is open, back to where it began; returns the unencoded bytes since then."""
        end = self._done.count
        if self._open is not None:
            self.abort()
            self._done.forget(self._open.first)
            self._open = None
        return int(self._ends[end] - self._ends[self._done.count])

    def pause(self, error: UploadBrokenError) -> None:
        """Before the pack is begun again. The time for that counts from its first failure: it may be large."""
        self._backoff = self._backoff or Backoff(self._config.retry_deadline_s)
        self._backoff.pause(error)

    def abort(self) -> None:
        if self._open is not None:
            self._open.upload.abort()


def _upload_packs(
    store: Store,
    job: UploadJob,
    read_chunk: ReadChunk,
    config: Config,
    stop: threading.Event,
    advance: Advance,
    done: _Rows,
) -> None:
    packs = _Packs(store, job, config, done)
    try:
        while done.count < len(job.writes) or packs.is_open:
            _check(stop)
            try:
                if done.count == len(job.writes):
                    packs.close()
                    continue
                write = job.writes[done.count]
                data = read_chunk(write)
                digest = chunk_digest(data) if done.is_incremental else b""
                if not done.refer(write.chunk, digest):
                    packs.add(write, encode_chunk(data, job.compression), digest)
                advance(write.nbytes)
            except UploadBrokenError as error:
                advance(-packs.go_back())
                packs.pause(error)
    except BaseException:
        packs.abort()
        raise


def _plain_tasks(
    store: Store, job: UploadJob, read_chunk: ReadChunk, stop: threading.Event, advance: Advance, done: _Rows
) -> Iterator[Callable[[], None]]:
    root = plain_root(job.attempt)
    lock = threading.Lock()

    def put(key: str, data: Buffer) -> int:
        _check(stop)
        key = f"{root}/{key}"
        store.put(key, data)
        entry = ObjectEntry(key=key, nbytes=len(data), crc32c=checksum(data), rank=job.rank)
        with lock:
            done.written.append(entry)
            return len(done.written) - 1

    def put_chunk(write: ChunkWrite) -> None:
        encoded = encode_chunk(read_chunk(write), job.compression)
        data = np.concatenate([encoded.payload, np.frombuffer(encoded.suffix, dtype=np.uint8)])
        number = put(write.key, data)
        with lock:
            done.add(write.chunk, number, 0, encoded, b"")
        advance(write.nbytes)

    def put_document(item: tuple[str, bytes]) -> None:
        put(*item)

    yield from (partial(put_chunk, write) for write in job.writes)
    yield from (partial(put_document, item) for item in job.own_documents.items())
