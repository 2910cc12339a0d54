"""The manifest: the one document that makes a checkpoint exist, and says where every byte of it is."""

from __future__ import annotations

import bisect
import hashlib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cloudckpt.errors import FormatError
from cloudckpt.format.codec import DIGEST_BYTES
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.grid import EncodedCuts, Grid
from cloudckpt.format.keys import MAX_STEP, check_key, check_name, is_of_attempt, split_key
from cloudckpt.format.tree import MAX_RANKS, array_leaves, children, path_text, per_rank_leaves, values_by_rank
from cloudckpt.format.values import MAX_DEPTH

FORMAT = "cloudckpt"
MAJOR, MINOR = 1, 2
VERSION = f"{MAJOR}.{MINOR}"

MAX_DIMS = 64
"""As many as numpy has."""
_MAX_BYTES = 2**62
"""Sizes above this are nonsense, and sums of them would overflow int64."""


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


_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")


class _Header(msgspec.Struct, frozen=True):
    """What a reader looks at before it believes anything else."""

    format: str = ""
    version: str = ""


_COLUMNS = (("object", "<u4"), ("byte_offset", "<u8"), ("nbytes", "<u4"), ("crc32c", "<u4"))


class ChunkColumns:
    """The chunk table as int64 numpy columns (CRC-32C as uint32)."""

    def __init__(self, table: ChunkTable) -> None:
        arrays = {name: np.frombuffer(getattr(table, name), dtype=kind) for name, kind in _COLUMNS}
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
        columns = dict(zip((n for n, _ in _COLUMNS), (object, byte_offset, nbytes, crc32c), strict=True))
        packed = {name: columns[name].astype(kind).tobytes() for name, kind in _COLUMNS}
        return ChunkTable(count=len(object), digest=None if digest is None else digest.tobytes(), **packed)


_first_chunk = operator.attrgetter("first_chunk")


class Manifest:
    """A validated manifest. Grids and columns are built once, on first use."""

    def __init__(self, document: Document) -> None:
        self.document = document

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


def _tail(body: bytes) -> bytes:
    return b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


_TAIL_BYTES = len(_tail(b""))


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
        _check_numbers(document)
        _check_table(manifest)
        _check_objects(manifest)
        _check_arrays(manifest)
        _check_tree(manifest)
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


def _check_numbers(document: Document) -> None:
    if not 1 <= document.world_size <= MAX_RANKS:
        raise FormatError(f"impossible world size {_shown(document.world_size)}")
    if document.step is not None and not 0 <= document.step <= MAX_STEP:
        raise FormatError(f"impossible step {_shown(document.step)}")
    if not 0 <= document.branch <= MAX_STEP:
        raise FormatError(f"impossible branch {_shown(document.branch)}")
    if any(not 0 <= extent < _MAX_BYTES for mesh in document.meshes for extent in mesh.shape):
        raise FormatError("impossible shape of a mesh")


def _shown(number: int) -> str:
    """Of any size: Python refuses to print what has more than 4300 decimal digits."""
    return str(number) if number.bit_length() <= 64 else f"of {number.bit_length()} bits"


def _check_table(manifest: Manifest) -> None:
    table = manifest.document.chunks
    for name, kind in _COLUMNS:
        if len(getattr(table, name)) != table.count * np.dtype(kind).itemsize:
            raise FormatError(f"chunk table: column {name!r} does not hold {table.count} rows")
    if table.digest is not None and len(table.digest) != table.count * DIGEST_BYTES:
        raise FormatError(f"chunk table: column 'digest' does not hold {table.count} rows")


def _check_objects(manifest: Manifest) -> None:
    keys = set()
    for entry in manifest.objects:
        check_key(entry.key)
        if entry.key in keys:
            raise FormatError(f"object {entry.key!r} is listed twice")
        if not 0 <= entry.nbytes < _MAX_BYTES or not 0 <= entry.crc32c < 2**32:
            raise FormatError(f"object {entry.key!r}: impossible size or checksum")
        # Other attempts may have had more ranks: those of siblings, and one that this replaced, whose objects it keeps.
        is_new = is_of_attempt(entry.key, manifest.document.attempt)
        if not 0 <= entry.rank < (manifest.document.world_size if is_new else MAX_RANKS):
            raise FormatError(f"object {entry.key!r}: impossible rank {_shown(entry.rank)}")
        keys.add(entry.key)
    columns = manifest.columns
    if not len(columns):
        return
    if int(columns.object.max()) >= len(manifest.objects):
        raise FormatError("chunk table: a chunk lies in an object that is not listed")
    if int(columns.byte_offset.min()) < 0:
        raise FormatError("chunk table: a byte offset does not fit 63 bits")
    sizes = np.array([o.nbytes for o in manifest.objects], dtype=np.int64)[columns.object]
    outside = np.nonzero((columns.byte_offset > sizes) | (columns.nbytes > sizes - columns.byte_offset))[0]
    if len(outside):
        chunk = int(outside[0])
        key = manifest.objects[int(columns.object[chunk])].key
        raise FormatError(f"chunk table: chunk {chunk} ends behind the end of object {key!r}")
    _check_overlaps(manifest)


