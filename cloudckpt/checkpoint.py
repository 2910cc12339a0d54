"""One checkpoint as its manifest describes it. Works without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import msgspec

from cloudckpt import catalog
from cloudckpt._cached import cached_property
from cloudckpt.config import Config
from cloudckpt.errors import FormatError
from cloudckpt.format import values
from cloudckpt.format.grid import Grid
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import array_leaves, path_text, values_by_rank
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve

T = TypeVar("T")

_HIDDEN_PICKLE = "pickle, not loaded"


@dataclass(frozen=True)
class ArrayInfo:
    """One stored tensor. ``path`` is its (first) dotted path; ``nbytes`` counts what is stored, checksums included."""

    name: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    grid: Grid = field(repr=False)
    compression: str | None
    nbytes: int


@dataclass(frozen=True)
class Placeholder:
    """Stands in a tree for a value that cannot be shown: a pickle, or a type of torch's while torch is not imported."""

    tag: str
    node: str
    """The stored JSON."""

    def __repr__(self) -> str:
        shown = {k: v for k, v in msgspec.json.decode(self.node).items() if k not in ("$", "base64")}
        return f"<{self.tag}{''.join(f' {key}={value}' for key, value in shown.items())}>"


class Arrays(Mapping[str, ArrayInfo]):
    """The distinct arrays by name, in stored order; dotted paths are understood too, those of tied tensors included."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._numbers = dict(manifest.array_index)
        for path, node in array_leaves(manifest.document.tree):
            self._numbers.setdefault(path_text(path), manifest.array_index[node["array"]])

    def __getitem__(self, name: str) -> ArrayInfo:
        return array_info(self._manifest, self._numbers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.array_index)

    def __len__(self) -> int:
        return len(self._manifest.arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __repr__(self) -> str:
        return f"<{len(self)} arrays>"


class Checkpoint:
    """A committed checkpoint; close it, or use it in a ``with`` block."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"Checkpoint({self.url!r}, step={self.step})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def step(self) -> int | None:
        return self.manifest.document.step

    @cached_property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        return Arrays(self.manifest)

    @cached_property
    def tree(self) -> Any:
        """The saved state with an `ArrayInfo` where an array was, and a list by rank where a PerRank was."""
        return self._decoded(self.manifest.document.tree, self._leaf)

    @cached_property
    def metadata(self) -> Any:
        """What ``save`` was given as ``metadata``."""
        return self._decoded(self.manifest.document.metadata, _placeholder)

    def close(self) -> None:
        self.store.close()

    def _decoded(self, node: values.Node, leaf: values.LeafDecoder) -> Any:
        try:
            return _decoded(node, leaf)
        except FormatError as error:
            raise FormatError(f"{self.url}: {error}") from error

    def _leaf(self, node: dict[str, Any]) -> Any:
        if node["$"] in ("tensor", "ndarray"):
            return array_info(self.manifest, self.manifest.array_number(node))
        if node["$"] == "per_rank":
            return by_rank(node, lambda value: _decoded(value, _placeholder))
        return _placeholder(node)


def open_checkpoint(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> Checkpoint:
    """Read the manifest at ``url`` and check it. Raises NotFoundError, FormatError or StoreError."""
    store = resolve(url, storage_options, config)
    try:
        return Checkpoint(store, catalog.read_manifest(store))
    except BaseException:
        store.close()
        raise


def array_info(manifest: Manifest, number: int) -> ArrayInfo:
    entry, grid = manifest.arrays[number], manifest.grids[number]
    stored = manifest.columns.nbytes[entry.first_chunk : entry.first_chunk + grid.num_chunks]
    return ArrayInfo(
        name=entry.name,
        path=manifest.path(number),
        dtype=entry.dtype,
        shape=entry.shape,
        grid=grid,
        compression=entry.compression,
        nbytes=int(stored.sum()),
    )


def by_rank(node: Mapping[str, Any], decode: Callable[[values.Node], T]) -> list[T | None]:
    """The values of a "per_rank" leaf, with None for ranks below the last that have none."""
    held = values_by_rank(node)
    found: list[T | None] = [None] * (1 + max(held, default=-1))
    for rank, value in held.items():
        found[rank] = decode(value)
    return found


def _decoded(node: values.Node, leaf: values.LeafDecoder) -> Any:
    return values.decode(_without_pickles(node), leaf=leaf)


def _without_pickles(tree: values.Node) -> values.Node:
    """A copy in which pickles have a tag that is unknown, so that they are leaves instead of errors."""
    copy: values.Node = msgspec.json.decode(msgspec.json.encode(tree))
    stack: list[Any] = [copy]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            stack.extend(node.values())
            if node.get("$") == "pickle":
                node["$"] = _HIDDEN_PICKLE
    return copy


def _placeholder(node: dict[str, Any]) -> Placeholder:
    tag = "pickle" if node["$"] == _HIDDEN_PICKLE else node["$"]
    return Placeholder(tag, msgspec.json.encode({**node, "$": tag}).decode())
