"""A pretend accelerator, ``torch.device("pretend")``, and its collectives, ``pretendccl``; all in Python.

It stands in for devices that torch learns about from plugins (``npu`` and ``hccl``, say). Its tensors
are real ones of torch's private-use device: no subclass, with storages, views, strides and every
dtype. Their memory is the host's, but neither torch nor numpy lets anybody touch it as such.

``install()`` once in every process, before the device is named.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.backend_registration
from torch.utils import _pytree as pytree

NAME = "pretend"
NUM_DEVICES = 2

_DLPACK_EXTENSION_DEVICE = 12
"""kDLExtDev, which is torch's private-use device."""

_ALIGNMENT = 64
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_LIBRARIES: list[torch.library.Library] = []
"""Kernels are there as long as their library is."""


class Stream:
    """Copies to the host that may return at once are made when somebody waits for them, and no sooner."""

    def __init__(self, device: Any = None) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.waits_for: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        self.waits_for.append(stream)

    def synchronize(self) -> None:
        for call in self.queue:
            call()
        self.queue.clear()


class _Module:
    """``torch.pretend``."""

    def __init__(self) -> None:
        self._current = 0
        self._streams: list[Stream] = [Stream()]

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = device if isinstance(device, int) else torch.device(device).index or 0

    def synchronize(self, device: Any = None) -> None:
        """Everything but what is queued on a stream is done by the time that a call returns."""

    def current_stream(self, device: Any = None) -> Stream:
        return self._streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    @property
    def Stream(self) -> type[Stream]:  # noqa: N802  # as torch.cuda has it
        return Stream

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the CPU generator's."""


@functools.cache
def install() -> None:
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    aten = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_on_host, "PrivateUse1")
    _LIBRARIES.extend([aten, everything])


# Memory: blocks of malloc that come into torch through DLPack, whose deleter is free() itself.


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Block(ctypes.Structure):
    """A DLManagedTensor (the first three fields), its only dim, and then the data."""

    _fields_ = [
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("extent", ctypes.c_int64),
    ]


def _allocate(nbytes: int, device_index: int) -> torch.Tensor:
    """A uint8 tensor with a storage of its own."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    address = libc.malloc(ctypes.sizeof(_Block) + _ALIGNMENT + max(nbytes, 1))
    if not address:
        raise MemoryError
    block = _Block.from_address(address)
    block.extent = nbytes
    block.tensor.data = -(-(address + ctypes.sizeof(_Block)) // _ALIGNMENT) * _ALIGNMENT
    block.tensor.device_type, block.tensor.device_id = _DLPACK_EXTENSION_DEVICE, device_index
    block.tensor.type_code, block.tensor.type_bits, block.tensor.type_lanes = 1, 8, 1  # an unsigned byte
    block.tensor.ndim, block.tensor.byte_offset = 1, 0
    block.tensor.shape = address + _Block.extent.offset
    block.tensor.strides = block.context = None
    block.deleter = ctypes.cast(libc.free, ctypes.c_void_p).value
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch.utils.dlpack.from_dlpack(new_capsule(address, b"dltensor", None))


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a pretend tensor as a CPU tensor, which is only valid while that lives. For kernels and tests."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.itemsize
    if count == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_uint8 * (count * tensor.itemsize)).from_address(storage.data_ptr())
    elements = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    view = elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


# Kernels.


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    if layout not in (None, torch.strided) or pin_memory:
        raise NotImplementedError("the pretend device has strided, unpinned tensors only")
    dtype = dtype or torch.get_default_dtype()
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if math.prod(size) else -1
    index = torch.get_device_module(NAME).current_device() if device is None or device.index is None else device.index
    flat = _allocate((last + 1) * dtype.itemsize, index).view(dtype)
    return _as_strided(flat, size, stride, 0)


def _empty(size: Sequence[int], *, memory_format: torch.memory_format | None = None, **kind: Any) -> torch.Tensor:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise NotImplementedError(f"the pretend device has no {memory_format}")
    strides = [math.prod(max(n, 1) for n in size[i + 1 :]) for i in range(len(size))]
    return _empty_strided(size, strides, **kind)


def _as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    return torch.ops.aten.as_strided.default.redispatch(_CPU, tensor, size, stride, storage_offset)  # type: ignore[no-any-return]


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Both ways, and from pretend to pretend."""
    ends = [host_view(end) if end.device.type == NAME else end for end in (target, source)]
    stream = torch.get_device_module(NAME).current_stream()
    if non_blocking and stream.waits_for:  # a side stream that somebody made
        stream.queue.append(functools.partial(ends[0].copy_, ends[1]))
    else:
        ends[0].copy_(ends[1])
    return target


def _foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        _copy(target, source, non_blocking)


def _resize(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Always to new memory, which keeps what fits."""
    old = host_view(tensor).reshape(-1).clone()
    new = _empty(size, dtype=tensor.dtype, device=tensor.device)
    kept = min(old.numel(), new.numel())
    host_view(new).view(-1)[:kept] = old[:kept]
    set_storage = torch.ops.aten.set_.source_Storage_storage_offset
    return set_storage.redispatch(_CPU, tensor, new.untyped_storage(), 0, new.shape, new.stride())  # type: ignore[no-any-return]


_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "as_strided": _as_strided,
    "copy_": _copy,
    "_foreach_copy_": _foreach_copy,
    "resize_": _resize,
}

_SHARE_STORAGE = ("set_",)


def _on_host(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Every other operation: views by the CPU's kernel, which knows no device; the rest on the memory as the CPU's."""
    if op.is_view or op.overloadpacket.__name__ in _SHARE_STORAGE:
        return op.redispatch(_CPU, *args, **kwargs)
    originals: dict[int, torch.Tensor] = {}
    device: list[torch.device] = []

    def lent(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == NAME:
            view = host_view(value)
            originals[id(view)] = value
            device.append(value.device)
            return view
        return torch.device("cpu") if isinstance(value, torch.device) else value

    out = {argument.name for argument in op._schema.arguments if argument.is_out}
    inputs = {name: value for name, value in kwargs.items() if name not in out}
    lent_args, lent_kwargs = pytree.tree_map(lent, (args, inputs))
    # What is written out may have to grow, which lent memory cannot.
    results = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in out}
    answer = op(*lent_args, **lent_kwargs, **results)
    for name, result in results.items():
        target = kwargs[name]
        if target.shape != result.shape:
            target.resize_(result.shape)
        target.copy_(result)
        originals[id(result)] = target

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return originals[id(value)] if id(value) in originals else value.to(device[0] if device else NAME)

    return pytree.tree_map(given, answer)
