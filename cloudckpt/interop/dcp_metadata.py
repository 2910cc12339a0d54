"""What the ``.metadata`` of a torch DCP checkpoint says, read without Python's unpickler.

The names and fields are those of ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``, in torch 1.13
(where they were below ``torch.distributed._shard``) and all releases since.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import FormatError
from cloudckpt.format.box import Box
from cloudckpt.interop.pickle_reader import Global, Inert, read_pickle

METADATA_KEY = ".metadata"

_ALLOWED = re.compile(
    r"torch\.distributed\.(checkpoint|_shard)\.[\w.]+"  # all that its planners and storages put there is data
    r"|megatron\.core\.dist_checkpointing\.[\w.]+"
    r"|torch\.(Size|device|storage\.\w+|serialization\._get_layout|[a-z]+[a-z0-9_]*)"
    r"|collections\.(OrderedDict|defaultdict)|pathlib\.\w+|(builtins|__builtin__)\.(set|frozenset|list|dict|tuple)"
)


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of a DCP checkpoint; ``boxes``: its chunks."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Where an item lies. ``transforms``: through which streams its bytes went, the last first."""

    key: str
    byte_offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class DcpMetadata:
    """``entries``: by flat key of the state; None for what is no tensor.

    ``items``: by key, and offset of the chunk (None for what is no tensor). ``paths``: where the state dict had what is
    under a flat key, as far as the planner noted it.
    """

    entries: Mapping[str, DcpTensor | None]
    items: Mapping[tuple[str, tuple[int, ...] | None], DcpItem]
    paths: Mapping[str, tuple[str | int, ...]]
    version: str | None = None


def read_metadata(data: bytes, where: str) -> DcpMetadata:
    """FormatError for a pickle that would execute anything, naming it, and for what is not DCP's metadata."""
    with _collector_paused():
        root, named, _ = read_pickle(data, where)
    refused = sorted(name for name in named if not _ALLOWED.fullmatch(name))
    if refused:
        raise FormatError(
            f"{where}: the pickle refers to {', '.join(refused[:5])}, which is no part of DCP's metadata; unpickling it"
            " could run code, and it is not read"
        )
    try:
        return _metadata(root)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: not the metadata of a DCP checkpoint: {error!s:.200}") from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Millions of new objects, none of which is garbage yet: the collector would take longer than all else."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _metadata(root: Any) -> DcpMetadata:
    fields = _fields(root, "Metadata")
    entries: dict[str, DcpTensor | None] = {}
    for key, entry in _mapping(fields["state_dict_metadata"], "state_dict_metadata").items():
        if _is(entry, "TensorStorageMetadata"):
            entries[_str(key)] = _tensor(_fields(entry, "TensorStorageMetadata"))
        elif _is(entry, "BytesStorageMetadata"):
            entries[_str(key)] = None
        else:
            raise ValueError(f"{key!r:.100} is described by {entry!r:.100}")
    items = {}
    for index, info in _mapping(fields.get("storage_data"), "storage_data").items():
        at = _fields(index, "MetadataIndex")
        offset = at.get("offset")
        items[_str(at["fqn"]), None if offset is None else _ints(offset)] = _item(_fields(info, "_StorageInfo"))
    version = fields.get("version")
    return DcpMetadata(entries, items, _paths(fields.get("planner_data")), version and _str(version))


def _tensor(fields: Mapping[str, Any]) -> DcpTensor:
    chunks = (_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"])
    boxes = tuple(Box(_ints(chunk["offsets"]), _ints(chunk["sizes"])) for chunk in chunks)
    return DcpTensor(_dtype(fields["properties"]), _ints(fields["size"]), boxes)


def _dtype(properties: Any) -> str:
    """The first of the fields of TensorProperties, whose state is a tuple, or a dict."""
    if not _is(properties, "TensorProperties"):
        raise ValueError(f"{properties!r:.100} are no TensorProperties")
    state = properties.state
    found = state["dtype"] if isinstance(state, dict) else state[0]
    if type(found) is not Global or not found.name.startswith("torch."):
        raise ValueError(f"{found!r:.100} is no dtype")
    return found.name.removeprefix("torch.")


def _item(fields: Mapping[str, Any]) -> DcpItem:
    offset, length = fields["offset"], fields["length"]
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"an item of {length!r:.50} bytes at {offset!r:.50}")
    transforms = tuple(_str(name) for name in fields.get("transform_descriptors") or ())
    return DcpItem(_str(fields["relative_path"]), offset, length, transforms)


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Planners other than the default one put there what they like."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        key: path
        for key, path in planner_data.items()
        if type(key) is str and type(path) is tuple and path and all(type(part) in (str, int) for part in path)
    }


def _is(value: Any, name: str) -> bool:
    return type(value) is Inert and value.kind.rpartition(".")[2] == name


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not _is(value, name) or not isinstance(value.state, dict):
        raise ValueError(f"{value!r:.100} where a {name} should be")
    return value.state


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is Inert and value.kind == "collections.OrderedDict":
        return dict(value.pairs)
    if not isinstance(value, dict):
        raise ValueError(f"its {what} is {value!r:.100}")
    return value


def _ints(value: Any) -> tuple[int, ...]:
    """Of a torch.Size, a tuple or a list."""
    if type(value) is Inert and value.kind == "torch.Size":
        (value,) = value.args
    if not isinstance(value, tuple | list) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise ValueError(f"{value!r:.100} is no shape")
    return tuple(value)


def _str(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.100} is no string")
    return value
