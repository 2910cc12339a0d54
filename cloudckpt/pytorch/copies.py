"""Many copies to the host at once: from host memory by several threads, from devices beside what they compute."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cloudckpt.format.dtypes import DTYPES
from cloudckpt.pytorch.memory import opaque_tensor

BLOCK_BYTES = 16 * 1024 * 1024
"""What one thread copies at a time: enough for its start to cost nothing, little enough to be shared out evenly."""

SMALL_BYTES = 256 * 1024
"""Below, torch copies many tensors in one call; above, a call for each costs next to nothing."""

ROWS_BYTES = 64 * 1024 * 1024
"""Of a device tensor that is not contiguous: torch makes it so in device memory, of which there may be no more."""

MAX_THREADS = 4
"""A few threads fill the part of a machine's memory bandwidth that is one rank's."""

_NOT_COPIED = frozenset(getattr(torch, name, None) for name, dtype in DTYPES.items() if dtype.zarr_name is None)
"""Types of which torch copies some, and which depends on its version."""

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Copies:
    """Copies to contiguous host memory that are made in one go. The ends must stay alive until then.

    Sources may be strided in any way, and on any device.
    """

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, int, int]] = deque()  # target, source, nbytes
        self._tensors: list[_Pair] = []
        self._arrays: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        self._on_devices: dict[torch.device, list[_Pair]] = {}

    def add_tensor(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.dtype in _NOT_COPIED:
            target, source = opaque_tensor(target), opaque_tensor(source)
        if source.device.type != "cpu":
            self._on_devices.setdefault(source.device, []).append((target, source))
        elif source.nbytes >= SMALL_BYTES and source.is_contiguous():
            self._add_blocks(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            self._tensors.append((target, source))

    def add_array(self, target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        if source.nbytes >= SMALL_BYTES and source.flags.c_contiguous:
            self._add_blocks(_address(target), _address(source), source.nbytes)
        else:
            self._arrays.append((target, source))

    def _add_blocks(self, target: int, source: int, nbytes: int) -> None:
        for start in range(0, nbytes, BLOCK_BYTES):
            self._blocks.append((target + start, source + start, min(BLOCK_BYTES, nbytes - start)))

    def run(self) -> None:
        """Returns when all bytes are there, or nothing is being copied any more.

        Devices first finish what was queued on their current streams before.
        """
        under_way = []
        try:
            for device, pairs in self._on_devices.items():
                under_way.append(_SideStream(device))
                under_way[-1].copy(pairs)
            self._copy_on_host()
        finally:
            for stream in under_way:
                stream.wait()

    def _copy_on_host(self) -> None:
        with ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="cloudckpt-stage") as executor:
            helping = [executor.submit(self._copy_blocks) for _ in range(self._num_helpers())]
            if self._tensors:
                torch._foreach_copy_([target for target, _ in self._tensors], [source for _, source in self._tensors])
            for target, source in self._arrays:
                np.copyto(target, source)
            self._copy_blocks()
            for future in helping:
                future.result()

    def _num_helpers(self) -> int:
        return min(MAX_THREADS, os.cpu_count() or 1, len(self._blocks)) - 1

    def _copy_blocks(self) -> None:
        # memmove and not torch: it lets other threads run Python, and starts no threads of its own for each of these.
        while True:
            try:
                block = self._blocks.popleft()
            except IndexError:
                return
            ctypes.memmove(*block)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


class _SideStream:
    """Copies from one device on a stream of their own, where it has streams."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = None
        if hasattr(self._module, "Stream"):
            self._stream = self._module.Stream(device)
            self._stream.wait_stream(self._module.current_stream(device))

    def copy(self, pairs: Sequence[_Pair]) -> None:
        """Begin; the ends must stay alive until `wait` returns."""
        cut = [part for pair in pairs for part in _in_rows(*pair)]
        targets, sources = [target for target, _ in cut], [source for _, source in cut]
        if self._stream is None:
            torch._foreach_copy_(targets, sources)
            return
        with self._module.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _in_rows(target: torch.Tensor, source: torch.Tensor) -> list[_Pair]:
    """In parts of which torch can make contiguous ones on the device."""
    if source.nbytes <= ROWS_BYTES or source.is_contiguous():
        return [(target, source)]
    rows = max(1, len(source) * ROWS_BYTES // source.nbytes)
    return list(zip(torch.split(target, rows), torch.split(source, rows), strict=True))
