"""Private copies of shards in memory that later saves use again."""

from __future__ import annotations

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt import FlatLayout, FlatParam, FlatShards
from cloudckpt.errors import BusyError, InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.dtypes import DTYPES
from cloudckpt.pytorch import arena as arena_module
from cloudckpt.pytorch import copies
from cloudckpt.pytorch.arena import ALIGNMENT
from cloudckpt.pytorch.copies import BLOCK_BYTES, SMALL_BYTES, Copies
from cloudckpt.pytorch.memory import opaque_tensor
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard, ndarray_shard, tensor_shard
from cloudckpt.pytorch.staging import HUGE_PAGE, StagingPool
from tests.pretend_device import NAME, Stream
from tests.ranks import RankPool
from tests.sharding import bits, noise

MIB = 1024 * 1024


def shards_of(**held: torch.Tensor | np.ndarray) -> dict[str, LocalShard]:
    return {
        name: tensor_shard(obj, name) if isinstance(obj, torch.Tensor) else ndarray_shard(obj, name)[0]
        for name, obj in held.items()
    }


def pool_of(max_bytes: int | None = None, *, shared: bool = False) -> StagingPool:
    return StagingPool(shared=shared, max_bytes=max_bytes)


def element_bits(shard: LocalShard) -> bytes:
    memory = shard.memory
    return bits(memory) if isinstance(memory, torch.Tensor) else np.ascontiguousarray(memory).tobytes()


STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: noise((30, 70)),
    "scalar": lambda: noise(()),
    "empty": lambda: noise((0, 7)),
    "transposed": lambda: noise((30, 70)).t(),
    "every other": lambda: noise((30, 70))[1:, ::2],
    "channels last": lambda: noise((2, 3, 8, 8)).to(memory_format=torch.channels_last),
    "expanded": lambda: noise((30, 1)).expand(30, 70),
    "conjugated": lambda: noise((30, 70), torch.complex64).conj(),
    "negated": lambda: torch._neg_view(noise((30, 70))),
    "imaginary": lambda: noise((30, 70), torch.complex64).conj().imag,
    "large": lambda: noise((SMALL_BYTES + 1,), torch.uint8),
    "several blocks": lambda: noise((2 * BLOCK_BYTES + 12345,), torch.uint8),
    "large and transposed": lambda: noise((3000, 1001)).t(),
    "parameter": lambda: torch.nn.Parameter(noise((30, 70))),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_has_the_values_and_is_private(make: Callable[[], torch.Tensor], shared: bool):
    tensor = make().detach()
    expected = bits(tensor.resolve_conj().resolve_neg())
    staged = pool_of(shared=shared).stage(shards_of(w=tensor))
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).bitwise_not_()
    copy = staged.shards["w"].memory
    assert isinstance(copy, torch.Tensor)
    assert copy.is_contiguous()
    assert bits(copy) == expected


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype():
    dtypes = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
    held = {name: noise((6, 8), dtype) for name, dtype in dtypes.items()}
    held |= {f"{name}, strided": opaque_tensor(noise((8, 6), dtype)).t().view(dtype) for name, dtype in dtypes.items()}
    shards = shards_of(**held)
    staged = pool_of().stage(shards)
    assert {name: shard.dtype for name, shard in staged.shards.items()} == {n: s.dtype for n, s in shards.items()}
    assert [name for name in shards if element_bits(shards[name]) != element_bits(staged.shards[name])] == []


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "numbers": lambda: np.arange(12.0).reshape(3, 4),
    "fortran": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "backwards": lambda: np.arange(12)[::-2],
    "big endian": lambda: np.arange(12, dtype=">i4"),
    "bfloat16": lambda: np.arange(12).astype(ml_dtypes.bfloat16),
    "text": lambda: np.array(["a", "bcd"]),
    "dates": lambda: np.array(["2026-11-29"], dtype="M8[s]"),
    "scalar": lambda: np.array(3),
    "empty": lambda: np.zeros((0, 3)),
    "large": lambda: np.arange(BLOCK_BYTES),
    "large fortran": lambda: np.asfortranarray(np.arange(SMALL_BYTES).reshape(2, -1)),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays(make: Callable[[], np.ndarray]):
    array = make()
    expected = array.tobytes()
    staged = pool_of().stage(shards_of(w=array))
    array[...] = np.zeros((), array.dtype)
    copy = staged.shards["w"].memory
    assert isinstance(copy, np.ndarray)
    assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
    assert copy.flags.c_contiguous
    assert copy.tobytes() == expected


@given(st.data())
def test_any_view(data: st.DataObject):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    stride = [data.draw(st.integers(0, 7)) for _ in shape]
    offset = data.draw(st.integers(0, 3))
    view = noise((200,), torch.int16).as_strided(shape, stride, offset)
    staged = POOL.stage(shards_of(w=view))
    assert element_bits(staged.shards["w"]) == bits(view.clone(memory_format=torch.contiguous_format))
    staged.release()


