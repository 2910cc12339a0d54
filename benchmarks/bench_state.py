"""The state that is saved and loaded: weights of a transformer, as DTensors over a 1-D mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

Layout = Literal["rows", "columns"]
LAYER_MIB = 64


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def layers(mib: int) -> list[TensorSpec]:
    """``mib`` of weights, in steps of 64 MiB: half of the bytes float32, half bfloat16, and a few norms."""
    specs = []
    for i in range(max(1, round(mib / LAYER_MIB))):
        specs.append(TensorSpec(f"layers.{i}.norm.weight", (4096,), torch.float32))
        specs.append(TensorSpec(f"layers.{i}.feed_forward.weight", (4096, 2048), torch.float32))
        specs.append(TensorSpec(f"layers.{i}.attention.weight", (4096, 4096), torch.bfloat16))
    return specs


def small(count: int) -> list[TensorSpec]:
    """Many tensors of a few hundred bytes: what requests cost, not bytes."""
    return [TensorSpec(f"small.{i}.bias", (64,), torch.float32) for i in range(count)]


def warm_up() -> list[TensorSpec]:
    """Enough to import every module and open every connection."""
    return [TensorSpec("weight", (1024, 2048), torch.float32), TensorSpec("bias", (1024,), torch.float32)]


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def build(specs: Sequence[TensorSpec], mesh: DeviceMesh, layout: Layout, *, filled: bool) -> dict[str, DTensor]:
    """The state on ``mesh``: what was trained (``filled``), or -1 everywhere to load into."""
    state = {}
    for number, spec in enumerate(specs):
        dim = _sharded_dim(spec, layout)
        if filled:
            values = _values(number, spec, mesh, dim)
        else:
            values = torch.full(_local_shape(spec, mesh, dim), -1, dtype=spec.dtype)
        state[spec.name] = DTensor.from_local(values, mesh, [Shard(dim)], run_check=False)
    return state


def check(specs: Sequence[TensorSpec], mesh: DeviceMesh, layout: Layout, state: dict[str, DTensor]) -> None:
    """Raise unless every element is what ``build(filled=True)`` would have put there."""
    for number, spec in enumerate(specs):
        expected = _values(number, spec, mesh, _sharded_dim(spec, layout))
        if not torch.equal(state[spec.name].to_local(), expected):
            raise AssertionError(f"{spec.name} is not what was saved")


def _sharded_dim(spec: TensorSpec, layout: Layout) -> int:
    return 1 if layout == "columns" and len(spec.shape) > 1 else 0


def _local_shape(spec: TensorSpec, mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    # Every extent is a power of two: all ranks get the same.
    return tuple(n // mesh.size() if i == dim else n for i, n in enumerate(spec.shape))


def _values(number: int, spec: TensorSpec, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's part of a pattern of whole numbers below 251, which bfloat16 holds exactly."""
    shape = _local_shape(spec, mesh, dim)
    pattern = torch.tensor(number, dtype=torch.int32)
    for i, extent in enumerate(shape):
        first = mesh.get_local_rank() * extent if i == dim else 0
        index = torch.arange(first, first + extent, dtype=torch.int32) * (31, 17)[i]
        pattern = pattern + index.view(-1, *[1] * (len(shape) - 1 - i))
    return (pattern % 251).to(spec.dtype)
