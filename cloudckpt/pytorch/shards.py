"""From tensors to shards: what part of which global tensor a rank holds, and where its bytes are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard  # no public name; FSDP2 with TP makes them
from torch.nn.parameter import is_lazy

from cloudckpt._cached import cached_property
from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.document import MeshEntry
from cloudckpt.format.dtypes import DTYPES, QUANTISED, from_numpy, numpy_name
from cloudckpt.plan.shard import (
    PLACED,
    UNPLACED,
    DimShard,
    PieceBox,
    Runs,
    dim_runs,
    nested_runs,
    pieces_from_runs,
)
from cloudckpt.pytorch.memory import Elements, array_bytes, array_elements, chunk_bytes, tensor_elements
from cloudckpt.pytorch.scratch import Scratch

MAX_DIMS = 64
"""numpy's limit."""


@dataclass(frozen=True, eq=False)
class LocalShard:
    """One rank's part of one tensor or numpy array, as it is stored.

    ``dtype`` and ``shape`` are those of the stored array, ``memory`` is the local part of it.
    ``placed``: the tensor itself says which part this is (a DTensor, a ShardedTensor); else ranks with
    the same pieces must hold the same. ``replica``: the number that a ShardedTensor was given, None for
    others. ``padding``: what a load puts where no piece is; None leaves it. ``layout``: what to record
    of the rule that cut the tensor.
    """

    text: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceBox, ...]
    memory: torch.Tensor | npt.NDArray[Any]
    placed: bool = False
    mesh: MeshEntry | None = None
    replica: int | None = None
    padding: bool | complex | None = None
    layout: dict[str, Any] | None = None

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def replica_number(self) -> int:
        """As planning counts them."""
        if self.replica is not None:
            return self.replica
        return PLACED if self.placed else UNPLACED

    @property
    def on_host(self) -> bool:
        return not isinstance(self.memory, torch.Tensor) or self.memory.device.type == "cpu"

    @cached_property
    def elements(self) -> Elements:
        """Host memory as opaque elements of the stored array."""
        if isinstance(self.memory, torch.Tensor):
            return tensor_elements(self.memory)
        return array_elements(self.memory) if self.memory.ndim == len(self.shape) else array_bytes(self.memory)

    @property
    def address(self) -> tuple[int, int] | None:
        """Equal for two names of the same memory, and sooner at hand than `identity`; None where nobody shares it."""
        if not isinstance(self.memory, torch.Tensor) or self.memory.numel() == 0:
            return None
        return self.memory.untyped_storage().data_ptr(), int(self.memory.storage_offset())

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two names of the same memory. Empty tensors have none worth sharing."""
        if not isinstance(self.memory, torch.Tensor) or self.memory.numel() == 0:
            return (id(self),)
        tensor = self.memory
        layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return (tensor.untyped_storage().data_ptr(), layout, self.dtype, self.shape, self.pieces)

    def moved(self, memory: torch.Tensor | npt.NDArray[Any]) -> LocalShard:
        """The same shard, with its elements in another, contiguous memory of the same shape."""
        made = object.__new__(type(self))
        made.__dict__.update(
            self.__dict__, memory=memory
        )  # five times as fast as replace(), and called for all tensors
        made.__dict__.pop("elements", None)
        return made

    def read(self, box: Box, stored_shape: tuple[int, ...], scratch: Scratch) -> Bytes1D:
        """The bytes of a global box that lies in one piece, in C order, padded with zeros to ``stored_shape``."""
        local = self.local_box(box)
        if self.on_host:
            return chunk_bytes(self.elements, local, stored_shape, scratch)
        assert isinstance(self.memory, torch.Tensor)
        part = self.memory[local.slices].contiguous().cpu()
        return chunk_bytes(tensor_elements(part), Box((0,) * part.dim(), tuple(part.shape)), stored_shape, scratch)

    def local_box(self, box: Box) -> Box:
        for piece in self._pieces_around(box):
            if piece.box.intersect(box) == box:
                start = tuple(
                    o - g + i for o, g, i in zip(box.offset, piece.global_offset, piece.local_offset, strict=True)
                )
                return Box(start, box.shape)
        raise AssertionError(f"{self.text}: {box} lies in no piece")

    def _pieces_around(self, box: Box) -> Iterable[PieceBox]:
        """The pieces that may hold the box: a search that does not compare one by one where there are many."""
        if len(self.pieces) < 16 or not self.shape:
            return self.pieces
        offset, end = self._bounds
        found = ((offset <= box.offset) & (end >= box.end)).all(axis=1)
        return (self.pieces[i] for i in np.nonzero(found)[0].tolist())

    @cached_property
    def _bounds(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        offset = np.array([piece.global_offset for piece in self.pieces], dtype=np.int64)
        return offset, offset + np.array([piece.shape for piece in self.pieces], dtype=np.int64)


def tensor_shard(tensor: torch.Tensor, text: str) -> LocalShard:
    """``text`` is the dotted path, for messages. Raises InvalidStateError for what cannot be stored."""
    if isinstance(tensor, DTensor):
        return _dtensor_shard(tensor, text)
    local = plain_tensor(tensor, text)
    shape = tuple(local.shape)
    return LocalShard(text, dtype_name(local, text), shape, _whole(shape), local)


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> tuple[PieceBox, ...]:
    return (PieceBox((0,) * len(shape), (0,) * len(shape), shape),)


def ndarray_shard(array: npt.NDArray[Any], text: str) -> tuple[LocalShard, str]:
    """The shard, and the exact name of the numpy type."""
    name = numpy_name(array.dtype)
    if name is None:
        raise InvalidStateError(f"{text!r}: a numpy array of type {array.dtype} cannot be stored as plain bytes")
    known = from_numpy(array.dtype)
    dtype, shape = (known.name, array.shape) if known else ("uint8", (*array.shape, array.dtype.itemsize))
    whole = PieceBox((0,) * len(shape), (0,) * len(shape), shape)
    return LocalShard(text, dtype, shape, (whole,), array), name


def plain_tensor(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """A strided tensor of torch's own class, detached, whose memory is really there."""
    if is_lazy(tensor):
        raise InvalidStateError(f"{text!r}: the parameter is not initialised yet; run the lazy module once first")
    local = tensor.detach()
    if type(local) is not torch.Tensor:
        if type(local).__name__ == "AsyncCollectiveTensor":
            local = local.wait()  # type: ignore[attr-defined]
        kind = type(local)
        if kind is not torch.Tensor:
            raise InvalidStateError(
                f"{text!r}: unsupported tensor subclass {kind.__module__}.{kind.__qualname__} "
                "inside a DTensor or ShardedTensor; store its inner tensors, each with its own placement, instead"
            )
    if local.layout is not torch.strided:
        raise InvalidStateError(f"{text!r}: a tensor of layout {local.layout} cannot be stored; use to_dense()")
    if local.is_meta:
        raise InvalidStateError(f"{text!r}: a meta tensor holds no data")
    if local.dim() > MAX_DIMS:
        raise InvalidStateError(f"{text!r}: a tensor of {local.dim()} dims; at most {MAX_DIMS} are possible")
    if local.is_contiguous():
        reach = local.numel()
    else:
        reach = 1 + sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
    if local.numel() and (local.storage_offset() + reach) * local.element_size() > local.untyped_storage().nbytes():
        # FSDP1 and offloading free storages like this; numpy would read past their end.
        raise InvalidStateError(f"{text!r}: the memory of this tensor was freed or is too small; gather it first")
    return local.resolve_conj().resolve_neg() if local.is_conj() or local.is_neg() else local


