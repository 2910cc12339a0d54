"""The JSON form of a manifest, field by field, and its columns as arrays of numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cloudckpt.format.codec import DIGEST_BYTES
from cloudckpt.format.grid import EncodedCuts

FORMAT = "cloudckpt"
MAJOR, MINOR = 1, 2
VERSION = f"{MAJOR}.{MINOR}"

MAX_DIMS = 64
"""As many as numpy has."""
MAX_BYTES = 2**62
"""Sizes above this are nonsense, and sums of them would overflow int64."""
COLUMNS = (("object", "<u4"), ("byte_offset", "<u8"), ("nbytes", "<u4"), ("crc32c", "<u4"))
"""Those that every chunk table has, by name and type."""


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor. Its chunks are rows ``first_chunk`` and following of the chunk table, in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    grid: tuple[EncodedCuts, ...]
    first_chunk: int
    compression: str | None = None


class ObjectEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One object, by its key below the checkpoint; ``crc32c`` is over all of it.

    ``../<step dir>/<key>`` is an object of a sibling, another checkpoint of the run, with its rank there.
    """

    key: str
    nbytes: int
    crc32c: int
    rank: int


class ChunkTable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Little-endian columns, one row a chunk: object number u4, byte offset u8, nbytes u4, CRC-32C u4.

    ``digest``: 16 bytes a chunk, see `codec.chunk_digest`; None where the save did not make them.
    """

    count: int
    object: bytes
    byte_offset: bytes
    nbytes: bytes
    crc32c: bytes
    digest: bytes | None = None


class MeshEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A device mesh of the job that saved; for information only."""

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] = ()


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON form, field by field; the small ones come first, so that the head of a manifest tells them.

    ``branch``: how often the run went back to an earlier step before this one was saved. ``model_version``: the
    caller's. ``topology``: equal for checkpoints whose ranks held the same parts of the same tensors.
    """

    format: str
    version: str
    commit_id: str
    attempt: str
    step: int | None
    branch: int = 0
    model_version: str | None = None
    topology: str | None = None
    created: str
    writer: str
    world_size: int
    layout: str
    meshes: tuple[MeshEntry, ...]
    metadata: Any
    tree: Any
    arrays: tuple[ArrayEntry, ...]
    objects: tuple[ObjectEntry, ...]
    chunks: ChunkTable


class ChunkColumns:
    """The chunk table as int64 numpy columns (CRC-32C as uint32)."""

    def __init__(self, table: ChunkTable) -> None:
        arrays = {name: np.frombuffer(getattr(table, name), dtype=kind) for name, kind in COLUMNS}
        self.object = arrays["object"].astype(np.int64)
        self.byte_offset = arrays["byte_offset"].astype(np.int64)
        self.nbytes = arrays["nbytes"].astype(np.int64)
        self.crc32c = arrays["crc32c"].astype(np.uint32)
        self.digest: npt.NDArray[np.uint8] | None = None
        if table.digest is not None:
            self.digest = np.frombuffer(table.digest, dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    def __len__(self) -> int:
        return len(self.object)

    @staticmethod
    def pack(
        object: npt.NDArray[np.integer[Any]],
        byte_offset: npt.NDArray[np.integer[Any]],
        nbytes: npt.NDArray[np.integer[Any]],
        crc32c: npt.NDArray[np.integer[Any]],
        digest: npt.NDArray[np.uint8] | None = None,
    ) -> ChunkTable:
        columns = dict(zip((n for n, _ in COLUMNS), (object, byte_offset, nbytes, crc32c), strict=True))
        packed = {name: columns[name].astype(kind).tobytes() for name, kind in COLUMNS}
        return ChunkTable(count=len(object), digest=None if digest is None else digest.tobytes(), **packed)
