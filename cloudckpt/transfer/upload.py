"""Writing a rank's chunks: as one stream of packs, or as one object each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from cloudckpt.config import Config
from cloudckpt.errors import InterruptedTransferError
from cloudckpt.format.codec import Bytes1D, EncodedChunk, checksum, encode_chunk
from cloudckpt.format.grid import Ints
from cloudckpt.format.keys import pack_key, plain_root
from cloudckpt.format.manifest import ObjectEntry
from cloudckpt.format.pack import PackBuilder
from cloudckpt.store.base import Buffer, Store, Upload
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
    """What lies where; row i of the columns is about chunk ``chunk[i]``, ``object`` counts in ``objects``."""

    objects: tuple[ObjectEntry, ...]
    chunk: Ints
    object: Ints
    byte_offset: Ints
    nbytes: Ints
    crc32c: npt.NDArray[np.uint32]


@dataclass
class _Rows:
    """The columns of a receipt while they grow."""

    objects: list[ObjectEntry] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def receipt(self) -> UploadReceipt:
        table = np.array(self.rows, dtype=np.int64).reshape(-1, 5)
        return UploadReceipt(
            tuple(self.objects), table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4].astype(np.uint32)
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
) -> UploadReceipt:
    """Write everything in ``job``, durable on return. Raises InterruptedTransferError once ``cancel`` is set.

    ``written`` grows with every object that is there, also if an error follows.
    """
    done = _Rows(objects=written)
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
    """One pack on its way to the store."""

    def __init__(self, store: Store, key: str, nbytes_hint: int) -> None:
        self.key = key
        self.crc32c = 0
        self.builder = PackBuilder()
        self.upload: Upload = store.open_upload(key, nbytes_hint)

    def write(self, *buffers: Buffer) -> None:
        for data in buffers:
            self.crc32c = checksum(data, self.crc32c)
            self.upload.write(data)

    def add_chunk(self, key: str, chunk: EncodedChunk) -> int:
        """Append; returns where the chunk starts in the pack."""
        header = self.builder.begin_stored(key, chunk.nbytes, chunk.crc32)
        self.write(header, chunk.payload, chunk.suffix)
        return self.builder.nbytes - chunk.nbytes

    def close(self, documents: Mapping[str, bytes], rank: int) -> ObjectEntry:
        for key, document in documents.items():
            self.write(self.builder.deflated(key, document))
        self.write(self.builder.finish())
        self.upload.close()
        return ObjectEntry(key=self.key, nbytes=self.builder.nbytes, crc32c=self.crc32c, rank=rank)


def _upload_packs(
    store: Store,
    job: UploadJob,
    read_chunk: ReadChunk,
    config: Config,
    stop: threading.Event,
    advance: Advance,
    done: _Rows,
) -> None:
    for number, batch in enumerate(_batches(job.writes, config.pack_bytes)):
        size = sum(w.nbytes + 4 for w in batch)
        pack = _Pack(store, pack_key(job.attempt, job.rank, number), size + 1024 * len(batch))
        try:
            for write in batch:
                _check(stop)
                encoded = encode_chunk(read_chunk(write), job.compression)
                offset = pack.add_chunk(write.key, encoded)
                done.rows.append((write.chunk, number, offset, encoded.nbytes, encoded.crc32c))
                advance(write.nbytes)
            names = dict.fromkeys(w.array for w in batch)
            documents = {"zarr.json": job.group_document} | {f"{n}/zarr.json": job.documents[n] for n in names}
            done.objects.append(pack.close(documents, job.rank))
        except BaseException:
            pack.upload.abort()
            raise


def _batches(writes: Sequence[ChunkWrite], pack_bytes: int) -> Iterator[list[ChunkWrite]]:
    """Runs of writes that fill a pack; a pack has at least one chunk."""
    batch: list[ChunkWrite] = []
    size = 0
    for write in writes:
        if batch and size + write.nbytes > pack_bytes:
            yield batch
            batch, size = [], 0
        batch.append(write)
        size += write.nbytes
    if batch:
        yield batch


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
            done.objects.append(entry)
            return len(done.objects) - 1

    def put_chunk(write: ChunkWrite) -> None:
        encoded = encode_chunk(read_chunk(write), job.compression)
        data = np.concatenate([encoded.payload, np.frombuffer(encoded.suffix, dtype=np.uint8)])
        number = put(write.key, data)
        with lock:
            done.rows.append((write.chunk, number, 0, encoded.nbytes, encoded.crc32c))
        advance(write.nbytes)

    def put_document(item: tuple[str, bytes]) -> None:
        put(*item)

    yield from (partial(put_chunk, write) for write in job.writes)
    yield from (partial(put_document, item) for item in job.own_documents.items())
