"""What is found in hierarchies of others, and how their arrays are cut."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.config import Config
from cloudckpt.errors import FormatError, NotFoundError
from cloudckpt.format.grid import Grid
from cloudckpt.interop.foreign import Origin
from cloudckpt.interop.zarr_source import open_zarr_source
from cloudckpt.interop.zarr_tiles import cells, room_bytes, tiles
from cloudckpt.plan.overlap import overlaps
from cloudckpt.store.local import LocalStore


def find(folder):
    return open_zarr_source(Origin(LocalStore(folder), None, Config()))


def kinds(found):
    return {path: (entry.dtype, entry.shape) for path, entry in zip(found.arrays, found.manifest.arrays, strict=True)}


@pytest.mark.parametrize("version", [2, 3])
def test_groups_are_nested(tmp_path, version):
    root = zarr.open_group(tmp_path, mode="w", zarr_format=version, attributes={"step": 7, "lr": [0.5]})
    for name in ("b", "a/x/w", "a/x.y"):
        root.create_array(name, shape=(2, 3), dtype="f4", chunks=(1, 3))[...] = 1
    root.create_group("nothing")
    found = find(tmp_path)
    assert kinds(found) == dict.fromkeys(("a/x.y", "a/x/w", "b"), ("float32", (2, 3)))
    assert found.manifest.document.metadata == {"step": 7, "lr": [0.5]}
    tree = found.manifest.document.tree
    assert (tree.keys(), tree["a"].keys(), tree["a"]["x"].keys()) == ({"a", "b"}, {"x.y", "x"}, {"w"})
    assert found.notes == ()


def test_a_single_array_goes_by_its_own_name(tmp_path):
    zarr.create_array(tmp_path / "weights.zarr", shape=(3,), dtype="i8")[...] = 1
    found = find(tmp_path / "weights.zarr")
    assert [*found.manifest.document.tree] == ["weights"]


def test_arrays_without_a_group(tmp_path):
    """As TensorStore writes them, of either version."""
    for driver, name in (("zarr3", "a/w"), ("zarr", "b")):
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{tmp_path}/{name}/"}}
        dtype = tensorstore.bfloat16 if driver == "zarr3" else tensorstore.float32
        made = tensorstore.open(spec, create=True, shape=[4], dtype=dtype).result()
        made[...] = np.ones(4, dtype=dtype.numpy_dtype)
    assert kinds(find(tmp_path)) == {"a/w": ("bfloat16", (4,)), "b": ("float32", (4,))}


@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
def test_all_types_that_torch_lacks_are_named(tmp_path):
    root = zarr.open_group(tmp_path, mode="w")
    for name, dtype in (("s", "U4"), ("t", "M8[ns]"), ("b", "S3"), ("ok", "u2"), ("v", str)):
        root.create_array(name, shape=(2,), dtype=dtype)
    with pytest.raises(FormatError, match=r"torch has no type for b \(\|S3\), s \(<U4\), t \(datetime64\[ns\]\), v \("):
        find(tmp_path)


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "complex64", ">f2", ">i4"])
def test_types(tmp_path, kind):
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    zarr.create_array(tmp_path / "x", shape=(2,), dtype=dtype)[...] = 1
    told = find(tmp_path / "x").manifest.arrays[0].dtype
    assert told == {">f2": "float16", ">i4": "int32"}.get(kind, kind)


def test_absent_chunks(tmp_path):
    """zarr does not write chunks that are all fill values, so they are as likely zeros as lost."""
    root = zarr.open_group(tmp_path, mode="w")
    root.create_array("full", shape=(10,), chunks=(3,), dtype="f4")[...] = 1
    root.create_array("part", shape=(10,), chunks=(3,), dtype="f4")[:4] = 1
    root.create_array("shards", shape=(12,), chunks=(2,), shards=(6,), dtype="f4")[:2] = 1
    root.create_array("none", shape=(), dtype="f4")
    found = find(tmp_path)
    (note,) = found.notes
    assert note == (
        f"{tmp_path}: absent chunks are taken for fill values, as zarr does: "
        "none (1 of 1), part (2 of 4), shards (1 of 2)"
    )
    assert found.whole == {"full"}


def test_chunks_outside_of_the_array_make_up_for_none(tmp_path):
    array = zarr.create_array(tmp_path, shape=(10,), chunks=(5,), dtype="int32")
    array[:5] = 1
    (tmp_path / "c" / "7").write_bytes((tmp_path / "c" / "0").read_bytes())
    (note,) = find(tmp_path).notes
    assert "(1 of 2)" in note


def test_absent_chunks_without_a_fill_value(tmp_path):
    made = zarr.create_array(tmp_path / "x", shape=(4,), chunks=(2,), dtype="f4", zarr_format=2, fill_value=None)
    path = tmp_path / "x/.zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fill_value": None}))
    made[:2] = 1
    with pytest.raises(FormatError, match="no fill value says what they hold: x"):
        find(tmp_path)
    zarr.open_array(tmp_path / "x")[...] = 1
    assert find(tmp_path).notes == ()


def test_ocdbt_is_refused(tmp_path):
    base = {"driver": "ocdbt", "base": f"file://{tmp_path}/default/", "path": "w/"}
    made = tensorstore.open({"driver": "zarr3", "kvstore": base}, create=True, shape=[4], dtype="float32").result()
    made[...] = np.ones(4, dtype=np.float32)
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    for url in (tmp_path, tmp_path / "default"):
        with pytest.raises(FormatError, match=r"default/? is an OCDBT database, as orbax writes by default"):
            find(url)


def test_nothing_there(tmp_path):
    with pytest.raises(NotFoundError, match="no zarr array and no group"):
        find(tmp_path / "none")
    zarr.open_group(tmp_path / "empty", mode="w")
    with pytest.raises(NotFoundError, match="nothing is there"):
        find(tmp_path / "empty")


@pytest.mark.parametrize("text", ["{", "[]", '{"node_type": "array"}', '{"node_type": "array", "zarr_format": 3}'])
def test_metadata_that_are_none(tmp_path, text):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/zarr.json").write_text(text)
    with pytest.raises(FormatError):
        find(tmp_path)


@settings(max_examples=50)
@given(
    shape=st.lists(st.integers(0, 40), min_size=0, max_size=3),
    data=st.data(),
    chunk_bytes=st.integers(1, 4000),
)
def test_tiles_are_whole_chunks_and_cells_are_parts_of_tiles(shape, data, chunk_bytes):
    chunks = tuple(data.draw(st.integers(1, 50)) for _ in shape)
    made = zarr.create_array({}, shape=tuple(shape), chunks=chunks, dtype="f4")
    tiled = tiles(made, 4, chunk_bytes)
    cut = cells(tiled, 4, chunk_bytes)
    for dim, size in enumerate(chunks):
        assert all(edge % size == 0 or edge == shape[dim] for edge in tiled.edges[dim].tolist())
        assert {*tiled.edges[dim].tolist()} <= {*cut.edges[dim].tolist()}
    for number in range(cut.num_chunks):
        assert cut.box(number).num_elements * 4 <= max(4, room_bytes(chunk_bytes))
    source = Grid(tuple(shape), chunks)
    for number in range(tiled.num_chunks):
        box = tiled.box(number)
        fits = box.num_elements * 4 <= room_bytes(chunk_bytes)
        held = overlaps(source, np.array([box.offset]), np.array([box.shape]))[1]
        assert fits or len(held) == 1


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((400, 64), (400, 8)), ((64, 1000), (4, 1000)), ((40, 50, 60), (20, 25, 60)), ((9999,), (5000,))],
)
def test_the_parts_of_a_tile_follow_each_other(shape, chunks):
    """So that one chunk of the source is needed for a short time only."""
    tiled = tiles(zarr.create_array({}, shape=shape, chunks=chunks, dtype="f4"), 4, 8000)
    cut = cells(tiled, 4, 8000)
    assert cut.num_chunks > tiled.num_chunks == math.prod(-(-s // c) for s, c in zip(shape, chunks, strict=True))
    for number in range(tiled.num_chunks):
        box = tiled.box(number)
        parts = overlaps(cut, np.array([box.offset]), np.array([box.shape]))[1].tolist()
        assert parts == [*range(parts[0], parts[-1] + 1)]
