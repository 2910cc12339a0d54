"""What FsspecStore needs to know of s3fs: its options, its transport errors, a multipart upload."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

import aiohttp
import botocore.exceptions
import botocore.parsers
import s3fs
from fsspec.spec import AbstractFileSystem

from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError, NotFoundError, StoreError
from cloudckpt.store.base import Buffer, byte_view
from cloudckpt.store.counts import Counter
from cloudckpt.store.credentials import ChainCredentials
from cloudckpt.store.parts import MAX_PARTS, part_size, parts_in_flight
from cloudckpt.store.retry import call
from cloudckpt.store.s3_options import parse, with_boto3_chain

TRANSPORT_ERRORS: tuple[type[Exception], ...] = (
    aiohttp.ClientError,
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ResponseStreamingError,
    # An overloaded server may send anything (fsspec/s3fs#484).
    botocore.parsers.ResponseParserError,
)


def is_s3(filesystem: AbstractFileSystem) -> bool:
    return isinstance(filesystem, s3fs.S3FileSystem)


def make_filesystem(storage_options: Mapping[str, Any], config: Config) -> AbstractFileSystem:
    """An instance of our own: without a listings cache, and without retries, which FsspecStore does."""
    options = dict(storage_options)
    config_kwargs = dict(options.pop("config_kwargs", None) or {})
    config_kwargs.setdefault("connect_timeout", config.request_timeout_s)
    config_kwargs.setdefault("read_timeout", config.request_timeout_s)
    config_kwargs.setdefault("retries", {"total_max_attempts": 1, "mode": "standard"})
    config_kwargs.setdefault("max_pool_connections", max(10, config.num_threads))
    # aiohttp takes what arrives on an idle connection for the answer to its next request: where an answer came twice,
    # a PUT that never arrived was taken for done [measured].
    config_kwargs.setdefault("connector_args", {"force_close": True, "keepalive_timeout": None})
    if with_boto3_chain(parse(storage_options)).endpoint_url is not None:
        # Stores other than AWS' refuse the checksums that newer clients send by default
        # (boto/boto3#4392), and few of them serve buckets as host names.
        for name in ("request_checksum_calculation", "response_checksum_validation"):
            if f"AWS_{name.upper()}" not in os.environ:
                config_kwargs.setdefault(name, "when_required")
        config_kwargs["s3"] = {"addressing_style": "path", **(config_kwargs.get("s3") or {})}
    options.update(use_listings_cache=False, skip_instance_cache=True)
    filesystem = s3fs.S3FileSystem(**options, config_kwargs=config_kwargs)
    filesystem.retries = 1
    return filesystem


def watch_credentials(storage_options: Mapping[str, Any]) -> Callable[[], Callable[[], bool]] | None:
    """`ChainCredentials.watch`, where the credentials are those of boto3's chain."""
    options = parse(storage_options)
    if options.key is not None or options.token is not None or options.anon or "session" in options.unknown:
        return None
    return ChainCredentials(options.profile).watch


def endpoint_of(filesystem: AbstractFileSystem) -> str:
    """Where requests go in the end, whichever of the many ways to say so was used."""
    return str(filesystem.s3.meta.endpoint_url)


def head_size(filesystem: AbstractFileSystem, path: str) -> int:
    """Of the object itself; s3fs' ``info`` lists the bucket as well if there is no such object."""
    bucket, name, _ = filesystem.split_path(path)
    answer = filesystem.call_s3("head_object", Bucket=bucket, Key=name)
    return int(answer["ContentLength"])


def close_session(filesystem: AbstractFileSystem) -> None:
    if getattr(filesystem, "_s3", None) is not None:
        filesystem.close_session(filesystem.loop, filesystem._s3creator)


