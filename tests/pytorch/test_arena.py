"""Arenas, and pickles that say where in them things lie."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from cloudckpt.format.dtypes import DTYPES
from cloudckpt.pytorch import arena as arena_module
from cloudckpt.pytorch.arena import Arena, arena_dumps, arena_loads
from tests.sharding import bits, noise

MIB = 1024 * 1024


def filled(number: int = 0, *, shared: bool = False) -> Arena:
    arena = Arena.make(number, MIB, shared=shared)
    arena.tensor(0, torch.uint8, (MIB,)).copy_(noise((MIB,), torch.uint8, seed=number))
    return arena


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_views_are_over_the_bytes_at_their_offset(shared: bool):
    arena = filled(shared=shared)
    raw = bits(arena.tensor(0, torch.uint8, (MIB,)))
    for name, known in DTYPES.items():
        dtype = getattr(torch, name, None)
        if dtype is not None:
            view = arena.tensor(128, dtype, (3, 5))
            assert view.is_contiguous()
            assert bits(view) == raw[128 : 128 + 15 * known.itemsize], name
    for dtype in (np.dtype("<i4"), np.dtype("S5"), np.dtype(ml_dtypes.bfloat16), np.dtype("<M8[s]")):
        array = arena.array(64, dtype, (2, 3))
        assert array.tobytes() == raw[64 : 64 + 6 * dtype.itemsize]
    assert arena.tensor(64, torch.float32, ()).shape == arena.array(64, np.dtype("f4"), ()).shape == ()


def test_memory_lasts_as_long_as_its_views():
    arena = filled(shared=True)
    fd = arena.fd
    assert fd is not None
    view = arena.tensor(0, torch.uint8, (100,))
    before = bits(view)
    arena.close()
    arena.close()
    assert bits(view) == before
    assert arena.fd is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_that_is_not_there_is_an_error_before_it_is_asked_for(shared: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arena_module, "available_bytes", lambda: MIB - 1)
    with pytest.raises(MemoryError, match="only 1048575 bytes of memory are left"):
        Arena.make(0, MIB, shared=shared)


def test_without_files_in_memory_a_temporary_one_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    arena = filled(shared=True)
    assert arena.fd is not None
    assert os.fstat(arena.fd).st_size == MIB
    arena.tensor(0, torch.uint8, (3,)).copy_(torch.tensor([1, 2, 3]))
    assert os.pread(arena.fd, 3, 0) == b"\1\2\3"


class FakeRuntime:
    """Of CUDA's, what pins memory."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, nbytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append((address,))
        return 0


def test_cuda_pins_an_arena_once_and_lets_go_of_it(monkeypatch: pytest.MonkeyPatch):
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    arena = filled(shared=True)
    address = arena.address
    arena.pin()
    arena.pin()
    arena.close()
    arena.close()
    assert runtime.calls == [(address, MIB, 1), (address,)]


def test_where_cuda_pins_nothing_there_is_one_warning(monkeypatch: pytest.MonkeyPatch):
    runtime = FakeRuntime(801)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def raise_what_cuda_kept(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error 801")

    monkeypatch.setattr(torch, "ones", raise_what_cuda_kept)
    arena = filled()
    with pytest.warns(UserWarning, match=r"cannot pin 1048576 bytes .* \(error 801\)"):
        arena.pin()
    arena.pin()
    arena.close()
    assert len(runtime.calls) == 1


def test_what_lies_in_arenas_is_pickled_by_its_place():
    arenas = [filled(7), filled(9)]
    tensor, array = arenas[1].tensor(64, torch.float32, (100, 200)), arenas[0].array(128, np.dtype("<i2"), (3, 1000))
    graph = {"tensor": tensor, "again": tensor, "part": tensor[10:20], "array": array, "plan": np.arange(3), "lr": 0.1}
    data = arena_dumps(graph, arenas)
    assert len(data) < 1000
    back = arena_loads(data, {arena.number: arena for arena in arenas})
    assert back["tensor"].data_ptr() == tensor.data_ptr()
    assert back["again"] is back["tensor"]
    assert back["part"].data_ptr() == tensor[10].data_ptr()
    assert bits(back["part"]) == bits(tensor[10:20])
    assert np.shares_memory(back["array"], array)
    assert back["array"].dtype == array.dtype
    assert (back["array"] == array).all()
    assert back["plan"].tolist() == [0, 1, 2]
    assert not np.shares_memory(back["plan"], graph["plan"])
    assert back["lr"] == 0.1


def test_empty_tensors_lie_nowhere():
    back = arena_loads(arena_dumps([torch.empty(0, 3, dtype=torch.int8)], []), {})[0]
    assert (back.shape, back.dtype) == ((0, 3), torch.int8)


def test_other_tensors_are_refused():
    arena = filled()
    inside = arena.tensor(0, torch.float32, (10, 10))
    for wrong in (torch.zeros(3), inside.t(), torch.nn.Parameter(torch.zeros(3))):
        with pytest.raises(pickle.PicklingError, match="lies in no staging arena"):
            arena_dumps({"w": wrong}, [arena])


def test_an_arena_that_is_not_mapped_is_named():
    arena = filled(3)
    data = arena_dumps(arena.tensor(0, torch.float32, (10,)), [arena])
    with pytest.raises(pickle.UnpicklingError, match=r"arena 3 is not mapped here: only \[4\] are"):
        arena_loads(data, {4: filled(4)})


OTHER_PROCESS = """
import sys
from pathlib import Path
from cloudckpt.pytorch import arena as arena_module
from cloudckpt.pytorch.arena import Arena, arena_loads
arena = Arena.attached(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
found = arena_loads(Path(sys.argv[4]).read_bytes(), {arena.number: arena})
found["array"] += 1
found["tensor"].add_(1)
"""


def test_another_process_sees_the_same_bytes(tmp_path: Path):
    arena = Arena.make(5, MIB, shared=True)
    tensor, array = arena.tensor(0, torch.float32, (10, 10)), arena.array(4096, np.dtype("<i8"), (7,))
    tensor.fill_(1)
    array.fill(2)
    pickled = tmp_path / "pickled"
    pickled.write_bytes(arena_dumps({"tensor": tensor, "array": array}, [arena]))
    assert arena.fd is not None
    command = [sys.executable, "-c", OTHER_PROCESS, *map(str, (arena.number, arena.fd, arena.nbytes, pickled))]
    subprocess.run(command, pass_fds=[arena.fd], check=True, timeout=60)
    assert (tensor == 2).all()
    assert (array == 3).all()
