"""Any checkpoint as a read-only zarr group.

zarr takes an absent chunk for a chunk of fill values, and its newest version for Python 3.11 reads no
rectilinear grids. So what zarr sees is made up here, chunk by chunk, from verified chunks of the
checkpoint: one level of arrays, all of them uncompressed and with regular grids.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
import zarr
from crc32c import crc32c
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from cloudckpt.checkpoint import Checkpoint, open_checkpoint
from cloudckpt.config import Config
from cloudckpt.format.box import Box
from cloudckpt.format.codec import CHECKSUM_BYTES, Bytes1D
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.grid import Grid
from cloudckpt.format.keys import chunk_key, parse_chunk_key
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.place import Placement, PlacementSink
from cloudckpt.format.zarr_json import array_document, encode_document, group_document
from cloudckpt.interop import zarr_dtypes  # noqa: F401  # registers the data types
from cloudckpt.interop.zarr_read_only import ReadOnlyStore
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.shard import PieceTable
from cloudckpt.store.base import byte_view
from cloudckpt.transfer.download import download, effective_read_bytes

METADATA = "zarr.json"


def open_zarr(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> zarr.Group:
    """The arrays of a checkpoint, by array name, as a read-only zarr group.

    Array names are dotted paths where those can be names (docs/format.md); every array has its dotted
    path in its attribute ``cloudckpt_path``. Chunks are fetched and verified when they are read: one
    that is absent or damaged raises CorruptChunkError. An irregular grid is shown as a regular one,
    whose chunks have the largest extent along each dim. ``group.store.close()`` gives connections back.
    """
    checkpoint = open_checkpoint(url, storage_options=storage_options, config=config)
    return zarr.open_group(CheckpointStore(checkpoint, config or Config()), mode="r", zarr_format=3)


class CheckpointStore(ReadOnlyStore):
    """zarr's view of a checkpoint. Owns the checkpoint that it is given."""

    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._config = config
        manifest = checkpoint.manifest
        self._stored = StoredChunks.of(manifest)
        self._grids = [_regular(grid) for grid in manifest.grids]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointStore) and other._checkpoint is self._checkpoint

    __hash__ = None  # type: ignore[assignment]  # as all stores of zarr

    def __str__(self) -> str:
        return f"cloudckpt:{self._checkpoint.url}"

    def __repr__(self) -> str:
        return f"CheckpointStore({self._checkpoint.url!r})"

    def close(self) -> None:
        super().close()
        self._checkpoint.close()

    @property
    def supports_listing(self) -> bool:
        return True

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        data: bytes | Bytes1D | None = self._document(key)
        if data is None:
            found = self._find(key)
            if found is None:
                return None
            data = await asyncio.to_thread(self._chunk, *found)
        return prototype.buffer.from_bytes(byte_view(data)[_span(byte_range)])

    async def exists(self, key: str) -> bool:
        return self._document(key) is not None or self._find(key) is not None

    async def getsize(self, key: str) -> int:
        document, found = self._document(key), self._find(key)
        if found is None:
            if document is None:
                raise FileNotFoundError(key)
            return len(document)
        return self._chunk_bytes(found[0]) + CHECKSUM_BYTES

    async def list(self) -> AsyncIterator[str]:
        yield METADATA
        for number, entry in enumerate(self._manifest.arrays):
            for key in self._keys_of(number, entry.name):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        prefix = prefix.strip("/")
        if not prefix:
            yield METADATA
            for entry in self._manifest.arrays:
                yield entry.name
            return
        seen = set()
        async for key in self.list_prefix(f"{prefix}/"):
            name = key[len(prefix) + 1 :].partition("/")[0]
            if name not in seen:
                seen.add(name)
                yield name

    @property
    def _manifest(self) -> Manifest:
        return self._checkpoint.manifest

    def _keys_of(self, number: int, name: str) -> Iterable[str]:
        yield f"{name}/{METADATA}"
        for index in product(*(range(count) for count in self._grids[number].counts)):
            yield chunk_key(name, index + self._trailing(number))

    def _trailing(self, number: int) -> tuple[int, ...]:
        """What the index of a chunk has beyond the dims of the tensor."""
        return (0,) * len(dtype(self._manifest.arrays[number].dtype).trailing)

    def _document(self, key: str) -> bytes | None:
        if key == METADATA:
            document = self._manifest.document
            about = {"url": self._checkpoint.url, "step": document.step, "commit_id": document.commit_id}
            return encode_document({**group_document(), "attributes": {"cloudckpt": about}})
        name, _, rest = key.rpartition("/")
        number = self._manifest.array_index.get(name)
        if rest != METADATA or number is None:
            return None
        made = array_document(self._manifest.arrays[number].dtype, self._grids[number], None)
        made["attributes"]["cloudckpt_path"] = self._manifest.path(number)
        return encode_document(made)

    def _find(self, key: str) -> tuple[int, tuple[int, ...]] | None:
        """The array number and the grid position of a chunk that zarr may ask for."""
        parsed = parse_chunk_key(key)
        number = self._manifest.array_index.get(parsed[0]) if parsed else None
        if parsed is None or number is None:
            return None
        counts = self._grids[number].counts
        index, rest = parsed[1][: len(counts)], parsed[1][len(counts) :]
        inside = len(index) == len(counts) and all(i < n for i, n in zip(index, counts, strict=True))
        return (number, index) if inside and rest == self._trailing(number) else None

    def _chunk_bytes(self, number: int) -> int:
        elements = np.prod([c for c in self._grids[number].cuts if isinstance(c, int)], dtype=np.int64)
        return int(elements) * self._manifest.itemsize(number)

    def _chunk(self, number: int, index: tuple[int, ...]) -> Bytes1D:
        """A chunk of the view, as zarr expects it: padded, with its checksum behind it."""
        nbytes = self._chunk_bytes(number)
        data = np.zeros(nbytes + CHECKSUM_BYTES, dtype=np.uint8)
        self._fill(number, index, data[:nbytes])
        suffix = crc32c(byte_view(data[:nbytes])).to_bytes(CHECKSUM_BYTES, "little")
        data[nbytes:] = np.frombuffer(suffix, dtype=np.uint8)
        return data

    def _fill(self, number: int, index: tuple[int, ...], data: Bytes1D) -> None:
        view, stored = self._grids[number], self._manifest.grids[number]
        box, shape = _box(view, index)
        target = data.reshape(*shape, self._manifest.itemsize(number))

        def open_sink(chunk: int) -> PlacementSink:
            _, position = self._manifest.locate(chunk)
            source = stored.box(position)
            part = source.intersect(box)
            assert part is not None, "the planner only names chunks that the box meets"
            place = target[part.relative_to(box.offset).slices]
            start = part.relative_to(source.offset).offset
            return PlacementSink([Placement.of_box(place, stored.stored_shape(position), start)])

        wanted = PieceTable.build([(number, box)])
        plan = plan_load(self._stored, [wanted], read_bytes=effective_read_bytes(self._config)).rank(0)
        download(
            self._checkpoint.store,
            self._manifest,
            plan.reads,
            open_sink,
            config=self._config,
            cancel=threading.Event(),
            advance=lambda _: None,
        )


def _regular(grid: Grid) -> Grid:
    """The same array in chunks of one shape: the largest extent along each dim."""
    return Grid(grid.shape, tuple(c if isinstance(c, int) else max(c, default=1) for c in grid.cuts))


def _box(grid: Grid, index: tuple[int, ...]) -> tuple[Box, tuple[int, ...]]:
    """The part of the array in a chunk of a regular grid, and the chunk's padded shape."""
    chunk = int(np.ravel_multi_index(index, grid.counts)) if index else 0
    return grid.box(chunk), grid.stored_shape(chunk)


def _span(request: ByteRequest | None) -> slice:
    match request:
        case None:
            return slice(None)
        case RangeByteRequest(start, end):
            return slice(start, end)
        case OffsetByteRequest(offset):
            return slice(offset, None)
        case SuffixByteRequest(suffix):
            return slice(-suffix, None) if suffix else slice(0, 0)
    raise TypeError(f"unknown byte request {request!r}")
