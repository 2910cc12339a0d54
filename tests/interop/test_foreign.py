"""Bytes in files of others, read as if they were a checkpoint's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cloudckpt
from cloudckpt import _import
from cloudckpt._import import Kind
from cloudckpt.config import Config
from cloudckpt.format.box import Box
from cloudckpt.interop.foreign import ArrayRef, Foreign, ForeignArray, Origin, describe, file_in
from cloudckpt.plan.rewrite import plan_rewrite
from cloudckpt.plan.view import renamed
from cloudckpt.plan.virtual import Part, Stored, VirtualArray
from tests.ranks import RankPool

SHAPES = {"rows": (300, 70), "wide": (3, 5, 40_000), "scalar": (), "none": (4, 0), "long": (50_001,)}


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple), st.integers(1, 64))
def test_chunks_are_runs_of_bytes(shape: tuple[int, ...], chunk_bytes: int):
    manifest = describe([("a", 10**6)], [ForeignArray("x", "int16", shape, 0, 6)], chunk_bytes=chunk_bytes)
    values = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    grid, columns = manifest.grids[0], manifest.columns
    position = 6
    for chunk in range(grid.num_chunks):
        inside = values[grid.box(chunk).slices].reshape(-1)
        assert inside.tolist() == list(range((position - 6) // 2, (position - 6) // 2 + len(inside)))
        assert (columns.byte_offset[chunk], columns.nbytes[chunk]) == (position, 2 * len(inside))
        assert 2 * len(inside) <= max(2, chunk_bytes)
        position += 2 * len(inside)
    assert position == 6 + 2 * values.size


def test_where_files_are():
    assert file_in("s3://bucket/a/x.safetensors", (".safetensors",)) == ("s3://bucket/a", "x.safetensors")
    assert file_in("s3://bucket/a", (".safetensors",)) == ("s3://bucket/a", None)
    assert file_in("x.pt", ("",)) == (".", "x.pt")


def write_blob(folder: Path) -> tuple[dict[str, torch.Tensor], list[ForeignArray]]:
    tensors, arrays, data = {}, [], bytearray(b"head!")
    for name, shape in SHAPES.items():
        tensors[name] = torch.randn(shape).to(torch.bfloat16 if name == "long" else torch.float32)
        arrays.append(ForeignArray(name, str(tensors[name].dtype)[6:], shape, 0, len(data)))
        data += tensors[name].view(torch.uint8 if tensors[name].ndim else tensors[name].dtype).numpy().tobytes()
    folder.mkdir()
    (folder / "blob").write_bytes(data)
    return tensors, arrays


def import_blob(folder: str, dst: str, arrays: list[ForeignArray], config: Config) -> int:
    """A made array: the second half of the rows, then the first."""
    rows = Stored(0, SHAPES["rows"])
    halves = [Part(rows, Box((150 * (1 - i), 0), (150, 70)), (0, 1), (150 * i, 0)) for i in range(2)]
    made = {"@0": VirtualArray("float32", SHAPES["rows"], tuple(halves))}

    def open_blob(origin: Origin) -> Foreign:
        state: Any = {"all": {name: ArrayRef(name) for name in SHAPES}, "turned": ArrayRef("@0"), "lr": 0.5}
        return Foreign(describe([("blob", origin.store.size("blob"))], arrays, state, chunk_bytes=4096), made)

    _import.KINDS["blob"] = Kind(open_blob)
    kind: Any = "blob"
    commit = cloudckpt.import_from(kind, folder, dst, step=3, rename=[("all.rows", "first")], config=config)
    return commit.num_objects


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_import(ranks: RankPool, tmp_path: Path, num_ranks: int):
    tensors, arrays = write_blob(tmp_path / "src")
    config = Config(memory_bytes=4 * 2**20, chunk_bytes=64 * 1024)
    found = ranks.run(num_ranks, import_blob, str(tmp_path / "src"), str(tmp_path / "dst"), arrays, config)
    assert found == [num_ranks] * num_ranks  # every rank has written a pack
    with cloudckpt.open_checkpoint(tmp_path / "dst") as checkpoint:
        assert checkpoint.step == 3
    state = cloudckpt.read(tmp_path / "dst")
    assert state["lr"] == 0.5
    assert torch.equal(state["first"], tensors["rows"])
    assert torch.equal(state["turned"], tensors["rows"].roll(150, 0))
    for name, tensor in state["all"].items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


@given(st.lists(st.integers(0, 40), max_size=4).map(tuple), st.integers(1, 500), st.integers(1, 64))
def test_an_import_cuts_chunks_anew_in_bands_that_are_runs_of_bytes(
    shape: tuple[int, ...], window: int, chunk_bytes: int
):
    """However the file was described: each chunk lies in one band, and a band is at most a window."""
    manifest = describe([("a", 10**7)], [ForeignArray("x", "int16", shape, 0, 0)], chunk_bytes=64)
    view = renamed(manifest, None)
    (grid,) = plan_rewrite(manifest, view, {}, chunk_bytes=chunk_bytes, window_bytes=2 * window).chunks.grids
    values = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    if not values.size or len(shape) == 0:
        return
    inner = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    dim = next((d for d, size in enumerate(inner) if size <= window), len(shape) - 1)
    edges = set(grid.edges[dim].tolist())
    rows = max(1, window // inner[dim])
    # Some multiples of a thickness that fits the window are edges of the grid, and all dims before are cut to 1.
    assert any(set(range(0, shape[dim], thick)) <= edges for thick in range(1, rows + 1))
    assert all(len(grid.edges[d]) == shape[d] + 1 for d in range(dim))
