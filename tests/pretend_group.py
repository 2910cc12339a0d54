"""``pretendccl``: collectives for tensors of the pretend accelerator only, as picky as the real ones.

It refuses tensors of other devices, object collectives, and the dtypes that HCCL does not know. The
bytes travel over gloo, through host copies.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    _create_work_from_future,
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


class PretendGroup(dist.ProcessGroup):
    """A Python process group stands for all devices of its group: none is left for gloo beside it.

    ``sent_bytes``: by collective, what this rank gave to it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self.sent_bytes: Counter[str] = Counter()
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

    @property
    def _device_types(self) -> list[torch.device]:
        """torch asks backends for it, which a Python process group has none of."""
        return [torch.device(pretend_device.NAME)]

    def broadcast(self, tensors: Tensors, options: BroadcastOptions) -> dist.Work:
        hosts = self._sent("broadcast", tensors)
        return _work(self._gloo.broadcast(hosts, options), lambda: _fill(tensors, hosts))

    def allreduce(self, tensors: Tensors, options: AllreduceOptions) -> dist.Work:
        hosts = self._sent("allreduce", tensors)
        return _work(self._gloo.allreduce(hosts, options), lambda: _fill(tensors, hosts))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: AllgatherOptions) -> dist.Work:
        hosts = self._sent("allgather", inputs)
        received = [[torch.empty(t.shape, dtype=t.dtype) for t in _checked(ranks)] for ranks in outputs]
        work = self._gloo.allgather(received, hosts, options)
        pairs = [pair for ranks, got in zip(outputs, received, strict=True) for pair in zip(ranks, got, strict=True)]
        return _work(work, lambda: _fill(*zip(*pairs, strict=True)))

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int],
        source_sizes: list[int],
        options: AllToAllOptions,
    ) -> dist.Work:
        host = self._sent("alltoall", [source])[0]
        received = torch.empty(_checked([output])[0].shape, dtype=output.dtype)
        work = self._gloo.alltoall_base(received, host, output_sizes, source_sizes, options)
        return _work(work, lambda: _fill([output], [received]))

    def barrier(self, opts: BarrierOptions) -> dist.Work:
        return _work(self._gloo.barrier(opts), lambda: None)

    def _sent(self, collective: str, tensors: Tensors) -> list[torch.Tensor]:
        """Contiguous host copies of what this rank holds now."""
        self.sent_bytes[collective] += sum(tensor.nbytes for tensor in tensors)
        return [pretend_device.host_view(tensor).clone() for tensor in _checked(tensors)]


def _work(inner: dist.Work, finish: Callable[[], None]) -> dist.Work:
    """Done once ``finish`` is. Made of a future: nobody asks a work of Python's own whether it is completed."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def after(done: torch.futures.Future[Any]) -> None:
        try:
            done.wait()
            finish()
            future.set_result([])
        except RuntimeError as error:
            future.set_exception(error)

    inner.get_future().add_done_callback(after)
    return _create_work_from_future(future)


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
