"""Memory of private copies: used again, never too early, and never more than is allowed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

from cloudckpt.errors import BusyError, InvalidStateError
from cloudckpt.pytorch import arena as arena_module
from cloudckpt.pytorch.copies import Copies
from cloudckpt.pytorch.staging import HUGE_PAGE
from tests.pytorch.staged import pool_of, shards_of

MIB = 1024 * 1024


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
    gc.collect()
    # Of staging alone: threads that earlier tests have left, and clients, allocate what they like.
    traces = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, f"{Path(arena_module.__file__).parent}/*")]
    )
    tracemalloc.stop()
    grown = sum(trace.size for trace in traces.traces)
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
