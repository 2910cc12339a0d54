"""State that differs per rank, and the small tensors inside of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cloudckpt.errors import CloudckptError, FormatError, InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.document import MAX_DIMS
from cloudckpt.format.dtypes import DTYPES, numpy_dtype
from cloudckpt.format.scalars import pack_bytes, unpack_bytes
from cloudckpt.format.tree import MAX_RANKS, values_by_rank
from cloudckpt.pytorch.module_names import object_state
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import ndarray_shard, tensor_shard
from cloudckpt.pytorch.stateful import is_stateful

Merge = Callable[[list[Any], int, int], Any]


class PerRank:
    """Marks state of which every rank keeps its own: random number generators, data loaders.

    On load, a rank gets back what the rank of the same number saved. On another number of ranks the target's
    ``merge(states, rank, world_size)`` makes the value out of all that were saved, by rank (None for a rank that
    saved none); without ``merge`` that is an error. As a target, ``value`` is replaced; an object with
    ``state_dict()`` and ``load_state_dict()`` is kept, and gets its state. Such objects within a value are refused.
    """

    def __init__(self, value: Any = None, *, merge: Merge | None = None) -> None:
        self.value = value
        self.merge = merge

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def encode_per_rank(
    item: PerRank, path: values.Path, allow_pickle: bool, defer: values.Deferrer | None
) -> dict[str, Any]:
    value = object_state(item.value) if is_stateful(item.value) else item.value
    leaf = encode_inline if allow_pickle else _inline_no_object
    node = values.encode(value, leaf=leaf, allow_pickle=allow_pickle, defer=defer, path=path)
    return {"$": "per_rank", "value": node}


def _inline_no_object(path: values.Path, obj: Any) -> values.Node:
    node = encode_inline(path, obj)
    if node is None and is_stateful(obj):
        raise InvalidStateError(
            f"{values.dotted(path)!r}: an object within a PerRank value is not given its state back: store its "
            "state_dict(), or the object in a PerRank of its own, PerRank(object)"
        )
    return node


def decode_inline(node: Any, *, allow_pickle: bool = False) -> Any:
    """A plain value that may hold tensors and arrays inline."""
    return values.decode(node, leaf=_decode_inline, allow_pickle=allow_pickle)


def decode_rank_value(
    node: dict[str, Any],
    target: PerRank,
    text: str,
    *,
    rank: int,
    world_size: int,
    saved_world_size: int,
    allow_pickle: bool,
) -> Any:
    """What ``target`` gets.

    Raises InvalidStateError on another world size, since no rule could be right for all, and where ``merge`` fails.
    """
    held = values_by_rank(node)
    if world_size == saved_world_size and rank in held:
        return decode_inline(held[rank], allow_pickle=allow_pickle)
    if world_size == saved_world_size:
        raise InvalidStateError(f"{text!r} was saved by ranks {_some(held)}, and not by rank {rank}")
    if target.merge is None:
        raise InvalidStateError(
            f"{text!r} was saved per rank by ranks {_some(held)} of {saved_world_size} and cannot be given to rank "
            f"{rank} of {world_size}: pass PerRank(merge=...) (TrainingState: dataloader_merge=...) to divide it, "
            "leave it out of the target (strict=False), or read() it and divide it yourself"
        )
    states = [
        decode_inline(held[r], allow_pickle=allow_pickle) if r in held else None
        for r in range(max(min(saved_world_size, MAX_RANKS), max(held, default=-1) + 1))
    ]
    try:
        return target.merge(states, rank, world_size)
    except CloudckptError:
        raise
    except Exception as error:
        raise InvalidStateError(f"the merge function of {text!r} failed: {type(error).__name__}: {error}") from error


MAX_INLINE_BYTES = 4 * 1024 * 1024
"""Of a tensor or array in state that differs per rank: those of all ranks are in the manifest."""


def _some(held: dict[int, Any]) -> str:
    shown = sorted(held)
    return str(shown) if len(shown) <= 16 else f"{shown[0]} to {shown[-1]} ({len(shown)} ranks)"


def encode_inline(path: values.Path, obj: Any) -> values.Node:
    """A tensor or array with its bytes, for `values.encode`; None for all else."""
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
    if (nbytes := box.num_elements * shard.itemsize) > MAX_INLINE_BYTES:
        raise InvalidStateError(
            f"{text!r}: values that differ per rank go into the manifest, and a tensor of {nbytes} bytes is too large "
            f"for that (at most {MAX_INLINE_BYTES}): store it as ShardedTensor(x[None], (num_ranks, *x.shape), "
            "[Piece((0, ...), (rank, 0, ...), (1, *x.shape))]), which every rank gets its row of"
        )
    data = shard.read(box, box.shape, Scratch()).tobytes() if box.num_elements else b""
    return {"$": "inline", **kind, **pack_bytes(data)}


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
        _check_shape(shape, dtype.itemsize, len(data))
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    if kind != "tensor" or name not in DTYPES:
        raise FormatError("malformed inline tensor: an unknown kind or type")
    _check_shape(shape, DTYPES[name].itemsize, len(data))
    if not data:
        return torch.empty(shape, dtype=getattr(torch, name))
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, name)).reshape(shape)


def _check_shape(shape: list[int], itemsize: int, nbytes: int) -> None:
    if math.prod(shape) * itemsize != nbytes:
        raise FormatError("malformed inline tensor: its bytes do not fit its shape")
    # Where one dim is 0, torch and numpy still want the product of the others to fit 63 bits.
    if itemsize == 0 or len(shape) > MAX_DIMS or math.prod(s or 1 for s in shape) * itemsize >= 2**62:
        raise FormatError("malformed inline tensor: impossible shape or type")
