"""Targets for files that hold nothing but tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.pytorch.fill import check_root
from cloudckpt.pytorch.flat import FlatShard, FlatShards
from cloudckpt.pytorch.sharded import ShardedTensor

_TARGETS = (torch.Tensor, ShardedTensor, FlatShard, FlatShards, torch.nn.Module)


def check_only_tensors(state: Any) -> None:
    """Raises InvalidStateError that names everything in a target that is neither a tensor nor a module."""
    check_root(state)
    others = [f"  {values.dotted(path) or 'the target'}: {type(value).__name__}" for path, value in _others(state, ())]
    if others:
        raise InvalidStateError(
            "\n".join(["safetensors files hold tensors only; pass a model or a state of tensors, without:", *others])
        )


def _others(value: Any, path: values.Path) -> Iterator[tuple[values.Path, Any]]:
    if isinstance(value, _TARGETS):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _others(item, (*path, key))
    elif isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            yield from _others(item, (*path, i))
    else:
        yield path, value
