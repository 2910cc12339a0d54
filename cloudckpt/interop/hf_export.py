"""From what is stored to the safetensors files of an export, and the index over them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format.dtypes import DTYPES, from_numpy, numpy_dtype
from cloudckpt.format.tree import is_array
from cloudckpt.interop.safetensors_header import METADATA
from cloudckpt.interop.safetensors_writer import DTYPE_NAMES, Entry, encode_header, has_dtype, in_file_order
from cloudckpt.plan.hf_shards import file_names, split
from cloudckpt.plan.moves import Leaf
from cloudckpt.plan.selection import Selection, kind_of
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.pytorch.runs import RunSource

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, eq=False)
class HfFile:
    """One file of weights. ``sources``: its tensors in the order of their bytes, which follow ``header``."""

    key: str
    header: bytes
    sources: tuple[RunSource, ...]
    data_nbytes: int


@dataclass(frozen=True, eq=False)
class HfPlan:
    """``index``: the document over several files, None for one. ``tied``: names left out, and what stands for them."""

    files: tuple[HfFile, ...]
    index: bytes | None
    tied: dict[str, str] = field(default_factory=dict)

    @property
    def num_tensors(self) -> int:
        return sum(len(file.sources) for file in self.files)

    @property
    def data_nbytes(self) -> int:
        return sum(file.data_nbytes for file in self.files)


def float_name(name: Any) -> str:
    """A float type by torch's name or a common short one. Raises InvalidStateError for what floats are not made."""
    text = str(name).removeprefix("torch.")
    text = _ALIASES.get(text, text)
    if not (_is_float(text) and text in DTYPE_NAMES):
        known = sorted(known for known in DTYPE_NAMES if _is_float(known))
        raise InvalidStateError(f"dtype: floats do not become {name!r:.100}, but any of {', '.join(known)}")
    return text


def casts_by_pattern(dtype: Any) -> dict[str, str]:
    """``dtype``: None, a type for all floats, or types by pattern."""
    if dtype is None:
        return {}
    if isinstance(dtype, Mapping):
        return {str(pattern): float_name(name) for pattern, name in dtype.items()}
    return {"*": float_name(dtype)}


def plan_hf(
    selection: Selection, casts: Mapping[str, str], max_shard_bytes: int, metadata: Mapping[str, str]
) -> HfPlan:
    """``casts``: float types by pattern of names; the first that matches counts. ``metadata``: of each file.

    Of several names for one stored array the first stands for all. Raises InvalidStateError naming all that cannot be
    told in safetensors, and names that clash.
    """
    tensors, tied = _tensors(selection)
    selection.check_names()
    _check_names(selection)
    _check_dtypes(selection)
    if not tensors:
        raise InvalidStateError("there is no tensor to export")
    sources = _cast(tensors, casts)
    entries = [Entry(source.text, source.dtype, source.array.shape) for source in sources]
    files = split([entry.nbytes for entry in entries], max_shard_bytes)
    names = file_names(len(files))
    made = tuple(
        _file(name, [sources[i] for i in numbers], [entries[i] for i in numbers], metadata)
        for name, numbers in zip(names, files, strict=True)
    )
    return HfPlan(made, _index(made) if len(made) > 1 else None, tied)


def _tensors(selection: Selection) -> tuple[list[RunSource], dict[str, str]]:
    found: list[RunSource] = []
    first: dict[tuple[str, tuple[int, ...]], str] = {}
    tied: dict[str, str] = {}
    for leaf in selection.leaves:
        array = _array(selection, leaf)
        if array is None:
            continue
        name = first.setdefault((leaf.node["array"], array.shape), leaf.text)
        if name == leaf.text:
            found.append(RunSource(leaf.text, array, array.dtype))
        else:
            tied[leaf.text] = name
    return found, tied


def _array(selection: Selection, leaf: Leaf) -> VirtualArray | None:
    """None for what is no tensor, and no array of numbers."""
    node = leaf.node
    if not is_array(node):
        return None
    array = selection.array(node)
    if node["$"] == "ndarray":
        name = node.get("numpy")
        known = from_numpy(numpy_dtype(name)) if isinstance(name, str) else None
        if known is None:
            return None
        if (known.name, node.get("shape")) != (array.dtype, list(array.shape)):
            raise FormatError(f"{leaf.text!r}: a numpy array {name} does not fit its stored {array.dtype} array")
    return array


def _check_names(selection: Selection) -> None:
    for leaf in selection.leaves:
        if leaf.text == METADATA:
            raise InvalidStateError(f"{METADATA!r} is no name for a tensor in safetensors: give it another with rename")
        if _SURROGATE.search(leaf.text):
            raise InvalidStateError(f"{leaf.text!r} has half a surrogate pair, which is no text: rename it")


def _check_dtypes(selection: Selection) -> None:
    faults = []
    for leaf in selection.leaves:
        array = _array(selection, leaf)
        if array is None:
            kind = kind_of(leaf.node)
            what = f"numpy {leaf.node.get('numpy')}" if kind == "ndarray" else kind
            faults.append(f"{leaf.text!r}: {what}")
        elif not has_dtype(array.dtype, array.shape):
            faults.append(f"{leaf.text!r}: {array.dtype} {list(array.shape)}")
    if faults:
        raise InvalidStateError(
            f"safetensors has no place for {len(faults)} of {len(selection.leaves)} keys. Choose what to export "
            "with include (such as 'model.*'), or save these as tensors of a type that it has (dtype converts floats "
            "only; rename rules give other names, not other types):\n" + "\n".join(faults)
        )


def _cast(tensors: Sequence[RunSource], casts: Mapping[str, str]) -> list[RunSource]:
    used: set[str] = set()
    found = []
    for source in tensors:
        pattern = next((p for p in casts if p == source.text or fnmatchcase(source.text, p)), None)
        kind = source.dtype
        if pattern is not None and _is_float(kind):
            used.add(pattern)
            kind = casts[pattern]
        found.append(RunSource(source.text, source.array, kind))
    idle = [pattern for pattern in casts if pattern not in used]
    if idle:
        raise InvalidStateError(f"dtype: no tensor of floats matches {', '.join(map(repr, idle))}")
    return found


def _is_float(name: str) -> bool:
    return name in DTYPES and (name == "bfloat16" or name.startswith("float")) and not name.startswith("float4")


def _file(name: str, sources: Sequence[RunSource], entries: Sequence[Entry], metadata: Mapping[str, str]) -> HfFile:
    order = in_file_order(entries)
    header = encode_header([entries[i] for i in order], metadata)
    return HfFile(name, header, tuple(sources[i] for i in order), sum(entry.nbytes for entry in entries))


def _index(files: Sequence[HfFile]) -> bytes:
    document = {
        "metadata": {"total_size": sum(file.data_nbytes for file in files)},
        "weight_map": {source.text: file.key for file in files for source in file.sources},
    }
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
