"""State that differs per rank, and the small tensors inside of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.dtypes import DTYPES, numpy_dtype
from cloudckpt.format.scalars import pack_bytes, unpack_bytes
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import ndarray_shard, tensor_shard


class PerRank:
    """Marks state of which every rank keeps its own: random number generators, data loaders.

    On load, a rank gets back what the rank of the same number saved; another world size is an
    error. As a target, ``value`` is replaced.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def encode_per_rank(item: PerRank, path: values.Path, allow_pickle: bool) -> dict[str, Any]:
    return {
        "$": "per_rank",
        "value": values.encode(item.value, leaf=_encode_inline, allow_pickle=allow_pickle, path=path),
    }


def decode_inline(node: Any, *, allow_pickle: bool = False) -> Any:
    """A plain value that may hold tensors and arrays inline."""
    return values.decode(node, leaf=_decode_inline, allow_pickle=allow_pickle)


def decode_rank_value(node: dict[str, Any], rank: int, world_size: int, text: str, *, allow_pickle: bool) -> Any:
    """What ``rank`` saved. Raises InvalidStateError on another world size: no rule could be right for every kind."""
    held = node.get("values")
    if not isinstance(held, dict):
        raise FormatError(f"{text!r}: malformed per-rank value")
    if str(rank) not in held or any(not r.isdecimal() or int(r) >= world_size for r in held):
        raise InvalidStateError(
            f"{text!r} was saved per rank by ranks {sorted(map(int, held))} and cannot be given to rank {rank} of "
            f"{world_size}: leave it out of the target (strict=False), or read() it and divide it yourself"
        )
    return decode_inline(held[str(rank)], allow_pickle=allow_pickle)


def _encode_inline(path: values.Path, obj: Any) -> values.Node:
    text = values.dotted(path)
    if isinstance(obj, torch.Tensor):
        shard = tensor_shard(obj, text)
        if shard.placed:
            raise InvalidStateError(f"{text!r}: a DTensor has a place in a global tensor; take it out of PerRank")
        kind: dict[str, Any] = {"kind": "tensor", "dtype": shard.dtype, "shape": list(shard.shape)}
    elif type(obj) is np.ndarray:
        shard, name = ndarray_shard(obj, text)
        kind = {"kind": "ndarray", "dtype": name, "shape": list(obj.shape)}
    else:
        return None
    box = shard.pieces[0].box
    return {"$": "inline", **kind, **pack_bytes(shard.read(box, box.shape, Scratch()).tobytes())}


def _decode_inline(node: dict[str, Any]) -> Any:
    if node.get("$") != "inline":
        raise FormatError(f"unknown tag {node.get('$')!r:.100}; a newer version may know it")
    shape, name, kind = node.get("shape"), node.get("dtype"), node.get("kind")
    try:
        data = bytearray(unpack_bytes(node))
    except ValueError as error:
        raise FormatError(f"malformed inline tensor: {error}") from error
    if not isinstance(shape, list) or not all(type(s) is int and s >= 0 for s in shape) or not isinstance(name, str):
        raise FormatError("malformed inline tensor")
    if kind == "ndarray":
        dtype = numpy_dtype(name)
        if math.prod(shape) * dtype.itemsize != len(data):
            raise FormatError("malformed inline array: its bytes do not fit its shape")
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    if kind != "tensor" or name not in DTYPES or math.prod(shape) * DTYPES[name].itemsize != len(data):
        raise FormatError("malformed inline tensor: its bytes do not fit its shape")
    if not data:
        return torch.empty(shape, dtype=getattr(torch, name))
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, name)).reshape(shape)
