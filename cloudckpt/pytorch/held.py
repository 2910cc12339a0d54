"""Tensors and arrays of a decoded state, yet to be filled, where all of it goes to memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format.dtypes import dtype, numpy_dtype
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.pytorch.shards import ndarray_shard, tensor_shard, torch_dtype
from cloudckpt.pytorch.targets import Targets, Want
from cloudckpt.pytorch.views import stored_wants


class Held:
    """``leaf`` is for `values.decode`; what it made is filled by reading ``targets()``.

    ``array``: what a leaf refers to. Raises InvalidStateError naming ``text`` for more than ``max_bytes``.
    """

    def __init__(self, array: Callable[[Mapping[str, Any]], VirtualArray], *, max_bytes: int, text: str) -> None:
        self._array = array
        self._max_bytes = max_bytes
        self._text = text
        self._nbytes = 0
        self._wants: list[Want] = []

    def leaf(self, node: dict[str, Any]) -> Any:
        array = self._array(node)
        self._nbytes += math.prod(array.shape) * dtype(array.dtype).itemsize
        if self._nbytes > self._max_bytes:
            raise InvalidStateError(f"{self._text!r}: one value of more than {self._max_bytes} bytes, held in memory")
        if node["$"] == "tensor":
            tensor = torch.empty(array.shape, dtype=torch_dtype(array.dtype, self._text))
            self._wants += stored_wants(array, tensor_shard(tensor, self._text))
            return tensor
        if node["$"] != "ndarray":
            raise FormatError(f"{self._text!r}: unknown tag {node['$']!r:.100}; a newer version may know it")
        made = np.empty(tuple(node["shape"]), numpy_dtype(node["numpy"]))
        shard = ndarray_shard(made, self._text)[0]
        if (shard.dtype, shard.shape) != (array.dtype, array.shape):
            raise FormatError(f"{self._text!r}: a numpy array does not fit its stored {array.dtype} array")
        self._wants += stored_wants(array, shard)
        return made

    def targets(self) -> Targets:
        return Targets(self._wants)
