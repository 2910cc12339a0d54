"""The manifest: the one document that makes a checkpoint exist, and says where every byte of it is."""

from __future__ import annotations

import bisect
import hashlib
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cloudckpt._cached import cached_property
from cloudckpt.errors import FormatError
from cloudckpt.format.checks import (
    check_arrays,
    check_chunks,
    check_numbers,
    check_objects,
    check_table,
    check_tree,
)
from cloudckpt.format.document import FORMAT, MAJOR, MINOR, VERSION, ArrayEntry, ChunkColumns, Document, ObjectEntry
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.grid import Grid
from cloudckpt.format.keys import is_of_attempt, split_key
from cloudckpt.format.tree import array_leaves, path_text

_first_chunk = operator.attrgetter("first_chunk")


class Manifest:
    """A validated manifest. Grids and columns are built once, on first use.

    ``has_checksums``: whether a CRC-32C follows each chunk. Not so where a manifest stands for files of others.
    """

    def __init__(self, document: Document, *, has_checksums: bool = True) -> None:
        self.document = document
        self.has_checksums = has_checksums

    def __reduce__(self) -> tuple[Any, ...]:
        return _manifest, (self.document, self.has_checksums)  # without what was built

    @property
    def arrays(self) -> tuple[ArrayEntry, ...]:
        return self.document.arrays

    @property
    def objects(self) -> tuple[ObjectEntry, ...]:
        return self.document.objects

    @cached_property
    def array_index(self) -> dict[str, int]:
        return {entry.name: i for i, entry in enumerate(self.arrays)}

    def array_number(self, node: Mapping[str, Any]) -> int:
        """The number of the array that a leaf of the tree refers to."""
        name = node.get("array")
        if not isinstance(name, str) or name not in self.array_index:
            raise FormatError(f"the tree refers to an array {name!r:.200} that is not listed")
        return self.array_index[name]

    @cached_property
    def columns(self) -> ChunkColumns:
        return ChunkColumns(self.document.chunks)

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        limit = self.document.chunks.count
        return tuple(Grid.decode(a.shape, a.grid, max_chunks=limit, what=f"array {a.name!r}") for a in self.arrays)

    @cached_property
    def first_chunks(self) -> npt.NDArray[np.int64]:
        return np.array([a.first_chunk for a in self.arrays], dtype=np.int64)

    @cached_property
    def paths(self) -> dict[str, str]:
        """Array name to the dotted path of the (first) key that holds it, for messages."""
        found: dict[str, str] = {}
        for path, node in array_leaves(self.document.tree):
            found.setdefault(str(node["array"]), path_text(path))
        return found

    def path(self, array: int) -> str:
        name = self.arrays[array].name
        return self.paths.get(name, name)

    def itemsize(self, array: int) -> int:
        return dtype(self.arrays[array].dtype).itemsize

    def same_bytes(self, first: int, second: int) -> bool:
        """Whether two arrays are known to be equal: cut alike, with equal checksums."""
        if not self.has_checksums:
            return False
        a, b = self.arrays[first], self.arrays[second]
        if (a.dtype, a.shape, a.grid, a.compression) != (b.dtype, b.shape, b.grid, b.compression):
            return False
        count = self.grids[first].num_chunks
        rows = [self.columns.crc32c[e.first_chunk : e.first_chunk + count] for e in (a, b)]
        return bool((rows[0] == rows[1]).all())

    def locate(self, chunk: int) -> tuple[int, int]:
        """The array number of a row of the chunk table, and the chunk's number within the array."""
        # Arrays without chunks share their first_chunk with the next: "right" skips them.
        array = bisect.bisect_right(self.arrays, chunk, key=_first_chunk) - 1
        return array, chunk - self.arrays[array].first_chunk

    @property
    def nbytes(self) -> int:
        """Stored bytes of all chunks."""
        return int(self.columns.nbytes.sum())

    @cached_property
    def is_new(self) -> npt.NDArray[np.bool_]:
        """By object: whether this save wrote it. The others were there before, most in other checkpoints of the run."""
        return np.array([is_of_attempt(entry.key, self.document.attempt) for entry in self.objects], dtype=bool)

    @property
    def nbytes_referenced(self) -> int:
        """Stored bytes of the chunks that lie in siblings."""
        elsewhere = np.array([split_key(entry.key)[0] is not None for entry in self.objects], dtype=bool)
        return int(self.columns.nbytes[elsewhere[self.columns.object]].sum())

    @property
    def nbytes_new(self) -> int:
        """Stored bytes of the chunks that this save wrote."""
        return int(self.columns.nbytes[self.is_new[self.columns.object]].sum())

    def encode(self) -> bytes:
        body = msgspec.json.encode(self.document)
        return body[:-1] + _tail(body[:-1])


