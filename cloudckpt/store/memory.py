"""Objects in fsspec's process-wide ``memory://`` filesystem, so that fsspec and zarr see them too."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.store.base import Buffer, ObjectInfo, RequestCounts, Upload, ends_early
from cloudckpt.store.counts import Counter
from cloudckpt.store.paths import clean_prefix, place

# fsspec's dictionary has no compare-and-set of its own.
_lock = threading.Lock()


class MemoryStore:
    """Atomic in every call: an object is one entry of one dictionary."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs = MemoryFileSystem(skip_instance_cache=True)
        self._root = self._fs._strip_protocol(url)
        self._counter = Counter()

    def __repr__(self) -> str:
        return f"MemoryStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def counts(self) -> RequestCounts:
        return self._counter.snapshot()

    def get(self, key: str) -> bytes:
        data = self._value(key)
        self._counter.add(gets=1, bytes_fetched=len(data))
        return data

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Buffer]:
        data = self._value(key)
        if byte_offset + nbytes > len(data):
            raise ends_early(self._url, key, len(data), byte_offset + nbytes)
        self._counter.add(gets=1, bytes_fetched=nbytes)
        if nbytes:
            yield memoryview(data)[byte_offset : byte_offset + nbytes]

    @property
    def num_streams(self) -> int:
        return max(2, os.cpu_count() or 2)

    def buffered_bytes(self, nbytes: int) -> int:  # noqa: ARG002  # parts are views
        return 0

    def size(self, key: str) -> int:
        self._counter.add(others=1)
        return len(self._value(key))

    def put(self, key: str, data: Buffer) -> None:
        value = bytes(data)
        self._counter.add(puts=1, bytes_sent=len(value))
        with _lock:
            self._set(key, value)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        value = bytes(data)
        self._counter.add(puts=1, bytes_sent=len(value))
        with _lock:
            if self._path(key) in self._fs.store:
                return False
            self._set(key, value)
            return True

    def honours_conditions(self) -> bool:
        return True

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> Upload:  # noqa: ARG002  # no parts here
        self._path(key)
        return _MemoryUpload(self, key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        top = self._prefix(prefix)
        self._counter.add(others=1)
        with _lock:
            files = sorted((path, file) for path, file in self._fs.store.items() if path.startswith(top))
        for path, file in files:
            yield ObjectInfo(path[len(self._root) + 1 :], file.getbuffer().nbytes, file.modified.timestamp())

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:  # noqa: ARG002  # nothing is there before an upload ends
        return iter(())

    def common_prefixes(self, prefix: str) -> Sequence[str]:
        top = self._prefix(prefix)
        self._counter.add(others=1)
        with _lock:
            rest = [path[len(top) :] for path in self._fs.store if path.startswith(top)]
        return sorted({path.partition("/")[0] for path in rest if "/" in path})

    def delete(self, keys: Iterable[str]) -> dict[str, str]:
        for key in keys:
            self._counter.add(others=1)
            with _lock:
                self._fs.store.pop(self._path(key), None)
        return {}

    def close(self) -> None:
        """Nothing to give back; the objects live as long as the process."""

    def _path(self, key: str) -> str:
        return place(self._root or "/", key, top="/")

    def _prefix(self, prefix: str) -> str:
        prefix = clean_prefix(prefix)
        return f"{self._root}/{prefix}/" if prefix else f"{self._root}/"

    def _value(self, key: str) -> bytes:
        with _lock:
            file = self._fs.store.get(self._path(key))
        if file is None:
            raise NotFoundError(f"no object {key} in {self._url}")
        value: bytes = file.getvalue()
        return value

    def _set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        self._fs.store[path] = MemoryFile(self._fs, path, value)


class _MemoryUpload:
    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store = store
        self._key = key
        self._pieces: list[bytes] | None = []

    def write(self, data: Buffer) -> None:
        if self._pieces is None:
            raise StoreError(f"the upload of {self._key} has ended", key=self._key)
        self._pieces.append(bytes(data))

    def close(self) -> None:
        if self._pieces is not None:
            self._store.put(self._key, b"".join(self._pieces))
            self._pieces = None

    def abort(self) -> None:
        self._pieces = None
