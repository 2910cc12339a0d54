"""The raw bytes of a tensor's memory, whatever its dtype and strides, without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cloudckpt.format.box import Box
from cloudckpt.format.codec import Bytes1D
from cloudckpt.pytorch.scratch import Scratch

Elements = npt.NDArray[Any]

# One opaque numpy type per element size: bits are moved, never interpreted.
_OPAQUE: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)} | {16: np.dtype("V16")}


def tensor_elements(tensor: torch.Tensor) -> Elements:
    """A view of a CPU tensor's elements as opaque numbers: same shape, strides and memory."""
    kind = _OPAQUE[tensor.element_size()]
    if tensor.numel() == 0:
        return np.zeros(tuple(tensor.shape), dtype=kind)
    base = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return np.ndarray(
        tuple(tensor.shape),
        dtype=kind,
        buffer=base,
        offset=tensor.storage_offset() * kind.itemsize,
        strides=tuple(s * kind.itemsize for s in tensor.stride()),
    )


_OPAQUE_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def opaque_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor on any device as plain numbers of the same size."""
    return tensor.view(_OPAQUE_TORCH[tensor.element_size()])


def array_elements(array: npt.NDArray[Any]) -> Elements:
    """The same for a numpy array."""
    elements: Elements = array[..., None].view(_OPAQUE[array.dtype.itemsize])[..., 0]
    return elements


def array_bytes(array: npt.NDArray[Any]) -> Elements:
    """A view of a numpy array with a last axis that counts the bytes of an element."""
    return array[..., None].view(np.uint8)


def chunk_bytes(elements: Elements, box: Box, stored_shape: tuple[int, ...], scratch: Scratch) -> Bytes1D:
    """The bytes of ``elements[box]`` in C order, zero-padded to ``stored_shape``; no copy where memory allows."""
    part = elements[box.slices]
    if part.shape == stored_shape and part.flags.c_contiguous:
        return part.reshape(-1).view(np.uint8)
    gathered = scratch.take(math.prod(stored_shape) * elements.dtype.itemsize)
    whole = gathered.view(elements.dtype).reshape(stored_shape)
    if part.shape != stored_shape:
        whole[...] = np.zeros((), dtype=elements.dtype)
    whole[tuple(slice(0, n) for n in part.shape)] = part
    return gathered