POOL = pool_of()


def test_only_the_view_is_copied():
    base = torch.zeros(4 * MIB)
    assert pool_of().stage(shards_of(w=base[:10])).nbytes == ALIGNMENT


def test_the_same_memory_is_copied_once_and_stays_the_same():
    weight = noise((100, 100))
    array = np.arange(100)
    shards = shards_of(w=weight, tied=weight.detach(), part=weight[:50], turned=weight.t(), a=array, b=array)
    staged = pool_of().stage(shards)
    copy = staged.shards
    assert copy["w"].identity == copy["tied"].identity
    assert copy["a"].memory is copy["b"].memory
    assert len({copy[name].identity for name in ("w", "part", "turned")}) == 3
    assert staged.nbytes == 40000 + 20032 + 40000 + 832
    for name, shard in shards.items():
        assert element_bits(copy[name]) == element_bits(shard)


def test_shards_keep_all_but_their_memory():
    shard = shards_of(w=noise((10, 10)))["w"]
    _ = shard.elements  # cached
    copy = pool_of().stage({"w": shard}).shards["w"]
    assert {**vars(shard), "memory": 0, "elements": 0} == {**vars(copy), "memory": 0, "elements": 0}
    box = Box((2, 3), (4, 5))
    assert copy.read(box, box.shape, Scratch()).tobytes() == shard.read(box, box.shape, Scratch()).tobytes()


def test_flat_shards_in_boxes():
    layout = FlatLayout([FlatParam("w", (4, 6), 0)], as_boxes=True)
    shard = FlatShards(noise((15,)), layout, 2)["w"].stored("w")
    copy = pool_of().stage({"w": shard}).shards["w"]
    assert len(shard.pieces) > 1
    for piece in shard.pieces:
        data = shard.read(piece.box, piece.shape, Scratch()).tobytes()
        assert copy.read(piece.box, piece.shape, Scratch()).tobytes() == data


def test_nothing_at_all():
    staged = pool_of().stage({})
    assert (staged.shards, staged.nbytes, staged.arena) == ({}, 0, None)
    staged.release()
    staged = pool_of().stage(shards_of(w=torch.empty(0, 3), a=np.empty(0)))
    assert staged.arena is None
    assert staged.shards["w"].shape == (0, 3)


# Memory of the pool.


def test_memory_is_used_again_after_release_and_not_before():
    pool = pool_of()
    first = pool.stage(shards_of(w=torch.full((MIB,), 1.0)))
    second = pool.stage(shards_of(w=torch.full((MIB,), 2.0)))
    assert first.arena is not second.arena
    assert first.shards["w"].memory.min() == first.shards["w"].memory.max() == 1
    arena = first.arena
    first.release()
    first.release()
    assert first.shards == {}
    third = pool.stage(shards_of(w=torch.full((MIB,), 3.0)))
    assert third.arena is arena
    first.release()
    assert pool.stage(shards_of(w=torch.zeros(MIB))).arena is not arena
    assert third.shards["w"].memory.min() == 3
    assert second.shards["w"].memory.max() == 2


