"""The libraries that are compared, each behind the same two calls.

All of them run with their defaults, but for what it takes to reach a server on loopback.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

State = dict[str, DTensor]
Told = dict[str, Any]
"""What a library itself counts; empty where it counts nothing."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint goes; the last three are empty for local paths."""

    url: str
    endpoint_url: str = ""
    key: str = ""
    secret: str = ""

    @property
    def storage_options(self) -> dict[str, Any]:
        """In the form that s3fs takes."""
        if not self.endpoint_url:
            return {}
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint_url}


class Peer(Protocol):
    """Collective over the default process group. ``load`` fills the tensors in place."""

    def save(self, state: State, place: Place) -> Told: ...

    def load(self, state: State, place: Place) -> Told: ...


class Cloudckpt:
    def save(self, state: State, place: Place) -> Told:
        import cloudckpt

        return asdict(cloudckpt.save(state, place.url, storage_options=place.storage_options))

    def load(self, state: State, place: Place) -> Told:
        import cloudckpt

        return asdict(cloudckpt.load(state, place.url, storage_options=place.storage_options))


class DcpCloudckpt:
    """torch's own functions, with cloudckpt as their storage."""

    def save(self, state: State, place: Place) -> Told:
        from cloudckpt.dcp import StorageWriter

        dcp.save(state, storage_writer=StorageWriter(place.url, storage_options=place.storage_options))
        return {}

    def load(self, state: State, place: Place) -> Told:
        from cloudckpt.dcp import StorageReader

        reader = StorageReader(place.url, storage_options=place.storage_options)
        dcp.load(state, storage_reader=reader)
        assert reader.report is not None
        return asdict(reader.report)


class DcpFsspec:
    def save(self, state: State, place: Place) -> Told:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer: Any = FsspecWriter(place.url, **place.storage_options)
        files = writer.fs.fs

        def rename(old: str, new: str) -> None:
            # As fsspec does it, but for the bulk delete of a single key: the gateway refuses s3fs' for want of an MD5.
            files.copy(old, new)
            files.rm_file(old)

        writer.fs.rename = rename
        dcp.save(state, storage_writer=writer)
        return {}

    def load(self, state: State, place: Place) -> Told:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp.load(state, storage_reader=FsspecReader(place.url, **place.storage_options))
        return {}


class DcpFileSystem:
    def save(self, state: State, place: Place) -> Told:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place.url))
        return {}

    def load(self, state: State, place: Place) -> Told:
        dcp.load(state, storage_reader=dcp.FileSystemReader(place.url))
        return {}


class DcpS3torchconnector:
    def save(self, state: State, place: Place) -> Told:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter("us-east-1", place.url)
        writer.fs._client = self._client(place)
        dcp.save(state, storage_writer=writer)
        return {}

    def load(self, state: State, place: Place) -> Told:
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader("us-east-1", place.url)
        reader.fs._client = self._client(place)
        dcp.load(state, storage_reader=reader)
        return {}

    def _client(self, place: Place) -> Any:
        # Its DCP classes have no way to name an endpoint; its client takes keys from the environment only.
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = place.key, place.secret
        config = S3ClientConfig(force_path_style=True)
        return S3Client("us-east-1", endpoint=place.endpoint_url, s3client_config=config)


class RawEngine:
    """The same bytes through cloudckpt's client library, with its settings: one object for each rank.

    No grid, no checksums, no manifest, no other layout: the ceiling for anything built on that client.
    """

    def save(self, state: State, place: Place) -> Told:
        import obstore

        from cloudckpt.config import Config

        store, key = self._open(place)
        size, threads = Config().part_bytes, Config().num_threads
        with obstore.open_writer(store, key, buffer_size=size, max_concurrency=threads) as writer:
            for view in _byte_views(state):
                writer.write(memoryview(view))
        return {}

    def load(self, state: State, place: Place) -> Told:
        import obstore

        from cloudckpt.config import Config
        from cloudckpt.store.obstore import STREAM_BYTES

        store, key = self._open(place)
        views = _byte_views(state)
        ends = list(accumulate(len(view) for view in views))

        def read(start: int, end: int) -> None:
            for part in obstore.get(store, key, options={"range": (start, end)}).stream(min_chunk_size=STREAM_BYTES):
                _scatter(np.frombuffer(part, np.uint8), start, views, ends)
                start += len(part)

        step = Config().read_bytes
        with ThreadPoolExecutor(Config().num_threads) as pool:
            list(pool.map(lambda start: read(start, min(start + step, ends[-1])), range(0, ends[-1], step)))
        return {}

    def _open(self, place: Place) -> tuple[Any, str]:
        from obstore.store import S3Store

        parts = urlsplit(place.url)
        store = S3Store(
            parts.netloc,
            endpoint=place.endpoint_url,
            access_key_id=place.key,
            secret_access_key=place.secret,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        return store, f"{parts.path.strip('/')}/rank-{dist.get_rank()}.bin"


def _byte_views(state: State) -> list[npt.NDArray[np.uint8]]:
    """The memory of every local tensor."""
    return [tensor.to_local().flatten().view(torch.uint8).numpy() for tensor in state.values()]


def _scatter(
    data: npt.NDArray[np.uint8], start: int, views: Sequence[npt.NDArray[np.uint8]], ends: Sequence[int]
) -> None:
    """Copy ``data``, which begins at byte ``start`` of all views one after another, to where it belongs."""
    while len(data):
        i = bisect_right(ends, start)
        offset = start - (ends[i] - len(views[i]))
        taken = min(len(data), len(views[i]) - offset)
        views[i][offset : offset + taken] = data[:taken]
        data, start = data[taken:], start + taken


@dataclass(frozen=True)
class Entry:
    """One line of the comparison. ``reshards``: whether it can load what other ranks saved."""

    peer: Peer
    local: bool = False
    reshards: bool = True


PEERS = {
    "raw": Entry(RawEngine(), reshards=False),
    "cloudckpt": Entry(Cloudckpt()),
    "dcp-cloudckpt": Entry(DcpCloudckpt()),
    "dcp-s3fs": Entry(DcpFsspec()),
    "dcp-s3tc": Entry(DcpS3torchconnector()),
    "cloudckpt-local": Entry(Cloudckpt(), local=True),
    "dcp-local": Entry(DcpFileSystem(), local=True),
}


def parent_folder(place: Place) -> None:
    """Local libraries differ in whether they create parents; nobody is timed for it."""
    if not place.endpoint_url:
        Path(place.url).parent.mkdir(parents=True, exist_ok=True)
