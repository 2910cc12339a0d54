"""Any fsspec filesystem as a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.spec import AbstractFileSystem

from cloudckpt.config import Config
from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.store import probe
from cloudckpt.store.base import Buffer, ObjectInfo, RequestCounts, Upload, byte_view, ends_early
from cloudckpt.store.counts import Counter
from cloudckpt.store.fsspec_errors import facts, translated
from cloudckpt.store.fsspec_instance import Instance
from cloudckpt.store.paths import clean_prefix, join, mask, place, scheme_of
from cloudckpt.store.retry import Backoff, call

T = TypeVar("T")

# There folders are no more than a way to show keys: none is ever made, for that may try to create
# the bucket (fsspec/s3fs#532), and a conditional put can be trusted if a probe says so.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2", "memory"}


def open_filesystem(url: str, storage_options: Mapping[str, Any], config: Config) -> FsspecStore:
    """A store over a filesystem of its own. Raises ValueError or ImportError if fsspec knows none."""

    def make() -> AbstractFileSystem:
        if scheme_of(url) in ("s3", "s3a"):
            from cloudckpt.store.fsspec_s3 import make_filesystem

            return make_filesystem(storage_options, config)
        options = {**storage_options, "use_listings_cache": False, "skip_instance_cache": True}
        return url_to_fs(url, **options)[0]

    watch = None
    if scheme_of(url) in ("s3", "s3a"):
        from cloudckpt.store.fsspec_s3 import watch_credentials

        watch = watch_credentials(storage_options)
    return FsspecStore(url, make(), config, make=make, watch_credentials=watch)


class FsspecStore:
    """Objects below one path of a filesystem; none of its caches are trusted.

    ``put`` is as atomic as the filesystem's own ``pipe_file``, an upload as its ``open`` with
    ``autocommit=False``: on object stores wholly, on things like sftp a reader may see an object
    that is being written.
    ``make``, ``watch_credentials``: see `Instance`.
    """

    def __init__(
        self,
        url: str,
        filesystem: AbstractFileSystem,
        config: Config | None = None,
        *,
        make: Callable[[], AbstractFileSystem] | None = None,
        watch_credentials: Callable[[], Callable[[], bool]] | None = None,
    ) -> None:
        self._url = mask(url)
        self._config = config or Config()
        self._instance = Instance(filesystem, make, watch_credentials)
        self._root = str(filesystem._strip_protocol(url)).rstrip("/")
        self._protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
        self._is_object_store = bool(self._protocols & _OBJECT_STORES)
        self._is_s3 = False
        self._transport_errors: tuple[type[Exception], ...] = ()
        if self._protocols & {"s3", "s3a"}:
            from cloudckpt.store import fsspec_s3

            self._is_s3 = fsspec_s3.is_s3(filesystem)
            self._transport_errors = fsspec_s3.TRANSPORT_ERRORS
        self._counter = Counter()

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r}, {self._instance.kind})"

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
            # s3fs asks for the size first if it may read in parallel.
            options = {"max_concurrency": 1} if self._is_s3 else {}
            return bytes(self._fs.cat_file(path, **options))

        data = self._call("read", key, get)
        self._counter.add(bytes_fetched=len(data))
        return data

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Buffer]:
        end = byte_offset + nbytes
        if nbytes == 0:
            self._check_end(key, end)
        backoff = Backoff(self._config.retry_deadline_s, self._counter)
        start = byte_offset
        while start < end:
            try:
                data = self._read_range(key, start, min(end, start + self._config.read_bytes))
            except StoreError as error:
                if facts(error).status == 416:
                    self._check_end(key, end)
                backoff.pause(error)
                continue
            if data:
                backoff.progressed()
                start += len(data)
                yield data
            else:
                self._check_end(key, end)
                backoff.pause(StoreError(f"no bytes of {key} came from {self._url}", key=key, retryable=True))

    @property
    def num_streams(self) -> int:
        return self._config.num_threads

    def buffered_bytes(self, nbytes: int) -> int:
        return min(nbytes, self._config.read_bytes)

    def size(self, key: str) -> int:
        path = self._path(key)

        def size() -> int:
            self._counter.add(others=1)
            filesystem = self._fs
            if self._is_s3:
                from cloudckpt.store.fsspec_s3 import head_size

                return head_size(filesystem, path)
            filesystem.invalidate_cache(path)
            found = filesystem.info(path)
            if found["type"] != "file":
                raise FileNotFoundError(path)
            return int(found["size"])

        return self._call("find", key, size)

    def put(self, key: str, data: Buffer) -> None:
        self._put(key, data, {})

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        # Where the server ignores the condition, this check is all there is.
        return not self._is_seen(key) and self._create(key, data)

    def honours_conditions(self) -> bool:
        if not self._is_object_store:
            return False
        endpoint = ""
        if self._is_s3:
            from cloudckpt.store.fsspec_s3 import endpoint_of

            endpoint = endpoint_of(self._fs)
        bucket = self._root.partition("/")[0]
        identity = f"fsspec|{self._instance.kind}|{mask(endpoint)}|{bucket}"
        return probe.honours_conditions(self._create, self.delete, identity)

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> Upload:
        path = self._path(key)
        if self._is_s3:
            from cloudckpt.store.fsspec_s3 import S3fsUpload

            return S3fsUpload(
                lambda: self._fs,
                path,
                key,
                nbytes_hint=nbytes_hint,
                config=self._config,
                counter=self._counter,
                translated=lambda: self._translated("write", key),
                size=lambda: self.size(key),
            )
        from cloudckpt.store.fsspec_upload import FileUpload

        with self._translated("write", key):
            self._make_folder(path)
        return FileUpload(self._fs, path, key, counter=self._counter, translated=lambda: self._translated("write", key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        top = self._top(prefix)
        found = dict(self._listed(prefix, lambda filesystem: filesystem.find(top, detail=True).items()))
        for path in sorted(found):
            about = found[path]
            # A file of exactly this name is not below it; a name that ends in "/" marks a folder.
            if about["type"] == "file" and path != top and not path.endswith("/"):
                yield ObjectInfo(self._key(path), int(about["size"]), _modified_s(about))

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:  # noqa: ARG002  # no filesystem has a call for it
        return iter(())

    def common_prefixes(self, prefix: str) -> Sequence[str]:
        top = self._top(prefix)
        found = self._listed(prefix, lambda filesystem: filesystem.ls(top, detail=True))
        folders = [about["name"].rstrip("/") for about in found if about["type"] == "directory"]
        keys = sorted(self._key(path) for path in folders if path != top)
        if not self._is_object_store or "memory" in self._protocols:  # there may be empty folders
            keys = [key for key in keys if next(self.list(key), None) is not None]
        return [key.rpartition("/")[2] for key in keys]

    def delete(self, keys: Iterable[str]) -> dict[str, str]:
        # One by one: s3fs' bulk delete does not work on every server, and hides single failures
        # on some (fsspec/s3fs#838).
        all_keys = tuple(dict.fromkeys(keys))
        for key in all_keys:
            self._path(key)  # refuses all before any is deleted
        with ThreadPoolExecutor(max_workers=self._config.num_threads) as pool:
            reasons = pool.map(self._delete_one, all_keys)
            return {key: reason for key, reason in zip(all_keys, reasons, strict=True) if reason is not None}

    def close(self) -> None:
        own = self._instance.own
        if own is not None and self._is_s3:
            from cloudckpt.store.fsspec_s3 import close_session

            close_session(own)

    @property
    def _fs(self) -> AbstractFileSystem:
        return self._instance.current

    def _read_range(self, key: str, start: int, end: int) -> bytes:
        path = self._path(key)
        with self._translated("read", key):
            self._counter.add(gets=1)
            # By keyword: the order of cat_file's arguments differs between filesystems.
            data: bytes = self._fs.cat_file(path, start=start, end=end)
        if len(data) > end - start:
            raise StoreError(f"{self._url} ignores ranges: {len(data)} bytes for {start}-{end} of {key}", key=key)
        self._counter.add(bytes_fetched=len(data))
        return data

    def _put(self, key: str, data: Buffer, options: Mapping[str, str]) -> None:
        path = self._path(key)
        body = bytes(byte_view(data))

        def put() -> None:
            self._make_folder(path)
            self._counter.add(puts=1, bytes_sent=len(body))
            # Whole in one request, whatever its size: the conditional form is only atomic that way.
            chunking = {"chunksize": len(body) + 1} if self._is_s3 else {}
            self._fs.pipe_file(path, body, **options, **chunking)

        self._call("write", key, put)

    def _is_seen(self, key: str) -> bool:
        try:
            self.size(key)
        except NotFoundError:
            return False
        except StoreError as error:
            # S3 answers so for absent objects too, if one may not list the bucket.
            if facts(error).status != 403:
                raise
            return False
        return True

    def _create(self, key: str, data: Buffer) -> bool:
        try:
            self._put(key, data, {"mode": "create"})
        except StoreError as error:
            if isinstance(error.__cause__, FileExistsError) or facts(error).status == 412:
                return False
            raise
        return True

    def _make_folder(self, path: str) -> None:
        if not self._is_object_store:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _listed(self, prefix: str, ask: Callable[[AbstractFileSystem], Iterable[T]]) -> Sequence[T]:
        """What is told of a folder; nothing where there is none."""

        def listed() -> Sequence[T]:
            self._counter.add(others=1)
            filesystem = self._fs
            filesystem.invalidate_cache()
            try:
                return tuple(ask(filesystem))
            except (FileNotFoundError, NotADirectoryError) as error:
                if facts(error).code == "NoSuchBucket":
                    raise
                return ()

        return self._call("list", prefix, listed)

    def _delete_one(self, key: str) -> str | None:
        path = self._path(key)

        def delete() -> None:
            self._counter.add(others=1)
            try:
                self._fs.rm_file(path)
            except FileNotFoundError as error:
                if facts(error).code == "NoSuchBucket":
                    raise

        try:
            self._call("delete", key, delete)
        except (NotFoundError, StoreError) as error:
            return str(error)
        return None

    def _check_end(self, key: str, wanted: int) -> None:
        found = self.size(key)
        if found < wanted:
            raise ends_early(self._url, key, found, wanted)

    def _call(self, verb: str, key: str, operation: Callable[[], T]) -> T:
        def attempt() -> T:
            with self._translated(verb, key):
                return operation()

        return call(attempt, self._config.retry_deadline_s, self._counter)

    def _translated(self, verb: str, key: str) -> AbstractContextManager[None]:
        return translated(
            verb,
            key,
            self._url,
            bucket=self._root.partition("/")[0],
            transport_errors=self._transport_errors,
            renew=self._instance.renewal(),
        )

    def _path(self, key: str) -> str:
        return place(self._root, key, top=self._root.partition("/")[0] if self._is_object_store else "")

    def _top(self, prefix: str) -> str:
        prefix = clean_prefix(prefix)
        return join(self._root, prefix) if prefix else self._root

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")


def _modified_s(about: Mapping[str, Any]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = about.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
