"""Plain files that go along with an export: found at any URL, and copied as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt.config import MIB
from cloudckpt.errors import InvalidStateError, NotFoundError
from cloudckpt.store.base import Store, byte_view

WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".distcp"),
    *(".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".npz", ".tflite"),
)
"""Of files in a folder that hold weights, or say where they are."""

READ_BYTES = 8 * MIB


@dataclass(frozen=True, eq=False)
class SideFile:
    """``source``: its key in ``store``; ``key``: where it goes."""

    store: Store
    source: str
    key: str
    nbytes: int


def file_at(store: Store, name: str) -> SideFile:
    """One file, by its name in the folder that the store is. Raises NotFoundError."""
    return SideFile(store, name, name, store.size(name))


def files_below(store: Store) -> list[SideFile]:
    """All files of a folder and the folders in it, but for weights and for what is hidden; sorted."""
    return sorted(
        (
            SideFile(store, found.key, found.key, found.nbytes)
            for found in store.list("")
            if not found.key.lower().endswith(WEIGHT_SUFFIXES) and not _is_hidden(found.key)
        ),
        key=lambda file: file.key,
    )


def check_distinct(files: Sequence[SideFile]) -> None:
    """Raises InvalidStateError where two files would go to one place."""
    seen: dict[str, SideFile] = {}
    for file in files:
        other = seen.setdefault(file.key, file)
        if other is not file:
            raise InvalidStateError(f"files: {file.key} is in {other.store.url} and in {file.store.url}")


def differing(files: Sequence[SideFile], target: Store, there: Mapping[str, int]) -> list[SideFile]:
    """Those that the target has not, byte for byte. ``there``: sizes of what it has, by key."""
    return [f for f in files if there.get(f.key) != f.nbytes or not _is_same(f, target)]


def copy_file(file: SideFile, target: Store) -> None:
    """Durable on return."""
    if file.nbytes <= READ_BYTES:
        target.put(file.key, file.store.get(file.source))
        return
    upload = target.open_upload(file.key, file.nbytes)
    try:
        for data in _ranges(file.store, file.source, file.nbytes):
            upload.write(data)
        upload.close()
    finally:
        upload.abort()


def _is_same(file: SideFile, target: Store) -> bool:
    try:
        pairs = zip(_ranges(file.store, file.source, file.nbytes), _ranges(target, file.key, file.nbytes), strict=True)
        return all(a == b for a, b in pairs)
    except NotFoundError:
        return False  # removed since it was listed


def _ranges(store: Store, key: str, nbytes: int) -> Iterator[bytes]:
    for start in range(0, nbytes, READ_BYTES):
        size = min(READ_BYTES, nbytes - start)
        yield b"".join(bytes(byte_view(part)) for part in store.stream(key, start, size))


def _is_hidden(key: str) -> bool:
    return any(part.startswith(".") for part in key.split("/"))


def options_for(url_scheme: str | None, *places: tuple[str | None, Mapping[str, Any] | None]) -> dict[str, Any]:
    """The storage options of the first of the places, ``(scheme, options)``, whose scheme is the same."""
    return next((dict(options or {}) for scheme, options in places if scheme == url_scheme), {})
