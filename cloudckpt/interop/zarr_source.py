"""Arrays that others have written with zarr, version 2 or 3: what there is, described for an import."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zarr

from cloudckpt.errors import FormatError, NotFoundError
from cloudckpt.format.dtypes import DType, from_numpy
from cloudckpt.format.grid import Grid
from cloudckpt.interop import zarr_dtypes  # noqa: F401  # registers the data types
from cloudckpt.interop.foreign import ArrayRef, Foreign, Origin, manifest_of
from cloudckpt.interop.zarr_keys import KeysStore, is_metadata
from cloudckpt.interop.zarr_tiles import cells, object_grid, tiles
from cloudckpt.store.base import Store
from cloudckpt.store.paths import join, parent

_CHUNK = re.compile(r"(c[/.])?[0-9]+([/.][0-9]+)*|c")
_OCDBT = "manifest.ocdbt"
MAX_NAMED = 10
"""How many of what is wrong a message lists."""


@dataclass(frozen=True, eq=False)
class ZarrForeign(Foreign):
    """``arrays``: path below the source, by number in the manifest. ``documents``, ``whole``: see `KeysStore`."""

    arrays: tuple[str, ...] = ()
    documents: Mapping[str, bytes] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()


def open_zarr_source(origin: Origin) -> ZarrForeign:
    """All arrays at and below a URL, nested by the parts of their paths; one that is the root itself goes by its name.

    Arrays are found by listing; consolidated metadata are not looked at. The attributes of the root are the metadata
    of the state. Chunks that are absent count as zarr has it, as fill values, and a note tells of them.

    Raises NotFoundError where nothing is, FormatError for what is no zarr, OCDBT of TensorStore and orbax included, and
    for arrays of types that torch lacks, all of which it names.
    """
    documents = _Documents(origin.store, max(1, origin.config.num_threads))
    paths = documents.find_arrays()
    where = origin.store.url
    if not paths:
        raise NotFoundError(
            f"{where}: nothing is there, or no zarr array and no group (no zarr.json, .zarray, .zgroup)"
        )
    keys = KeysStore(origin.store, documents.found, frozenset())
    arrays = {path: open_array(keys, path, where) for path in paths}
    kinds = _kinds(arrays, where)
    wanted = {path: object_grid(array).counts for path, array in arrays.items()}
    absent = documents.count_absent(wanted)
    _check_fill_values([path for path in absent if documents.fill_value(path) is None], where)
    grids = [_cut(arrays[path], kinds[path].itemsize, origin.config.chunk_bytes) for path in paths]
    names = {path: path or _own_name(where) for path in paths}
    manifest = manifest_of(
        [(names[path], kinds[path].name, grid) for path, grid in zip(paths, grids, strict=True)],
        _nested(names),
        metadata=documents.root_attributes(),
    )
    return ZarrForeign(
        manifest,
        is_cut=True,
        notes=_notes(absent, wanted, where),
        arrays=tuple(paths),
        documents=documents.found,
        whole=frozenset(paths) - absent.keys(),
    )


def open_array(keys: KeysStore, path: str, where: str) -> zarr.Array[Any]:
    """Any failure is a FormatError: what metadata say, and what plugins make of it, may be anything."""
    try:
        return zarr.open_array(keys, path=path, mode="r")
    except Exception as error:
        raise FormatError(f"{where}: array {path!r} cannot be opened: {type(error).__name__}: {error}") from error


class _Documents:
    """The metadata of a hierarchy. ``found``: by key."""

    def __init__(self, store: Store, num_threads: int) -> None:
        self._store = store
        self._num_threads = num_threads
        self.found: dict[str, bytes] = {}

    def find_arrays(self) -> list[str]:
        """Their paths, sorted. Folders without metadata are looked into: TensorStore writes no groups."""
        arrays: list[str] = []
        level = [""]
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="cloudckpt-zarr") as pool:
            while level:
                groups: list[str] = []
                for path, is_array in zip(level, pool.map(self._is_array, level), strict=True):
                    (arrays if is_array else groups).append(path)
                below = pool.map(self._store.common_prefixes, groups)
                level = [join(path, name) for path, names in zip(groups, below, strict=True) for name in names]
        return sorted(arrays)

    def _is_array(self, path: str) -> bool:
        if self._read(join(path, "zarr.json")):
            return bool(self._field(join(path, "zarr.json"), "node_type") == "array")
        if self._read(join(path, ".zarray")):
            self._read(join(path, ".zattrs"))
            return True
        if path and self._read(join(path, ".zgroup")):
            return False
        self._refuse_ocdbt(path)
        return False

    def _read(self, key: str) -> bool:
        try:
            self.found[key] = self._store.get(key)
        except NotFoundError:
            return False
        return True

    def _refuse_ocdbt(self, path: str) -> None:
        """The database of TensorStore in which orbax keeps arrays has zarr's metadata within its own files."""
        try:
            self._store.size(join(path, _OCDBT))
        except NotFoundError:
            return
        raise FormatError(
            f"{join(self._store.url, path)} is an OCDBT database, as orbax writes by default, and no plain zarr: "
            "restore it with orbax and save that with cloudckpt, or write it anew with use_ocdbt=False and import that"
        )

    def count_absent(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """By array, where it is any: how many of the objects that it should have are not there."""
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="cloudckpt-zarr") as pool:
            counts = pool.map(self._count_chunks, wanted, wanted.values())
            found = zip(wanted.items(), counts, strict=True)
            return {path: math.prod(grid) - count for (path, grid), count in found if count < math.prod(grid)}

    def _count_chunks(self, path: str, grid: tuple[int, ...]) -> int:
        start = len(path) + 1 if path else 0
        keys = (info.key[start:] for info in self._store.list(path))
        return sum(_is_within(key, grid) and not is_metadata(key) for key in keys)

    def fill_value(self, path: str) -> Any:
        """As it is written; None where there is none: what absent chunks hold is not defined then."""
        key = next(key for name in ("zarr.json", ".zarray") if (key := join(path, name)) in self.found)
        return self._field(key, "fill_value")

    def root_attributes(self) -> dict[str, Any]:
        if "zarr.json" in self.found:
            return dict(self._field("zarr.json", "attributes") or {})
        return self._object(".zattrs") if ".zattrs" in self.found or self._read(".zattrs") else {}

    def _field(self, key: str, name: str) -> Any:
        return self._object(key).get(name)

    def _object(self, key: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self.found[key], type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"{key} of {self._store.url} is not a JSON object: {error}") from error


