"""Any checkpoint through stock zarr: open_zarr."""

from pathlib import Path

import numpy as np
import pytest
import zarr

import cloudckpt
from cloudckpt.errors import CorruptChunkError, NotFoundError
from tests.interop import saved


@pytest.fixture(params=["packed", "zarr"])
def layout(request):
    return request.param


@pytest.mark.parametrize("compression", [None, "zstd"], ids=str)
def test_every_array_comes_back_bit_for_bit(tmp_path, layout, compression):
    cloudckpt.save(saved.state(), tmp_path, layout=layout, compression=compression, step=3)
    group = cloudckpt.open_zarr(tmp_path)
    assert group.attrs["cloudckpt"]["step"] == 3
    for name, expected in saved.NUMPY.items():
        found = group[name][...]
        if name == "be":  # no type of zarr's: raw bytes
            expected = expected[:, None].view(np.uint8)
        assert found.dtype == expected.dtype, name
        assert found.shape == expected.shape, name
        assert saved.bits(found) == saved.bits(expected), name
    assert group["c32"].attrs["cloudckpt_dtype"] == "complex32"
    assert group["c32"][...].view(np.int32).ravel().tolist() == [1, 2, 3, 4]
    assert sorted(group.keys()) == sorted([*saved.NUMPY, "c32"])
    assert group["model.w"].attrs["cloudckpt_path"] == "model.w"
    group.store.close()


@pytest.mark.parametrize("compression", [None, "zstd"], ids=str)
def test_an_irregular_grid_is_shown_as_a_regular_one(tmp_path, layout, compression, ranks):
    ranks.run(4, saved.save_irregular, tmp_path, layout, compression)
    with cloudckpt.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.arrays["w"].grid.cuts[0] == (3, 2, 3, 2)
    group = cloudckpt.open_zarr(tmp_path)
    w = group["w"]
    assert w.chunks == (3, 6)
    assert np.array_equal(w[...], saved.IRREGULAR)
    for part in (np.s_[4:9, 1:3], np.s_[2], np.s_[::3, -1], np.s_[9:10, :]):
        assert np.array_equal(w[part], saved.IRREGULAR[part])
    assert np.array_equal(group["raw"][...].view(np.int32).ravel(), saved.IRREGULAR_RAW)
    assert w.nchunks_initialized == w.nchunks


def test_regular_grid_with_padding(tmp_path):
    data = np.arange(70, dtype=np.int16).reshape(7, 10)
    cloudckpt.save({"x": data}, tmp_path, config=cloudckpt.Config(chunk_bytes=40))
    x = cloudckpt.open_zarr(tmp_path)["x"]
    assert x.nchunks > 3
    assert np.array_equal(x[...], data)
    assert np.array_equal(x[2:6, 3:9], data[2:6, 3:9])


def test_an_absent_chunk_is_an_error_and_never_fill_values(tmp_path):
    """Row 1: zarr-developers/zarr-python#486."""
    cloudckpt.save({"w": np.arange(1, 5, dtype=np.float32)}, tmp_path, layout="zarr")
    group = cloudckpt.open_zarr(tmp_path)
    next(tmp_path.glob("*.zarr/w/c/0")).unlink()
    with pytest.raises(CorruptChunkError, match=r"'w'.*missing"):
        group["w"][...]


@pytest.mark.parametrize("position", [0, 7, 17], ids=str)
def test_a_damaged_chunk_is_an_error(tmp_path, position):
    cloudckpt.save({"w": np.arange(1, 5, dtype=np.float32)}, tmp_path, layout="zarr")
    path = next(tmp_path.glob("*.zarr/w/c/0"))
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptChunkError) as caught:
        cloudckpt.open_zarr(tmp_path)["w"][...]
    assert (caught.value.array, caught.value.box) == ("w", ((0,), (4,)))


def test_it_is_read_only(tmp_path):
    cloudckpt.save({"w": np.zeros(3)}, tmp_path)
    group = cloudckpt.open_zarr(tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        group["w"][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        group.create_array("x", shape=(1,), dtype="i4")


def test_nothing_there(tmp_path):
    with pytest.raises(NotFoundError):
        cloudckpt.open_zarr(tmp_path / "none")


def test_keys_that_are_no_chunks_are_absent(tmp_path):
    cloudckpt.save({"w": np.zeros((2, 2))}, tmp_path)
    store = cloudckpt.open_zarr(tmp_path).store
    buffers = zarr.core.buffer.default_buffer_prototype()

    async def lengths(*keys):
        found = [await store.get(key, buffers) for key in keys]
        return [None if data is None else len(data) for data in found]

    absent = ("w/c/0", "w/c/0/0/0", "w/c/1/0", "w/c/00/0", "x/c/0/0", "w", "w/c", "x/zarr.json", "")
    assert zarr.core.sync.sync(lengths(*absent)) == [None] * len(absent)
    assert zarr.core.sync.sync(lengths("w/c/0/0")) == [36]


def test_names_of_any_keys_lead_to_their_paths(tmp_path):
    cloudckpt.save({("a", 1): np.zeros(1), "x/y": np.ones(2)}, tmp_path)
    group = cloudckpt.open_zarr(tmp_path)
    paths = {array.attrs["cloudckpt_path"]: array[...].tolist() for _, array in group.arrays()}
    assert paths == {"('a', 1)": [0.0], "x/y": [1.0, 1.0]}


def test_a_pack_that_is_cut_off(tmp_path):
    cloudckpt.save({"w": np.arange(100.0)}, tmp_path)
    pack: Path = next(tmp_path.glob("*/*.zarr.zip"))
    pack.write_bytes(pack.read_bytes()[:200])
    with pytest.raises(CorruptChunkError, match="cut off"):
        cloudckpt.open_zarr(tmp_path)["w"][...]