def _check_overlaps(manifest: Manifest) -> None:
    """What all chunks claim together must not be more than what is stored: no bytes serve twice."""
    columns = manifest.columns
    order = np.lexsort((columns.byte_offset, columns.object))
    holder, start = columns.object[order], columns.byte_offset[order]
    end = start + columns.nbytes[order]
    overlaps = np.nonzero((holder[1:] == holder[:-1]) & (start[1:] < end[:-1]))[0]
    if len(overlaps):
        first, second = sorted(order[overlaps[0] : overlaps[0] + 2].tolist())
        key = manifest.objects[int(holder[overlaps[0]])].key
        raise FormatError(f"chunk table: chunks {first} and {second} overlap in object {key!r}")


def _check_arrays(manifest: Manifest) -> None:
    if len({entry.name.lower() for entry in manifest.arrays}) != len(manifest.arrays):
        raise FormatError("two arrays have one name")
    for entry in manifest.arrays:
        check_name(entry.name)
        if len(entry.shape) > MAX_DIMS:
            raise FormatError(f"array {entry.name!r}: {len(entry.shape)} dims; more than {MAX_DIMS} cannot be read")
        if entry.compression not in (None, "zstd"):
            raise FormatError(f"array {entry.name!r}: unknown compression {entry.compression!r}")
        if (
            any(not 0 <= s < _MAX_BYTES for s in entry.shape)
            or math.prod(entry.shape) * dtype(entry.dtype).itemsize >= _MAX_BYTES
        ):
            raise FormatError(f"array {entry.name!r}: impossible shape [{', '.join(map(_shown, entry.shape))}]")
        if any(_largest(cuts) >= _MAX_BYTES for cuts in entry.grid):
            raise FormatError(f"array {entry.name!r}: impossible grid")
    next_chunk = 0
    for array, (entry, grid) in enumerate(zip(manifest.arrays, manifest.grids, strict=True)):
        if entry.first_chunk != next_chunk:
            raise FormatError(f"array {entry.name!r}: its chunks do not follow those of the array before it")
        next_chunk += grid.num_chunks
        if next_chunk > manifest.document.chunks.count:
            raise FormatError(f"array {entry.name!r}: the chunk table ends before its chunks do")
        _check_chunk_sizes(manifest, array, grid)
    if next_chunk != manifest.document.chunks.count:
        raise FormatError(f"the arrays have {next_chunk} chunks, the chunk table {manifest.document.chunks.count}")


def _largest(cuts: EncodedCuts) -> int:
    if isinstance(cuts, int):
        return cuts
    return max((n for run in cuts for n in ((run,) if isinstance(run, int) else run)), default=0)


def _check_chunk_sizes(manifest: Manifest, array: int, grid: Grid) -> None:
    """What a chunk claims to unpack to must be in proportion to what is stored: no bombs, no short reads."""
    entry = manifest.arrays[array]
    if not grid.num_chunks:
        return
    stored = manifest.columns.nbytes[entry.first_chunk : entry.first_chunk + grid.num_chunks] - 4
    if int(stored.min()) < 0:
        raise FormatError(f"array {entry.name!r}: the stored bytes of a chunk do not even hold its checksum")
    if math.prod(float(c if isinstance(c, int) else max(c, default=1)) for c in grid.cuts) > 2**31:
        raise FormatError(f"array {entry.name!r}: its chunks are larger than 2 GiB")
    full = grid.stored_elements * dtype(entry.dtype).itemsize
    if int(full.max()) > 2**31:
        raise FormatError(f"array {entry.name!r}: its chunks are larger than 2 GiB")
    if entry.compression is None and not (stored == full).all():
        raise FormatError(f"array {entry.name!r}: stored bytes of a chunk differ from its size in the grid")


def _check_tree(manifest: Manifest) -> None:
    _check_depth(manifest.document.tree)
    for path, node in array_leaves(manifest.document.tree):
        if not isinstance(node["array"], str) or node["array"] not in manifest.array_index:
            raise FormatError(
                f"the tree refers to an array {node['array']!r} at {path_text(path)!r} that is not listed"
            )
    for path, node in per_rank_leaves(manifest.document.tree):
        if max(values_by_rank(node), default=0) >= manifest.document.world_size:
            raise FormatError(f"{path_text(path)!r}: a per-rank value of a rank beyond the world size")


def _check_depth(tree: Any) -> None:
    """What walks a tree later may do so by recursion."""
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        level = [child for node in level for _, child in children(node) or ()]
        if not level:
            return
    raise FormatError(f"the tree is nested more than {MAX_DEPTH} levels deep")