def _kinds(arrays: Mapping[str, zarr.Array[Any]], where: str) -> dict[str, DType]:
    kinds = {path: _kind(array.dtype) for path, array in arrays.items()}
    strange = [f"{path or where} ({arrays[path].dtype})" for path, kind in kinds.items() if kind is None]
    if strange:
        raise FormatError(f"{where}: torch has no type for {_listed(strange)}; move them away, or make numbers of them")
    return {path: kind for path, kind in kinds.items() if kind is not None}


def _kind(native: np.dtype[Any]) -> DType | None:
    # The order of bytes is zarr's affair: what it reads is turned into this machine's.
    return from_numpy(native.newbyteorder("<") if native.kind in "iufc" else native)


def _check_fill_values(undefined: Sequence[str], where: str) -> None:
    if undefined:
        raise FormatError(f"{where}: chunks are absent, and no fill value says what they hold: {_listed(undefined)}")


def _is_within(key: str, grid: tuple[int, ...]) -> bool:
    """Whether it is the key of a chunk that the array has: what was cut off may still be there."""
    if _CHUNK.fullmatch(key) is None:
        return False
    index = [int(digits) for digits in re.findall("[0-9]+", key)]
    if not grid:
        return index in ([], [0])
    return len(index) == len(grid) and all(i < count for i, count in zip(index, grid, strict=True))


def _notes(absent: Mapping[str, int], wanted: Mapping[str, tuple[int, ...]], where: str) -> tuple[str, ...]:
    if not absent:
        return ()
    told = [f"{path or where} ({count} of {math.prod(wanted[path])})" for path, count in absent.items()]
    return (f"{where}: absent chunks are taken for fill values, as zarr does: {_listed(told)}",)


def _cut(array: zarr.Array[Any], itemsize: int, chunk_bytes: int) -> Grid:
    return cells(tiles(array, itemsize, chunk_bytes), itemsize, chunk_bytes)


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return f"{', '.join(texts[:MAX_NAMED])}{more}"


def _own_name(url: str) -> str:
    """``weights`` of ``s3://bucket/weights.zarr``."""
    name = parent(url)[1]
    return name.removesuffix(".zarr") or name or "array"


def _nested(names: Mapping[str, str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for path, name in names.items():
        *folders, last = _parts(path, name)
        place = state
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = ArrayRef(name)
    return state


def _parts(path: str, name: str) -> Iterator[str]:
    yield from path.split("/") if path else (name,)
