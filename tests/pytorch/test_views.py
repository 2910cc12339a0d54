"""Virtual arrays against numpy doing the same, and targets of any strides filled through their views."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.format.box import Box
from cloudckpt.plan import virtual
from cloudckpt.plan.flat import FlatLayout
from cloudckpt.plan.shard import PieceBox
from cloudckpt.plan.virtual import VirtualArray, stored_array
from cloudckpt.pytorch.flat import FlatShards
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.targets import Want
from cloudckpt.pytorch.views import stored_wants

Numbers = np.ndarray[Any, Any]


class Stored:
    """Stored arrays of distinct numbers; every second one is stored flat."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.arrays: list[Numbers] = []
        self.count = 0

    def add(self, shape: tuple[int, ...]) -> tuple[VirtualArray, Numbers]:
        number, size = len(self.arrays), math.prod(shape)
        values = np.arange(self.count, self.count + size, dtype=np.int64).reshape(shape)
        self.count += size
        flat = (number + self.first) % 2 == 1 and len(shape) != 1
        self.arrays.append(values.reshape(-1) if flat else values)
        return stored_array(number, "int64", shape, flat=flat), values

    def serve(self, wants: list[Want]) -> None:
        for number, shard in wants:
            assert shard.shape == self.arrays[number].shape
            for piece in shard.pieces:
                local = Box(piece.local_offset, piece.shape)
                shard.memory[local.slices] = torch.from_numpy(np.array(self.arrays[number][piece.box.slices]))


@st.composite
def virtual_arrays(draw: st.DrawFn) -> tuple[Stored, VirtualArray, Numbers]:
    """Some operations on top of each other."""
    stored = Stored(draw(st.integers(0, 1)))
    shape = tuple(draw(st.lists(st.sampled_from([3, 2, 4, 1, 0]), max_size=3)))
    array, values = stored.add(shape)
    for _ in range(draw(st.integers(0, 4))):
        dims = values.ndim
        operation = draw(st.sampled_from(["stack", "concatenate", "permute", "unstack", "split"]))
        if operation == "stack" and dims < 5:
            dim = draw(st.integers(-dims - 1, dims))
            others = [stored.add(values.shape) for _ in range(draw(st.integers(0, 2)))]
            array = virtual.stack([array, *(a for a, _ in others)], dim)
            values = np.stack([values, *(v for _, v in others)], dim)
        elif operation == "concatenate" and dims:
            dim = draw(st.integers(0, dims - 1))
            extents = [draw(st.integers(0, 3)) for _ in range(2)]
            others = [stored.add((*values.shape[:dim], n, *values.shape[dim + 1 :])) for n in extents]
            array = virtual.concatenate([others[0][0], array, others[1][0]], dim)
            values = np.concatenate([others[0][1], values, others[1][1]], dim)
        elif operation == "permute":
            order = draw(st.permutations(range(dims)))
            array, values = virtual.permute(array, order), values.transpose(order)
        elif operation == "unstack" and dims:
            dim = draw(st.integers(0, dims - 1))
            if values.shape[dim]:
                i = draw(st.integers(0, values.shape[dim] - 1))
                array, values = virtual.unstack(array, dim)[i], values.take(i, dim)
        elif operation == "split" and dims:
            dim = draw(st.integers(0, dims - 1))
            cuts = sorted(draw(st.integers(0, values.shape[dim])) for _ in range(2))
            sizes = [cuts[0], cuts[1] - cuts[0], values.shape[dim] - cuts[1]]
            i = draw(st.integers(0, 2))
            array, values = virtual.split(array, dim, sizes)[i], np.split(values, cuts, dim)[i]
    return stored, array, values


@st.composite
def memories(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """Dims in any order, with gaps between them."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(0, 1)) for _ in shape]
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in shape]
    big = torch.full([step * shape[d] + gap for d, gap, step in zip(order, gaps, steps, strict=True)], -1)
    part = big[tuple(slice(0, step * shape[d], step) for d, step in zip(order, steps, strict=True))]
    return part.permute([order.index(d) for d in range(len(shape))])


@st.composite
def targets(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[LocalShard, list[tuple[Box, Box]]]:
    """Up to two pieces, side by side in the memory, along the first dim."""
    boxes = []
    for _ in range(draw(st.integers(1, 2)) if shape else 1):
        spans = [draw(st.one_of(st.just((0, n)), st.tuples(*[st.integers(0, n)] * 2).map(sorted))) for n in shape]
        boxes.append((tuple(a for a, _ in spans), tuple(b - a for a, b in spans)))
    extents = [max(b[1][d] for b in boxes) for d in range(len(shape))]
    if shape:
        extents[0] = sum(b[1][0] for b in boxes)
    pieces, row = [], 0
    for offset, extent in boxes:
        pieces.append(PieceBox((row, *(0 for _ in shape[1:])) if shape else (), offset, extent))
        row += extent[0] if shape else 0
    memory = draw(memories(tuple(extents)))
    shard = LocalShard("t", "int64", shape, tuple(pieces), memory)
    return shard, [(Box(p.local_offset, p.shape), p.box) for p in pieces]


@settings(max_examples=300)
@given(st.data())
def test_a_shard_of_a_virtual_array_is_what_numpy_says(data: st.DataObject) -> None:
    stored, array, values = data.draw(virtual_arrays())
    assert array.shape == values.shape
    shard, pieces = data.draw(targets(array.shape))
    stored.serve(stored_wants(array, shard))
    untouched = torch.ones(tuple(shard.memory.shape), dtype=torch.bool)
    for local, box in pieces:
        assert shard.memory[local.slices].tolist() == values[box.slices].tolist()
        untouched[local.slices] = False
    assert (shard.memory[untouched] == -1).all()  # type: ignore[index]


@settings(max_examples=200)
@given(st.data())
def test_a_part_of_a_flat_buffer_is_what_numpy_says(data: st.DataObject) -> None:
    """Of virtual arrays and of stored ones, flat or not, with padding around and between."""
    made = [data.draw(virtual_arrays()) for _ in range(data.draw(st.integers(1, 3)))]
    layout = FlatLayout.of([(f"p{i}", array.shape) for i, (_, array, _) in enumerate(made)], align=3)
    whole = np.full(layout.numel + 4, -1)
    for param, (_, _, values) in zip(layout.params, made, strict=True):
        whole[param.position : param.position + param.numel] = values.reshape(-1)
    start = data.draw(st.integers(0, len(whole)))
    local = torch.full((data.draw(st.integers(0, len(whole) - start)),), -1)
    shards = FlatShards(local, layout, start)
    for name, (stored, array, _) in zip(shards, made, strict=True):
        stored.serve(shards[name].wants(array, name))
    assert local.tolist() == whole[start : start + len(local)].tolist()


def test_rows_of_a_flat_array_are_pieces_of_one_view() -> None:
    """However many rows: what is done for each piece is little, for each want it is not."""
    array = stored_array(0, "float32", (1000, 64), flat=True)
    box = Box((0, 16), (1000, 16))
    for memory in (torch.zeros(1000, 16), torch.zeros(1000, 20)[:, :16]):
        wants = stored_wants(array, LocalShard("w", "float32", (1000, 64), (PieceBox((0, 0), *_parts(box)),), memory))
        assert [len(shard.pieces) for _, shard in wants] == [1000]
    rows = LocalShard("w", "float32", (1000, 64), (PieceBox((0, 0), (500, 0), (500, 64)),), torch.zeros(500, 64))
    assert [shard.pieces for _, shard in stored_wants(array, rows)] == [(PieceBox((0,), (32000,), (32000,)),)]


def _parts(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offset, box.shape