def dtype_name(tensor: torch.Tensor, text: str) -> str:
    return stored_dtype(tensor.dtype, text)


def stored_dtype(dtype: torch.dtype, text: str) -> str:
    """The name that a dtype is stored under. Raises InvalidStateError for one that cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name in QUANTISED:
        raise InvalidStateError(f"{text!r}: quantised tensors ({name}) are not supported; store int_repr() and scales")
    if name not in DTYPES:
        raise InvalidStateError(f"{text!r}: unsupported dtype {name}")
    return name


def torch_dtype(name: str, text: str) -> torch.dtype:
    """By the name that it is stored under; InvalidStateError where this version of torch does not know it."""
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise InvalidStateError(f"{text!r}: torch {torch.__version__} has no dtype {name}")
    return kind


def _dtensor_shard(tensor: DTensor, text: str) -> LocalShard:
    shape = tuple(tensor.shape)
    local = plain_tensor(tensor.to_local(), text)
    entry, coordinate = _mesh_entry(tensor.device_mesh), tensor.device_mesh.get_coordinate()
    pieces: tuple[PieceBox, ...] = ()
    try:
        cuts = tuple([_cut(placement, len(shape)) for placement in tensor.placements])
        if coordinate is not None:  # else this rank is outside of the mesh
            pieces = _dtensor_pieces(shape, tuple(local.shape), entry.shape, tuple(coordinate), cuts)
    except _UnclearCutError as error:
        raise InvalidStateError(f"{text!r}: {error}") from None
    return LocalShard(text, dtype_name(local, text), shape, pieces, local, placed=True, mesh=entry)


_MESHES: WeakKeyDictionary[DeviceMesh, MeshEntry] = WeakKeyDictionary()
"""A mesh has many tensors, and torch works its shape out again whenever it is asked."""


def _mesh_entry(mesh: DeviceMesh) -> MeshEntry:
    entry = _MESHES.get(mesh)
    if entry is None:
        entry = _MESHES[mesh] = MeshEntry(shape=tuple(mesh.shape), dim_names=tuple(mesh.mesh_dim_names or ()))
    return entry


class _UnclearCutError(Exception):
    """The placements do not say, or say something else than the local tensor, what this rank holds."""


# Most tensors of a model have one of a few shapes, and are saved again and again.
@lru_cache(maxsize=4096)
def _dtensor_pieces(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: tuple[tuple[int, int] | None, ...],
) -> tuple[PieceBox, ...]:
    """``cuts``: by mesh axis, the dim that it cuts and the split factor; None where it does not."""
    axes: list[list[DimShard]] = [[] for _ in shape]
    for axis, cut in enumerate(cuts):
        if cut is not None:
            dim, factor = cut
            axes[dim].append(DimShard(mesh_shape[axis], coordinate[axis], factor))
    if 0 in local_shape and any(() in _possible_runs(n, shards) for n, shards in zip(shape, axes, strict=True)):
        return ()  # FSDP2 does not keep the other dims of an empty local tensor
    runs = [
        _runs(extent, shards, local_shape[d], f"dim {d}")
        for d, (extent, shards) in enumerate(zip(shape, axes, strict=True))
    ]
    return tuple(pieces_from_runs(runs))


# "typed": some versions of torch take Shard(0) for equal to a strided one.
@lru_cache(maxsize=256, typed=True)
def _cut(placement: Placement, dims: int) -> tuple[int, int] | None:
    """The dim that is cut, and the split factor; None for a replica."""
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise _UnclearCutError(
            f"the tensor is {placement}, a pending reduction; redistribute() it to Replicate or Shard first"
        )
    if not (placement.is_shard() or isinstance(placement, _StridedShard)):
        raise _UnclearCutError(f"unsupported placement {placement}")
    dim: int = placement.dim % dims  # type: ignore[attr-defined]
    return dim, int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _runs(extent: int, shards: list[DimShard], local_extent: int, where: str) -> Runs:
    """The indices that this rank really holds, checked against the size of what it has.

    torch.distributed.tensor and FSDP2 cut unevenly sharded dims in different orders; the local
    tensor tells which of the two it was.
    """
    fitting = [runs for runs in _possible_runs(extent, shards) if sum(b - a for a, b in runs) == local_extent]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        held = sum(b - a for a, b in dim_runs(extent, shards))
        raise _UnclearCutError(f"{where}: the local tensor has {local_extent} elements, its placements say {held}")
    raise _UnclearCutError(
        f"{where}: strided shards of {extent} elements can be cut in two ways, and this rank's size fits both; "
        "make the dim divisible by the mesh"
    )


def _possible_runs(extent: int, shards: list[DimShard]) -> set[Runs]:
    nested = nested_runs(extent, shards) if any(s.split_factor > 1 for s in shards) else None
    return {dim_runs(extent, shards)} | ({nested} if nested is not None else set())


def check_writable(shard: LocalShard, target: torch.Tensor | npt.NDArray[Any]) -> None:
    """Raises InvalidStateError for a target that cannot be filled in place."""
    if isinstance(target, torch.Tensor) and (target.is_conj() or target.is_neg()):
        raise InvalidStateError(f"{shard.text!r}: the target is a conjugated or negated view; resolve it first")
    if isinstance(shard.memory, torch.Tensor):
        strides = shard.memory.stride()
    else:
        if not shard.memory.flags.writeable:
            raise InvalidStateError(f"{shard.text!r}: the target array is read-only")
        strides = tuple(abs(s) // max(1, shard.memory.itemsize) for s in shard.memory.strides)
    if _may_overlap_itself(tuple(shard.memory.shape), strides):
        raise InvalidStateError(f"{shard.text!r}: elements of the target share memory (an expanded tensor?)")


def _may_overlap_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a step along some dim may land on what smaller steps can reach."""
    if 0 in shape:
        return False
    reach = 0
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False
