"""Large pieces of host memory that many copies lie in, and pickles that say where they lie."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cloudckpt.pytorch.host_memory import available_bytes

ALIGNMENT = 64
"""Of everything in an arena: a line of the cache, and what numpy and stored packs align to."""

_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK of Linux, which the module mmap has no name for."""


class Arena:
    """Memory for tensors and arrays. Whoever has a view keeps it mapped, also after ``close``.

    ``number``: tells it from all others of the process that made it. ``fd``: of the file that another process maps
    (`attached`) to see the same bytes; None for private memory.
    """

    def __init__(self, number: int, nbytes: int, *, fd: int | None, memory: Any) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = fd
        self._memory = memory
        self.address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._is_pinned: bool | None = None  # None: nobody asked for it

    @classmethod
    def make(cls, number: int, nbytes: int, *, shared: bool, device_type: str = "cpu") -> Arena:
        """Raises MemoryError where the machine has not that much, and OSError where the system refuses.

        ``device_type``: of the device that will copy to it. CUDA takes any memory (`pin`); of others only torch
        knows how to pin, and only memory that is not shared.
        """
        available = available_bytes()
        if available is not None and nbytes > available:  # asked for all the same, Linux would kill some process
            raise MemoryError(f"only {available} bytes of memory are left")
        if shared:
            fd = _memory_file(nbytes)
            return cls(number, nbytes, fd=fd, memory=_advised(mmap.mmap(fd, nbytes)))
        if device_type not in ("cpu", "cuda"):
            with contextlib.suppress(RuntimeError):  # this device's plugin pins nothing: copies are slower, not wrong
                pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                return cls(number, nbytes, fd=None, memory=pinned.numpy())
        return cls(number, nbytes, fd=None, memory=_advised(_private_memory(nbytes)))

    @classmethod
    def attached(cls, number: int, fd: int, nbytes: int) -> Arena:
        """An arena that another process made; the descriptor is this arena's from now on."""
        return cls(number, nbytes, fd=fd, memory=mmap.mmap(fd, nbytes))

    def pin(self) -> None:
        """Let CUDA copy to it directly. Where CUDA refuses, its copies are slower, with one warning."""
        if self._is_pinned is not None:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        portable = 1
        status = int(runtime.cudaHostRegister(self.address, self.nbytes, portable))
        self._is_pinned = status == 0
        if status != 0:
            warnings.warn(
                f"CUDA cannot pin {self.nbytes} bytes of memory for background saves (error {status}): "
                "the copies that training waits for are slower",
                stacklevel=2,
            )
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")  # else training's next kernel would raise the error, which CUDA keeps

    def close(self) -> None:
        """Give the memory back as soon as nothing in it is referred to."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
            self._is_pinned = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self._memory = None
        self._typed = {}

    def tensor(self, byte_offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor over the bytes that are there."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = torch.frombuffer(self._memory, dtype=dtype, count=self.nbytes // dtype.itemsize)
            self._typed[dtype] = typed
        return typed.as_strided(shape, _strides(shape), byte_offset // dtype.itemsize)

    def array(self, byte_offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype, self._memory, byte_offset)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where in this arena the bytes are; None if they are not."""
        offset = address - self.address
        return offset if 0 <= offset <= self.nbytes - nbytes else None


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([math.prod(shape[dim + 1 :]) for dim in range(len(shape))])


def _private_memory(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked child has no use for it, and would make every page be copied that is written to while it lives.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(_WIPE_ON_FORK)
    return memory


def _advised(memory: mmap.mmap) -> mmap.mmap:
    with contextlib.suppress(OSError, AttributeError):  # only Linux has huge pages to ask for
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _memory_file(nbytes: int) -> int:
    """A file without a name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("cloudckpt-staging", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)  # its pages come with the first writes, and only then can be huge
        return fd
    with tempfile.TemporaryFile(prefix="cloudckpt-staging-") as file:
        fd = os.dup(file.fileno())
    try:
        _reserve(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, nbytes: int) -> None:
    """A write to a mapped page that the disk has no room for would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)


_Place: TypeAlias = tuple[int | None, int, Any, tuple[int, ...]]
"""The number of an arena (None where there are no elements), byte offset, dtype of torch or numpy, shape."""


class ArenaPickler(pickle.Pickler):
    """Pickles the places of what lies in arenas, instead of the bytes.

    Tensors must lie there. Arrays may: others, of which plans are made, are pickled as ever.
    """

    def __init__(self, file: Any, arenas: Iterable[Arena]) -> None:
        super().__init__(file, protocol=5)
        self._arenas = tuple(arenas)

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is np.ndarray:
            return self._array_place(obj)
        if isinstance(obj, torch.Tensor):
            return self._tensor_place(obj)
        return None

    def _array_place(self, array: npt.NDArray[Any]) -> _Place | None:
        if array.nbytes == 0 or not array.flags.c_contiguous:
            return None
        found = self._find(array.__array_interface__["data"][0], array.nbytes)
        return None if found is None else (*found, array.dtype, array.shape)

    def _tensor_place(self, tensor: torch.Tensor) -> _Place:
        shape = tuple(tensor.shape)
        if tensor.numel() == 0 and tensor.device.type == "cpu":
            return None, 0, tensor.dtype, shape
        found = self._find(tensor.data_ptr(), tensor.nbytes) if tensor.device.type == "cpu" else None
        if found is None or not tensor.is_contiguous():
            raise pickle.PicklingError(
                f"a tensor of {tensor.dtype}, {shape}, on {tensor.device} lies in no staging arena: "
                "only staged copies can be handed to another process"
            )
        return *found, tensor.dtype, shape

    def _find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        for arena in self._arenas:
            offset = arena.offset_of(address, nbytes)
            if offset is not None:
                return arena.number, offset
        return None


class ArenaUnpickler(pickle.Unpickler):
    """The other end, over the same memory. What lay at one place is one object."""

    def __init__(self, file: Any, arenas: Mapping[int, Arena]) -> None:
        super().__init__(file)
        self._arenas = arenas
        self._made: dict[_Place, Any] = {}

    def persistent_load(self, pid: _Place) -> Any:
        if pid not in self._made:
            self._made[pid] = self._make(*pid)
        return self._made[pid]

    def _make(self, number: int | None, byte_offset: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        if number is None:
            return torch.empty(shape, dtype=dtype)
        arena = self._arenas.get(number)
        if arena is None:
            raise pickle.UnpicklingError(f"staging arena {number} is not mapped here: only {sorted(self._arenas)} are")
        if isinstance(dtype, torch.dtype):
            return arena.tensor(byte_offset, dtype, shape)
        return arena.array(byte_offset, dtype, shape)


def arena_dumps(obj: Any, arenas: Iterable[Arena]) -> bytes:
    file = io.BytesIO()
    ArenaPickler(file, arenas).dump(obj)
    return file.getvalue()


def arena_loads(data: bytes, arenas: Mapping[int, Arena]) -> Any:
    return ArenaUnpickler(io.BytesIO(data), arenas).load()
