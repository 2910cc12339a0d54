"""A second engine for servers that the first one cannot talk to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from cloudckpt.errors import StoreError
from cloudckpt.store.base import Buffer, ObjectInfo, RequestCounts, Store, Upload

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ClientMismatchError(StoreError):
    """Server and client library do not agree on the protocol; another client may get on with it."""


class FallbackStore:
    """Uses ``first`` until it raises ClientMismatchError, then, for good, ``make_second()``.

    Only what such servers are known to answer in their own way is tried again: reads and small
    writes. An upload that has begun is not repeated, for its bytes are gone.
    """

    def __init__(self, first: Store, make_second: Callable[[], Store]) -> None:
        self._first = first
        self._make_second = make_second
        self._lock = threading.Lock()
        self._current = first

    def __repr__(self) -> str:
        return f"FallbackStore({self._current!r})"

    @property
    def url(self) -> str:
        return self._current.url

    @property
    def counts(self) -> RequestCounts:
        first, current = self._first.counts, self._current.counts
        if self._current is self._first:
            return first
        return RequestCounts(**{name: getattr(first, name) + getattr(current, name) for name in vars(first)})

    def get(self, key: str) -> bytes:
        return self._call(lambda store: store.get(key))

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Buffer]:
        done = 0
        store = self._current
        try:
            for part in store.stream(key, byte_offset, nbytes):
                yield part
                done += len(part)
        except ClientMismatchError as error:
            second = self._replace(store, error)
            yield from second.stream(key, byte_offset + done, nbytes - done)

    @property
    def num_streams(self) -> int:
        return self._current.num_streams

    def buffered_bytes(self, nbytes: int) -> int:
        return self._current.buffered_bytes(nbytes)

    def size(self, key: str) -> int:
        return self._call(lambda store: store.size(key))

    def put(self, key: str, data: Buffer) -> None:
        self._call(lambda store: store.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._call(lambda store: store.put_if_absent(key, data))

    def honours_conditions(self) -> bool:
        return self._call(lambda store: store.honours_conditions())

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> Upload:
        return self._call(lambda store: store.open_upload(key, nbytes_hint))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        # Whole listings only: the second one may not continue in the first one's order.
        yield from self._call(lambda store: tuple(store.list(prefix)))

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from self._call(lambda store: tuple(store.leftovers(prefix)))

    def common_prefixes(self, prefix: str) -> Sequence[str]:
        return self._call(lambda store: store.common_prefixes(prefix))

    def delete(self, keys: Iterable[str]) -> dict[str, str]:
        all_keys = tuple(keys)
        return self._call(lambda store: store.delete(all_keys))

    def close(self) -> None:
        self._first.close()
        if self._current is not self._first:
            self._current.close()

    def _call(self, operation: Callable[[Store], T]) -> T:
        store = self._current
        try:
            return operation(store)
        except ClientMismatchError as error:
            return operation(self._replace(store, error))

    def _replace(self, failed: Store, error: ClientMismatchError) -> Store:
        with self._lock:
            if failed is not self._first:
                raise error
            if self._current is self._first:
                logger.warning("%s: using fsspec from here on, which is slower (%s)", self._first.url, error)
                self._current = self._make_second()
            return self._current
