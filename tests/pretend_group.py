"""``pretendccl``: collectives for tensors of the pretend accelerator only, as picky as the real ones.

It refuses tensors of other devices, object collectives, and the dtypes that HCCL does not know. The
bytes travel over gloo, through host copies. What has been received is in its tensor no earlier than
in ``wait()``: whoever forgets to wait sees it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
)

from tests import pretend_device

BACKEND = "pretendccl"

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)

Tensors = Sequence[torch.Tensor]


@functools.cache
def install() -> None:
    """The device, too. In every process, before ``init_process_group("pretendccl")``."""
    pretend_device.install()
    dist.Backend.register_backend(BACKEND, _create, devices=[pretend_device.NAME])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> PretendGroup:
    return PretendGroup(store, rank, size, timeout)


class _Work(dist._Work):
    def __init__(self, inner: dist.Work | None, finish: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._finish is not None:
            if self._inner is not None:
                self._inner.wait()
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        return self._finish is None or self._inner is None or self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner is None or self._inner.is_success()


class PretendGroup(dist.ProcessGroup):
    """A Python process group stands for all devices of its group: none is left for gloo beside it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802  # torch's names
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def broadcast(self, tensors: Tensors, options: BroadcastOptions) -> dist.Work:
        hosts = self._sent(tensors)
        return _Work(self._gloo.broadcast(hosts, options), lambda: _fill(tensors, hosts))

    def allreduce(self, tensors: Tensors, options: AllreduceOptions) -> dist.Work:
        hosts = self._sent(tensors)
        return _Work(self._gloo.allreduce(hosts, options), lambda: _fill(tensors, hosts))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: AllgatherOptions) -> dist.Work:
        hosts = self._sent(inputs)
        received = [[torch.empty(t.shape, dtype=t.dtype) for t in _checked(ranks)] for ranks in outputs]
        work = self._gloo.allgather(received, hosts, options)
        pairs = [pair for ranks, got in zip(outputs, received, strict=True) for pair in zip(ranks, got, strict=True)]
        return _Work(work, lambda: _fill(*zip(*pairs, strict=True)))

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int],
        source_sizes: list[int],
        options: AllToAllOptions,
    ) -> dist.Work:
        host = self._sent([source])[0]
        received = torch.empty(_checked([output])[0].shape, dtype=output.dtype)
        work = self._gloo.alltoall_base(received, host, output_sizes, source_sizes, options)
        return _Work(work, lambda: _fill([output], [received]))

    def barrier(self, opts: BarrierOptions) -> dist.Work:
        return _Work(self._gloo.barrier(opts), lambda: None)

    def _sent(self, tensors: Tensors) -> list[torch.Tensor]:
        """Contiguous host copies of what this rank holds now."""
        return [pretend_device.host_view(tensor).clone() for tensor in _checked(tensors)]


def _checked(tensors: Tensors) -> Tensors:
    _refuse_objects()
    for tensor in tensors:
        if tensor.device.type != pretend_device.NAME:
            raise RuntimeError(f"{BACKEND}: a tensor on {tensor.device}, but tensors must be on {pretend_device.NAME}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{BACKEND}: unsupported data type {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{BACKEND}: tensors must be contiguous")
    return tensors


def _refuse_objects() -> None:
    frame = sys._getframe()
    while frame := frame.f_back:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
        if "object" in name and module == "torch.distributed.distributed_c10d":
            raise RuntimeError(f"{BACKEND}: {name}() is not supported; objects go over a CPU group")


def _fill(tensors: Tensors, hosts: Tensors) -> None:
    for tensor, host in zip(tensors, hosts, strict=True):
        pretend_device.host_view(tensor).copy_(host)
