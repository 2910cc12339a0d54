"""Any of our stores as a read-only zarr store: one set of options, retries and errors for all that is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from cloudckpt.errors import NotFoundError
from cloudckpt.interop.zarr_read_only import ReadOnlyStore
from cloudckpt.store import base
from cloudckpt.store.paths import join


class KeysStore(ReadOnlyStore):
    """``documents``: metadata that were read before, by key; there is no other. ``whole``: the paths of arrays all of
    whose chunks were there: one that is gone raises NotFoundError, for zarr would take it for fill values.
    """

    def __init__(self, store: base.Store, documents: Mapping[str, bytes], whole: frozenset[str]) -> None:
        super().__init__()
        self._store = store
        self._documents = documents
        self._whole = whole

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeysStore) and other._store is self._store

    __hash__ = None  # type: ignore[assignment]  # as all stores of zarr

    def __str__(self) -> str:
        return self._store.url

    @property
    def supports_listing(self) -> bool:
        return False

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if is_metadata(key):
            data: bytes | None = self._documents.get(key)
        else:
            data = await asyncio.to_thread(self._read, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def exists(self, key: str) -> bool:
        return key in self._documents

    async def list(self) -> AsyncIterator[str]:
        for key in self._documents:
            yield key

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError(prefix)

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        try:
            if byte_range is None:
                return self._store.get(key)
            start, end = self._span(key, byte_range)
            return b"".join(bytes(base.byte_view(part)) for part in self._store.stream(key, start, end - start))
        except NotFoundError as error:
            if any(key.startswith(join(path, "")) for path in self._whole):
                raise NotFoundError(f"{key} of {self._store.url} was there when the import began: {error}") from error
            return None

    def _span(self, key: str, byte_range: ByteRequest) -> tuple[int, int]:
        match byte_range:
            case RangeByteRequest(start, end):
                return start, end
            case OffsetByteRequest(offset):
                return offset, self._store.size(key)
            case SuffixByteRequest(suffix):
                size = self._store.size(key)
                return max(0, size - suffix), size
        raise TypeError(f"unknown byte request {byte_range!r}")


METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs")


def is_metadata(key: str) -> bool:
    return key.rpartition("/")[2] in (*METADATA, ".zmetadata")