def test_a_state_that_has_grown_gets_a_larger_arena_instead():
    pool = pool_of(shared=True)
    for num_elements in (MIB, 2 * MIB, 2 * MIB + 10000, MIB // 2, 3 * MIB):
        staged = pool.stage(shards_of(w=torch.zeros(num_elements)))
        staged.release()
        assert len(pool.arenas) == 1
    assert pool.arenas[0].nbytes == 3 * MIB * 4
    pool.trim()
    assert pool.arenas == ()


def test_an_arena_is_found_for_each_size():
    pool = pool_of()
    large, small = pool.stage(shards_of(w=torch.zeros(4 * MIB))), pool.stage(shards_of(w=torch.zeros(MIB)))
    arenas = large.arena, small.arena
    large.release()
    small.release()
    for _ in range(2):
        small = pool.stage(shards_of(w=torch.zeros(MIB)))
        large = pool.stage(shards_of(w=torch.zeros(4 * MIB)))
        assert (large.arena, small.arena) == arenas
        small.release()
        large.release()


def test_memory_does_not_grow_over_200_saves():
    pool = pool_of(shared=True)
    shards = shards_of(**{str(i): torch.zeros(1000) for i in range(50)})

    def save_twice_at_once() -> None:
        staged = [pool.stage(shards), pool.stage(shards)]
        for one in staged:
            one.release()

    for _ in range(5):
        save_twice_at_once()
    arenas, fds = set(pool.arenas), len([*Path("/proc/self/fd").iterdir()])
    tracemalloc.start()
    for _ in range(100):
        save_twice_at_once()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert set(pool.arenas) == arenas
    assert len([*Path("/proc/self/fd").iterdir()]) == fds
    assert len(arenas) == 2
    assert grown < 10_000


def test_staging_waits_for_memory_of_earlier_saves():
    pool = pool_of(max_bytes=2 * HUGE_PAGE)
    shards = shards_of(w=torch.ones(HUGE_PAGE // 4))
    held = [pool.stage(shards), pool.stage(shards)]
    releasing = threading.Timer(0.2, held[0].release)
    releasing.start()
    staged = pool.stage(shards, timeout_s=60)
    assert held[0].shards == {}
    assert staged.shards["w"].memory.min() == 1
    releasing.join()
    with pytest.raises(BusyError, match=r"saves that still run hold 4194304 of the 4194304 bytes that Config.staging"):
        pool.stage(shards, timeout_s=0)
    larger = shards_of(w=torch.ones(HUGE_PAGE // 2))
    with pytest.raises(BusyError, match=r"none ended within 0.01 s"):
        pool.stage(larger, timeout_s=0.01)
    staged.release()
    held[1].release()
    assert pool.stage(larger, timeout_s=0).nbytes == 2 * HUGE_PAGE
    assert sum(arena.nbytes for arena in pool.arenas) <= 2 * HUGE_PAGE


def test_a_state_that_never_fits_is_refused_at_once():
    with pytest.raises(InvalidStateError, match=r"has 40000 bytes, of 1000 that Config.staging_bytes allows"):
        pool_of(max_bytes=1000).stage(shards_of(w=torch.zeros(10000)))
    assert pool_of(max_bytes=40000).stage(shards_of(w=torch.zeros(10000))).nbytes == 40000


def test_no_memory_is_an_error_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arena_module, "available_bytes", lambda: MIB)
    with pytest.raises(InvalidStateError, match=r"4194304 bytes, and there is no memory for it.*Use save\(\)"):
        pool_of().stage(shards_of(w=torch.zeros(MIB)))


def test_a_copy_that_fails_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch):
    pool = pool_of(max_bytes=HUGE_PAGE)
    shards = shards_of(w=torch.ones(10))

    def fail(self: Copies) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Copies, "run", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            pool.stage(shards)
    assert pool.stage(shards, timeout_s=0).shards["w"].memory.max() == 1


FORKED = """
import os, sys, torch
from cloudckpt.pytorch.shards import tensor_shard
from cloudckpt.pytorch.staging import StagingPool
pool = StagingPool(shared=sys.argv[1] == "shared", max_bytes=None)
free = pool.stage({"w": tensor_shard(torch.ones(1000), "w")})
staged = pool.stage({"w": tensor_shard(torch.ones(1000), "w")})
free.release()
child = os.fork()
if child == 0:
    own = pool.stage({"w": tensor_shard(torch.full((1000,), 2.0), "w")})
    staged.release()
    fine = bool((own.shards["w"].memory == 2).all()) and len(pool.arenas) == 1
    os._exit(0 if fine else 1)
assert os.waitpid(child, 0)[1] == 0
assert (staged.shards["w"].memory == 1).all()
again = pool.stage({"w": tensor_shard(torch.full((1000,), 3.0), "w")})
assert again.arena is pool.arenas[1] and len(pool.arenas) == 2, pool.arenas
assert (staged.shards["w"].memory == 1).all()
"""


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_a_forked_child_has_memory_of_its_own(kind: str):
    subprocess.run([sys.executable, "-c", FORKED, kind], check=True, timeout=60)


# Devices.


def staged_from_device() -> dict[str, Any]:
    kinds = {name: make().detach() for name, make in STRIDED.items() if "conj" not in name and "nega" not in name}
    held = {name: tensor.to(NAME) for name, tensor in kinds.items()}
    held |= {
        "view": held["contiguous"].t()[1:, ::2],
        "host": noise((100,)),
        "fp8": noise((9,), torch.float8_e5m2).to(NAME),
    }
    made: list[Stream] = []
    real_init = Stream.__init__

    def noted(stream: Stream, device: Any = None) -> None:
        real_init(stream, device)
        made.append(stream)

    Stream.__init__ = noted  # type: ignore[method-assign]
    copies.ROWS_BYTES = 1000
    shards = shards_of(**held)
    staged = StagingPool(shared=True, max_bytes=None).stage(shards)
    current = torch.get_device_module(NAME).current_stream()
    expected = {name: bits(tensor.cpu()) for name, tensor in held.items()}
    return {
        "wrong": [name for name, shard in staged.shards.items() if element_bits(shard) != expected[name]],
        "on host": all(shard.on_host for shard in staged.shards.values()),
        "streams": len(made),
        "after": [stream.waits_for == [current] for stream in made],
        "unfinished": sum(len(stream.queue) for stream in made),
    }


def test_tensors_on_a_device_come_over_a_stream_of_their_own(accelerated_ranks: RankPool):
    assert accelerated_ranks.run(1, staged_from_device) == [
        {"wrong": [], "on host": True, "streams": 1, "after": [True], "unfinished": 0}
    ]
