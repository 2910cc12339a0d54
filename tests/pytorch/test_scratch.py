"""Buffers that are used again."""

from __future__ import annotations

import gc
import random
import threading
from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.config import KIB, MIB
from cloudckpt.pytorch.scratch import SLAB_BYTES, SMALLEST_BYTES, Scratch


def pages(buffer: np.ndarray) -> range:
    """The numbers of the pages that it lies in."""
    first = buffer.ctypes.data // 4096
    return range(first, (buffer.ctypes.data + len(buffer) - 1) // 4096 + 1)


def test_no_two_share_memory_and_all_of_it_comes_back():
    scratch = Scratch()
    for _ in range(3):
        buffers = [scratch.take(SMALLEST_BYTES + 1000 * i) for i in range(200)]
        for i, buffer in enumerate(buffers):
            buffer[:] = i
        assert all((buffer == i).all() and len(buffer) == SMALLEST_BYTES + 1000 * i for i, buffer in enumerate(buffers))
        slabs = [*scratch._slabs]
        random.Random(1).shuffle(buffers)
        while buffers:
            del buffer
            buffer = buffers.pop()
        del buffer
    assert scratch._slabs == slabs
    scratch.take(SMALLEST_BYTES)
    assert all(slab.is_free for slab in slabs[1:])


def test_a_view_keeps_its_buffer():
    scratch = Scratch()
    view = scratch.take(MIB).view(np.uint32).reshape(2, -1)[1:]
    view[:] = 7
    for _ in range(20):
        scratch.take(MIB)[:] = 1
    assert (view == 7).all()


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(256 * KIB, 4 * MIB), min_size=1, max_size=4), seed=st.integers(0, 10))
def test_sizes_after_one_another_take_about_as_much_memory_as_is_lent(sizes: list[int], seed: int):
    """As in a save: arrays of one kind of chunk after the other, and 32 MiB of them under way."""
    scratch = Scratch()
    lent: deque[np.ndarray] = deque()
    shuffled = random.Random(seed)
    touched: set[int] = set()
    for size in sizes:
        for _ in range(64 * MIB // size):
            while sum(map(len, lent)) + size > 32 * MIB:
                # Parts arrive in about the order in which they were sent.
                del lent[shuffled.randrange(min(len(lent), 4))]
            buffer = scratch.take(size)
            touched.update(pages(buffer))
            lent.append(buffer)
    del buffer
    # A quarter for gaps that are a little too small, and one of each size at the ends of slabs.
    assert len(touched) * 4096 <= 40 * MIB + 4 * max(sizes)


def test_one_larger_than_a_slab():
    scratch = Scratch()
    for size in (SLAB_BYTES + 1, SLAB_BYTES + 5 * MIB, 2 * SLAB_BYTES):
        scratch.take(size)[:] = 1
    gc.collect()
    scratch.take(MIB)
    assert sum(len(slab.memory) for slab in scratch._slabs) == 2 * SLAB_BYTES
    assert len(scratch.take(100 * KIB)) == 100 * KIB


def test_by_several_threads():
    scratch = Scratch()
    wrong: list[int] = []

    def use(number: int) -> None:
        for i in range(300):
            buffer = scratch.take(SMALLEST_BYTES + 4096 * (i % 7))
            buffer[:] = number
            if not (buffer == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(scratch._slabs) == 1
