"""Object stores through obstore: S3 and what speaks it, Google Cloud Storage, Azure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError

from cloudckpt.config import KIB, Config
from cloudckpt.errors import NoBucketError, NotFoundError, StoreError
from cloudckpt.store import probe
from cloudckpt.store.base import Buffer, ObjectInfo, RequestCounts, Upload, byte_view, ends_early
from cloudckpt.store.counts import Counter
from cloudckpt.store.obstore_clients import make_clients
from cloudckpt.store.obstore_errors import facts, translated
from cloudckpt.store.obstore_upload import ObstoreUpload
from cloudckpt.store.parts import part_size, parts_in_flight
from cloudckpt.store.paths import clean_prefix, join, mask, place, scheme_of
from cloudckpt.store.retry import Backoff, call
from cloudckpt.store.seen_tags import SeenTags

T = TypeVar("T")

STREAM_BYTES = 512 * KIB
"""Parts that ``stream`` hands out. From 64 KiB to 10 MiB, CPU time is the same within the noise
(0.5-0.8 s/GiB); parts of this size are still in the CPU's cache when the caller checks and copies them."""


class ObstoreStore:
    """One bucket's prefix. Requests are retried here; obstore itself retries parts of uploads only."""

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, config: Config | None = None
    ) -> None:
        scheme = scheme_of(url)
        assert scheme is not None
        # Not urlsplit: "?" and "#" are letters like any other in a key.
        bucket, _, prefix = url.split("://", 1)[1].partition("/")
        self._config = config or Config()
        self._prefix = clean_prefix(prefix)
        self._url = mask(url)
        with translated("open", "", self._url, bucket=bucket):
            self._clients = make_clients(scheme, bucket, storage_options or {}, self._config)
        self._counter = Counter()
        self._seen_tags = SeenTags()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"ObstoreStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def counts(self) -> RequestCounts:
        return self._counter.snapshot()

    def get(self, key: str) -> bytes:
        path = self._path(key)

        def get() -> bytes:
            self._counter.add(gets=1)
            answer = obstore.get(self._clients.single, path)
            self._seen_tags.is_new(answer.meta["e_tag"])
            return bytes(answer.bytes())

        data = self._call("read", key, get)
        self._counter.add(bytes_fetched=len(data))
        return data

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Buffer]:
        path = self._path(key)
        end = byte_offset + nbytes
        if nbytes == 0:
            self._check_end(key, self.size(key), end)
            return
        backoff = Backoff(self._config.retry_deadline_s, self._counter)
        start = byte_offset
        while start < end:
            try:
                with self._translated("read", key):
                    self._counter.add(gets=1)
                    result = obstore.get(self._clients.single, path, options={"range": (start, end)})
                    self._seen_tags.is_new(result.meta["e_tag"])
                    self._check_end(key, result.meta["size"], end)
                    parts = iter(result.stream(min_chunk_size=STREAM_BYTES))
                while (part := self._next(key, parts)) is not None:
                    start += len(part)
                    self._counter.add(bytes_fetched=len(part))
                    backoff.progressed()
                    yield part
                if start < end:
                    raise StoreError(f"the answer for {key} of {self._url} was cut off", key=key, retryable=True)
            except StoreError as error:
                self._explain_range_error(key, end, error)
                backoff.pause(error)

    @property
    def num_streams(self) -> int:
        return self._config.num_threads

    def buffered_bytes(self, nbytes: int) -> int:
        # One part in the caller's hands, one being put together, and what the network has delivered
        # before it was asked for: 2 MiB in all, measured with readers that were slow.
        return min(nbytes, 4 * STREAM_BYTES)

    def size(self, key: str) -> int:
        return self._head(key).nbytes

    def put(self, key: str, data: Buffer) -> None:
        self._put(key, data, "overwrite")

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        # Where the server ignores the condition, this check is all there is.
        return not self._is_seen(key) and self._create(key, data)

    def honours_conditions(self) -> bool:
        return probe.honours_conditions(self._create, self.delete, self._clients.identity)

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> Upload:
        path = self._path(key)
        part_bytes = part_size(nbytes_hint, self._config.part_bytes)
        renew = self._watch_credentials()  # parts are sent from now on, and told about at the end
        with self._translated("write", key):
            writer = obstore.open_writer(
                self._clients.upload,
                path,
                buffer_size=part_bytes,
                max_concurrency=parts_in_flight(part_bytes, self._config),
            )
        return ObstoreUpload(
            writer,
            key,
            part_bytes=part_bytes,
            counter=self._counter,
            translated=lambda: self._translated("write", key, renew),
            head=lambda: self._head(key),
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        top = self._top(prefix)

        def collect() -> Sequence[ObjectInfo]:
            self._counter.add(others=1)
            return [
                ObjectInfo(self._key(found["path"]), found["size"], found["last_modified"].timestamp())
                for batch in obstore.list(self._clients.single, top or None)
                for found in batch
            ]

        yield from self._call("list", prefix, collect)

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:  # noqa: ARG002  # parts of uploads have no keys
        return iter(())

    def common_prefixes(self, prefix: str) -> Sequence[str]:
        top = self._top(prefix)

        def collect() -> Sequence[str]:
            self._counter.add(others=1)
            return obstore.list_with_delimiter(self._clients.single, top or None)["common_prefixes"]

        return sorted(path.rpartition("/")[2] for path in self._call("list", prefix, collect))

    def delete(self, keys: Iterable[str]) -> dict[str, str]:
        paths = {key: self._path(key) for key in keys}
        with ThreadPoolExecutor(max_workers=self._config.num_threads) as pool:
            reasons = pool.map(lambda item: self._delete_one(*item), paths.items())
            return {key: reason for key, reason in zip(paths, reasons, strict=True) if reason is not None}

    def close(self) -> None:
        """obstore closes a client's connections when the client is no longer referred to."""

    def _delete_one(self, key: str, path: str) -> str | None:
        def delete() -> None:
            self._counter.add(others=1)
            obstore.delete(self._clients.single, path)

        try:
            self._call("delete", key, delete)
        except (StoreError, NoBucketError) as error:
            return str(error)
        except NotFoundError:
            return None  # Azure and Google Cloud Storage say so of an absent object
        return None

    def _is_seen(self, key: str) -> bool:
        try:
            self._head(key)
        except NotFoundError:
            return False
        except StoreError as error:
            # S3 answers so for absent objects too, if one may not list the bucket.
            if facts(error).status != 403:
                raise
            return False
        return True

    def _create(self, key: str, data: Buffer) -> bool:
        return self._put(key, data, "create")

    def _put(self, key: str, data: Buffer, mode: str) -> bool:
        path = self._path(key)
        view = byte_view(data)

        def put() -> bool:
            self._counter.add(puts=1, bytes_sent=len(view))
            try:
                answer = obstore.put(self._clients.single, path, view, mode=mode, use_multipart=False)  # type: ignore[arg-type]
            except AlreadyExistsError as error:
                if facts(error).status == 409:
                    raise
                return False
            self._check_answer(key, path, answer["e_tag"])
            return True

        return self._call("write", key, put)

    def _check_answer(self, key: str, path: str, e_tag: str | None) -> None:
        """Raise a retryable error if a PUT was told the tag of another object.

        On a connection where an answer came twice, the second one is taken for that to the next request, which may
        never have arrived. Tags that were not seen before are not such. Others may be: equal objects have equal tags.
        """
        if e_tag is None or self._seen_tags.is_new(e_tag):
            return
        try:
            found = obstore.head(self._clients.single, path)["e_tag"]
        except FileNotFoundError:
            found = None
        except PermissionDeniedError:  # one may write, and not look
            return
        if found != e_tag:
            raise StoreError(
                f"{self._url} gave the answer to another request when {key} was written", key=key, retryable=True
            )

    def _head(self, key: str) -> ObjectInfo:
        path = self._path(key)

        def head() -> ObjectInfo:
            self._counter.add(others=1)
            found = obstore.head(self._clients.single, path)
            self._seen_tags.is_new(found["e_tag"])
            return ObjectInfo(key, found["size"], found["last_modified"].timestamp())

        return self._call("find", key, head)

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        def attempt() -> T:
            with self._translated(verb, key):
                return operation()

        return call(attempt, self._config.retry_deadline_s, self._counter)

    def _next(self, key: str, parts: Iterator[Buffer]) -> Buffer | None:
        with self._translated("read", key):
            return next(parts, None)

    def _explain_range_error(self, key: str, end: int, error: StoreError) -> None:
        """A range that starts at or past the end is refused; say where the end is."""
        if not error.retryable and facts(error).status == 416:
            self._check_end(key, self.size(key), end)

    def _check_end(self, key: str, found: int, wanted: int) -> None:
        if found < wanted:
            raise ends_early(self._url, key, found, wanted)

    def _watch_credentials(self) -> Callable[[], bool] | None:
        watch = self._clients.watch_credentials
        return None if watch is None else watch()

    def _translated(self, verb: str, key: str, renew: Callable[[], bool] | None = None) -> AbstractContextManager[None]:
        if os.getpid() != self._pid:
            # obstore's threads do not live on in a forked child, and its lock may be held for ever.
            raise StoreError(
                f"{self._url} was opened before a fork and cannot be used after it: open it in the child, "
                "started by spawn or forkserver",
                key=key,
            )
        return translated(
            verb,
            key,
            self._url,
            bucket=self._clients.bucket,
            renew=renew or self._watch_credentials(),
        )

    def _path(self, key: str) -> str:
        return place(self._prefix, key)

    def _top(self, prefix: str) -> str:
        prefix = clean_prefix(prefix)
        return join(self._prefix, prefix) if prefix else self._prefix

    def _key(self, path: str) -> str:
        return path[len(self._prefix) + 1 :] if self._prefix else path