class S3fsUpload:
    """A multipart upload in s3fs' terms, part by part, so that each part can be retried.

    ``filesystem`` gives the instance of the moment: one with other credentials may take the place of one whose expired.

    (s3fs' own file object sends its parts one after the other and gives up on the first 500.)
    """

    def __init__(
        self,
        filesystem: Callable[[], s3fs.S3FileSystem],
        path: str,
        key: str,
        *,
        nbytes_hint: int | None,
        config: Config,
        counter: Counter,
        translated: Callable[[], AbstractContextManager[None]],
        size: Callable[[], int],
    ) -> None:
        self._filesystem = filesystem
        self._bucket, self._name, _ = filesystem().split_path(path)
        self._key = key
        self._counter = counter
        self._translated = translated
        self._size = size
        self._config = config
        self._part_bytes = part_size(nbytes_hint, config.part_bytes)
        # botocore and aiohttp copy a body twice more while they send it [measured].
        self._in_flight = parts_in_flight(3 * self._part_bytes, config)
        self._buffer = bytearray()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: set[Future[None]] = set()
        self._parts: dict[int, str] = {}
        self._upload_id: str | None = None
        self._num_parts = 0
        self._nbytes = 0
        self._ended = False

    def write(self, data: Buffer) -> None:
        if self._ended:
            raise StoreError(f"the upload of {self._key} has ended", key=self._key)
        view = byte_view(data)
        self._nbytes += len(view)
        while len(view):
            room = self._part_bytes - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == self._part_bytes:
                self._send_part()

    def close(self) -> None:
        if self._ended:
            return
        try:
            if self._upload_id is None:
                body = bytes(self._buffer)
                self._request(puts=1, bytes_sent=len(body), method="put_object", Body=body)
            else:
                if self._buffer:
                    self._send_part()
                self._wait_for(0)
                self._complete()
        except CloudckptError:
            self.abort()
            raise
        self._end()

    def abort(self) -> None:
        if self._ended:
            return
        self._end()
        if self._upload_id is not None:
            try:
                self._request(others=1, method="abort_multipart_upload", UploadId=self._upload_id)
            except CloudckptError:
                # Parts may stay behind; a bucket's lifecycle rule is the cure that S3 has for them.
                return

    def _end(self) -> None:
        self._ended = True
        self._buffer = bytearray()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _send_part(self) -> None:
        if self._num_parts == MAX_PARTS:
            raise StoreError(
                f"{self._key} grows past {MAX_PARTS} parts of {self._part_bytes} bytes: "
                "give a larger nbytes_hint or Config.part_bytes",
                key=self._key,
            )
        if self._upload_id is None:
            self._upload_id = self._request(others=1, method="create_multipart_upload")["UploadId"]
            self._pool = ThreadPoolExecutor(self._in_flight, thread_name_prefix="cloudckpt-part")
        assert self._pool is not None
        self._num_parts += 1
        body, self._buffer = bytes(self._buffer), bytearray()
        self._wait_for(self._in_flight - 1)
        self._pending.add(self._pool.submit(self._put_part, self._num_parts, body))

    def _put_part(self, number: int, body: bytes) -> None:
        answer = self._request(
            puts=1, bytes_sent=len(body), method="upload_part", UploadId=self._upload_id, PartNumber=number, Body=body
        )
        self._parts[number] = answer["ETag"]

    def _wait_for(self, num_left: int) -> None:
        """Raise a part's error, or return once at most ``num_left`` parts are under way."""
        while len(self._pending) > num_left:
            done, self._pending = wait(self._pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def _complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": self._parts[number]} for number in sorted(self._parts)]
        try:
            self._request(
                others=1,
                method="complete_multipart_upload",
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )
        except StoreError:
            # A repeated "complete" whose first answer got lost is told NoSuchUpload (minio/minio#13318).
            try:
                arrived = self._size() == self._nbytes
            except (StoreError, NotFoundError):
                arrived = False
            if not arrived:
                raise

    def _request(self, *, method: str, puts: int = 0, others: int = 0, bytes_sent: int = 0, **arguments: Any) -> Any:
        def attempt() -> Any:
            with self._translated():
                self._counter.add(puts=puts, others=others, bytes_sent=bytes_sent)
                return self._filesystem().call_s3(method, Bucket=self._bucket, Key=self._name, **arguments)

        return call(attempt, self._config.retry_deadline_s, self._counter)
