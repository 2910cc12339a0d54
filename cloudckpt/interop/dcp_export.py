"""From what is stored to the items, files and `.metadata` of a DCP checkpoint."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from cloudckpt.checkpoint import by_rank
from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.box import Box
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.tree import Node, holds_arrays
from cloudckpt.interop.torch_archive_writer import Frame, frame
from cloudckpt.plan.dcp_items import FlatLeaf, flat_leaves, groups, item_boxes, within
from cloudckpt.plan.regrow import regrow
from cloudckpt.plan.selection import Selection
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.pytorch.per_rank import decode_inline
from cloudckpt.pytorch.runs import RunReader, RunSource
from cloudckpt.store.base import Buffer

VERSION = "1.0.0"
"""Of the format, as torch has it since 2.10 or so; earlier ones do not look."""


@dataclass(frozen=True, slots=True)
class Item:
    """A box of a tensor, written as one archive; ``dtype``: what its elements are to be."""

    key: str
    box: Box
    dtype: str
    array: VirtualArray

    @property
    def frame(self) -> Frame:
        return frame(self.dtype, self.box.shape)


@dataclass(frozen=True, eq=False)
class DcpFile:
    """``items``: in the order of their bytes."""

    key: str
    nbytes: int
    items: tuple[Item, ...]

    @property
    def sources(self) -> tuple[RunSource, ...]:
        return tuple(RunSource(item.key, within(item.array, item.box), item.dtype) for item in self.items)

    def render(self, reader: RunReader) -> Iterator[Buffer]:
        """The bytes of the file, given those of its tensors."""
        number = -1
        current: Frame | None = None
        crc = 0
        for run, data in reader:
            while number < run.array:
                if current is not None:
                    yield current.tail(crc)
                number += 1
                current, crc = self.items[number].frame, 0
                yield current.front
            crc = zlib.crc32(data.data, crc)
            yield data
        # Those without elements have no runs.
        for item in self.items[number + 1 :]:
            if current is not None:
                yield current.tail(crc)
            current, crc = item.frame, 0
            yield current.front
        if current is not None:
            yield current.tail(crc)


@dataclass(frozen=True, eq=False)
class DcpPlan:
    """``files``: of tensors, each with the rank that writes it. ``values``: the file of all else, None without any."""

    files: tuple[tuple[int, DcpFile], ...]
    values: tuple[str, bytes] | None
    metadata: bytes
    num_tensors: int
    num_values: int


Load = Callable[[str, Node], Any]
"""Makes what holds arrays but is no tensor: in memory."""


def plan_dcp(selection: Selection, casts: Mapping[str, str], load: Load, num_ranks: int) -> DcpPlan:
    """``casts``: float types by pattern of flat keys, for floats; the first that matches counts.

    Raises InvalidStateError for two keys that are one once they are flat, and for casts that match nothing.
    """
    leaves = _leaves(selection)
    entries: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    items: list[Item] = []
    first: dict[tuple[str, str, tuple[int, ...]], str] = {}
    tied: dict[str, str] = {}
    used: set[str] = set()
    for leaf in leaves:
        if not _is_tensor(leaf.node):
            entries[leaf.key] = dcp.BytesStorageMetadata()
            continue
        array = selection.array(leaf.node)
        kind = array.dtype
        pattern = next((p for p in casts if p == leaf.key or fnmatchcase(leaf.key, p)), None)
        if pattern is not None and _is_float(kind):
            used.add(pattern)
            kind = casts[pattern]
        boxes = item_boxes(array.shape, dtype(kind).itemsize)
        entries[leaf.key] = _entry(kind, array.shape, boxes)
        name = first.setdefault((leaf.node["array"], kind, array.shape), leaf.key)
        if name == leaf.key:
            items += [Item(leaf.key, box, kind, array) for box in boxes]
        else:
            tied[leaf.key] = name
    idle = [pattern for pattern in casts if pattern not in used]
    if idle:
        raise InvalidStateError(f"cast: no tensor of floats matches {', '.join(map(repr, idle))}")
    files = _files(items, num_ranks, storage)
    for key, name in tied.items():
        for index, chunk in enumerate(entries[name].chunks):
            storage[dcp.MetadataIndex(key, chunk.offsets, index)] = storage[dcp.MetadataIndex(name, chunk.offsets)]
    plain = _values([leaf for leaf in leaves if not _is_tensor(leaf.node)], load, storage)
    paths = {leaf.key: leaf.path for leaf in leaves}
    metadata = dcp.Metadata(entries, paths, storage)
    if "version" in dcp.Metadata.__dataclass_fields__:
        metadata.version = VERSION
    num_tensors = sum(1 for leaf in leaves if _is_tensor(leaf.node))
    return DcpPlan(files, plain, pickle.dumps(metadata), num_tensors, len(leaves) - num_tensors)


def _leaves(selection: Selection) -> list[FlatLeaf]:
    tree = selection.manifest.document.tree
    found = list(flat_leaves(regrow(tree, [(leaf.path, leaf.old, leaf.node) for leaf in selection.leaves])))
    seen: dict[str, FlatLeaf] = {}
    clashes = []
    for leaf in found:
        other = seen.setdefault(leaf.key, leaf)
        if other is not leaf:
            clashes.append(f"{other.path} and {leaf.path} are both {leaf.key!r} for DCP")
    if clashes:
        raise InvalidStateError(f"keys clash: {'; '.join(clashes[:20])}; give them other names with rename")
    return found


def _is_tensor(node: Node) -> bool:
    return isinstance(node, dict) and node.get("$") == "tensor"


def _is_float(kind: str) -> bool:
    return kind == "bfloat16" or (kind.startswith("float") and not kind.startswith("float4"))


def _entry(kind: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> dcp.TensorStorageMetadata:
    chunks = [dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(getattr(torch, kind)), torch.Size(shape), chunks)


def _files(
    items: Sequence[Item], num_ranks: int, storage: dict[dcp.MetadataIndex, _StorageInfo]
) -> tuple[tuple[int, DcpFile], ...]:
    """Files of about the same size, to the ranks in turn."""
    sizes = [item.frame.total_bytes for item in items]
    found = []
    for number, span in enumerate(groups(sizes, num_ranks)):
        rank = number % num_ranks
        key = f"__{rank}_{1 + number // num_ranks}.distcp"
        position = 0
        for i in span:
            storage[dcp.MetadataIndex(items[i].key, items[i].box.offset)] = _StorageInfo(key, position, sizes[i])
            position += sizes[i]
        found.append((rank, DcpFile(key, position, tuple(items[i] for i in span))))
    return tuple(found)


def _values(
    leaves: Sequence[FlatLeaf], load: Load, storage: dict[dcp.MetadataIndex, _StorageInfo]
) -> tuple[str, bytes] | None:
    key = "__0_0.distcp"
    data = bytearray()
    for leaf in leaves:
        buffer = io.BytesIO()
        torch.save(_value(leaf, load), buffer)
        storage[dcp.MetadataIndex(leaf.key)] = _StorageInfo(key, len(data), buffer.tell())
        data += buffer.getbuffer()
    return (key, bytes(data)) if leaves else None


def _value(leaf: FlatLeaf, load: Load) -> Any:
    if isinstance(leaf.node, dict) and leaf.node.get("$") == "per_rank":
        return by_rank(leaf.node, decode_inline)
    return load(leaf.key, leaf.node) if holds_arrays(leaf.node) else values.decode(leaf.node)
