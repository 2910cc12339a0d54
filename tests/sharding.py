"""Tensors with known bits, and their shards on any mesh; for tests that run on real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from cloudckpt.errors import CloudckptError

# Not every operation takes every dtype: moved about as numbers of the same size.
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a dtype that every operation takes."""
    return tensor.view(_NUMBERS[tensor.dtype.itemsize])


def noise(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits, nans included: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(_NUMBERS[dtype.itemsize]).reshape(tuple(shape)).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """What a tensor holds, in C order: compares nans and signed zeros too."""
    data = numbers(tensor.detach()).contiguous()
    return data.reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def make_mesh(shape: Sequence[int], ranks: Sequence[int] | None = None) -> DeviceMesh:
    """Over ranks 0, 1, ... in C order, or over ``ranks``. Every rank of the job takes part."""
    chosen = range(math.prod(shape)) if ranks is None else ranks
    return DeviceMesh("cpu", torch.tensor([*chosen]).reshape(tuple(shape)))


def shard(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor that all ranks hold, without communication."""
    if full.dim() == 0:
        return distribute_tensor(full, mesh, placements, src_data_rank=None)  # from_local takes () for no shape at all
    part = distribute_tensor(numbers(full), mesh, placements, src_data_rank=None)
    local = part.to_local().clone().view(full.dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
    )


def blank(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A target with other bits than ``full`` in it."""
    return shard(other_bits(full), mesh, placements)


def other_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return ~tensor
    return (numbers(tensor) + 1).view(tensor.dtype)


def error_of(call: Callable[[], object]) -> CloudckptError | None:
    """What a call raises, as a value that can travel to the test's process; other errors pass."""
    try:
        call()
    except CloudckptError as error:
        return error
    return None
