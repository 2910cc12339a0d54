"""Private copies of shards: their values, whatever the originals are like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt import FlatLayout, FlatParam, FlatShards
from cloudckpt.format.box import Box
from cloudckpt.format.dtypes import DTYPES
from cloudckpt.pytorch import copies
from cloudckpt.pytorch.arena import ALIGNMENT
from cloudckpt.pytorch.copies import BLOCK_BYTES, SMALL_BYTES
from cloudckpt.pytorch.memory import opaque_tensor
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.staging import StagingPool
from tests.pretend_device import NAME, Stream
from tests.pytorch.staged import pool_of, shards_of
from tests.ranks import RankPool
from tests.sharding import bits, noise

MIB = 1024 * 1024


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
