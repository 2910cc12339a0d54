"""pytorch/pytorch#163548: overlap checks and planning that are quadratic in the number of shards.

A plan here counts what it does in Python, which would betray loops over pairs; the timeout ends the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.document import ObjectEntry
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.tree import LeafSpec
from cloudckpt.plan.writes import SavePlan, plan_save
from cloudckpt.transfer.job import ArrayPlan, Blueprint, assemble
from cloudckpt.transfer.upload import UploadReceipt

pytestmark = pytest.mark.timeout(60)

MIB = 1024 * 1024


def count_calls(function: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how many functions it called on the way, numpy's included."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        value = function()
    finally:
        sys.setprofile(None)
    return value, count


def rows(num: int) -> tuple[TensorSpec, list[PieceTable]]:
    """One tensor cut along its first dim, one piece per rank."""
    shape = (num * 2, 64)
    return TensorSpec("w", shape, 4), [PieceTable.build([(0, Box((2 * i, 0), (2, 64)))]) for i in range(num)]


def tiles(num: int) -> tuple[TensorSpec, list[PieceTable]]:
    """One tensor in boxes of 128 x 128, ``num`` of them in all, over 64 ranks."""
    side = round(num**0.5)
    boxes = [Box((128 * i, 128 * j), (128, 128)) for i in range(side) for j in range(side)]
    per_rank = -(-len(boxes) // 64)
    tables = [PieceTable.build([(0, box) for box in boxes[r * per_rank : (r + 1) * per_rank]]) for r in range(64)]
    return TensorSpec("w", (128 * side, 128 * side), 4), tables


def load_plan(spec: TensorSpec, plan: SavePlan, wants: Sequence[PieceTable]) -> Any:
    sizes = plan.grids[0].stored_elements * spec.itemsize + 4
    order = np.argsort(plan.owner, kind="stable")
    offsets = np.zeros(len(sizes), dtype=np.int64)
    offsets[order] = np.cumsum(sizes[order]) - sizes[order]
    stored = StoredChunks(plan.grids, plan.first_chunks, plan.owner.astype(np.int64), offsets, sizes, [spec.itemsize])
    return plan_load(stored, wants, read_bytes=16 * MIB)


@pytest.mark.parametrize("cut", [rows, tiles])
def test_16384_pieces_of_one_tensor(cut: Callable[[int], tuple[TensorSpec, list[PieceTable]]]):
    calls: dict[int, tuple[int, int]] = {}
    for num in (4096, 16_384):
        spec, tables = cut(num)
        plan, saving = count_calls(lambda spec=spec, tables=tables: plan_save([spec], tables, chunk_bytes=4 * MIB))
        assert int(plan.grids[0].stored_elements.sum()) == spec.shape[0] * spec.shape[1]
        assert (plan.owner >= 0).all()
        # Every rank wants another rank's part.
        wants = [*tables[1:], tables[0]]
        loads, loading = count_calls(lambda spec=spec, plan=plan, wants=wants: load_plan(spec, plan, wants))
        assert sorted(loads.fetched.tolist()) == list(range(len(plan.owner)))
        calls[num] = saving, loading
    for few, many in zip(calls[4096], calls[16_384], strict=True):
        assert many <= 6 * few, calls


def test_2000_tensors_of_512_shards():
    specs = [TensorSpec(f"w{i}", (1024, 8), 2) for i in range(2000)]
    numbers, shape = np.arange(len(specs)), np.full((len(specs), 2), (2, 8))
    tables = [PieceTable(numbers, np.full((len(specs), 2), (2 * rank, 0)), shape) for rank in range(512)]
    plan = plan_save(specs, tables, chunk_bytes=4 * MIB)
    assert len(plan.owner) >= 2000 * 512
    assert np.bincount(plan.owner, minlength=512).min() == np.bincount(plan.owner).max()


@pytest.mark.parametrize("cut", [rows, tiles])
def test_a_real_gap_is_named(cut: Callable[[int], tuple[TensorSpec, list[PieceTable]]]):
    spec, tables = cut(16_384)
    middle = len(tables) // 2
    table = tables[middle]
    missing = table.box(len(table) // 2, 2)
    kept = np.arange(len(table)) != len(table) // 2
    tables[middle] = PieceTable(table.tensor[kept], table.offset[kept], table.shape[kept])
    with pytest.raises(InvalidStateError) as caught:
        plan_save([spec], tables, chunk_bytes=4 * MIB)
    assert "'w'" in str(caught.value)
    start, stop = missing.offset[0], missing.offset[0] + missing.shape[0]
    assert f"[{start}:" in str(caught.value) or f":{stop}" in str(caught.value)


@pytest.mark.parametrize(("change", "fault"), [(1, "was written 2 times"), (-1, "was written by nobody")])
def test_a_chunk_that_two_ranks_or_none_wrote_is_named(change: int, fault: str):
    spec, tables = rows(16_384)
    plan = plan_save([spec], tables, chunk_bytes=4 * MIB)
    count = len(plan.owner)
    chunks = np.arange(count)
    victim = count // 2
    chunks = np.append(chunks, victim) if change > 0 else np.delete(chunks, victim)
    zeros = np.zeros(len(chunks), dtype=np.int64)
    receipt = UploadReceipt(
        (ObjectEntry(key="a/p", nbytes=1, crc32c=0, rank=0),), chunks, zeros, zeros, zeros, zeros.astype(np.uint32)
    )
    arrays = ArrayPlan((LeafSpec("w", ("w",), "float32", spec.shape),), ("w",), plan, None)
    blueprint = Blueprint("a", 1, None, "packed", arrays, {}, (), {}, world_size=1, topology=None)
    box = plan.grids[0].box(victim)
    with pytest.raises(InvalidStateError, match=f"'w'.*{fault}") as caught:
        assemble(blueprint, [receipt])
    assert str(box) in str(caught.value)