def _manifest(document: Document, has_checksums: bool) -> Manifest:
    return Manifest(document, has_checksums=has_checksums)


def _tail(body: bytes) -> bytes:
    return b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


_TAIL_BYTES = len(_tail(b""))

_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")


class _Header(msgspec.Struct, frozen=True):
    """What a reader looks at before it believes anything else."""

    format: str = ""
    version: str = ""


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check everything that later code relies on. Raises FormatError naming ``where``."""
    try:
        header = msgspec.json.decode(data, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: the manifest is damaged or cut off: {error}") from error
    if header.format != FORMAT:
        raise FormatError(f"{where}: not a cloudckpt manifest (format is {header.format!r})")
    _check_version(header.version, where)
    if data[-_TAIL_BYTES:] != _tail(data[:-_TAIL_BYTES]):
        raise FormatError(f"{where}: the manifest was altered: its sha256 does not match its content")
    try:
        document = msgspec.json.decode(data, type=Document)
    except msgspec.DecodeError as error:
        raise FormatError(f"{where}: malformed manifest: {error}{_newer(header.version)}") from error
    try:
        manifest = Manifest(document)
        check_numbers(document)
        check_table(document.chunks)
        check_objects(document, manifest.columns)
        check_arrays(document.arrays)
        check_chunks(document, manifest.columns, manifest.grids)
        check_tree(document)
    except FormatError as error:
        raise FormatError(f"{where}: {error}{_newer(header.version)}") from error
    return manifest


def _newer(version: str) -> str:
    """Minor versions only add things, but what one of them adds may be what cannot be read here."""
    if int(version.partition(".")[2]) <= MINOR:
        return ""
    return f" (it has format {version}, this cloudckpt reads {VERSION}: a newer one may read it)"


def with_objects(data: bytes, entries: Sequence[ObjectEntry]) -> bytes:
    """An encoded manifest whose objects have other keys and ranks; all else stays, unknown fields included."""
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    del fields["sha256"]
    objects = msgspec.json.decode(fields["objects"], type=list[dict[str, msgspec.Raw]])
    for stored, entry in zip(objects, entries, strict=True):
        stored["key"] = msgspec.Raw(msgspec.json.encode(entry.key))
        stored["rank"] = msgspec.Raw(msgspec.json.encode(entry.rank))
    fields["objects"] = msgspec.Raw(msgspec.json.encode(objects))
    body = msgspec.json.encode(fields)[:-1]
    return body + _tail(body)


def _check_version(version: str, where: str) -> None:
    if not _VERSION.fullmatch(version):
        raise FormatError(f"{where}: malformed format version {version!r:.100}")
    major = version.partition(".")[0]
    if int(major) > MAJOR:
        raise FormatError(
            f"{where}: format version {version} is newer than this cloudckpt reads ({VERSION}); upgrade cloudckpt"
        )
    if int(major) < MAJOR:
        raise FormatError(f"{where}: format version {version} is not supported (this cloudckpt reads {VERSION})")
