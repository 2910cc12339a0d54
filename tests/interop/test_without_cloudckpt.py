"""What cloudckpt writes, read by programs that do not know it."""

import json
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from tests.interop import saved

# TensorStore has no type for float8_e8m0fnu.
NAMES = [name for name in saved.NUMPY if name not in ("be", "e8", "empty")]

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cloudckpt":
            raise ImportError("blocked")
sys.meta_path.insert(0, Block())
"""

TENSORSTORE = """
import json, sys
import numpy as np
import tensorstore as ts
folder, *names = sys.argv[1:]
for name in names:
    if folder.endswith(".zip"):
        base = {"driver": "zip", "base": {"driver": "file", "path": folder}, "path": name + "/"}
    else:
        base = {"driver": "file", "path": f"{folder}/{name}/"}
    data = ts.open({"driver": "zarr3", "kvstore": base}, open=True).result().read().result()
    bits = np.ascontiguousarray(data).reshape(-1).view(np.uint8).tobytes().hex()
    print(json.dumps([name, str(data.dtype), list(data.shape), bits]))
"""

ZARR = """
import json, sys
import numpy as np
import zarr
folder, *names = sys.argv[1:]
store = zarr.storage.ZipStore(folder, mode="r") if folder.endswith(".zip") else folder
group = zarr.open_group(store, mode="r")
for name in names:
    data = group[name][...]
    bits = np.ascontiguousarray(data).reshape(-1).view(np.uint8).tobytes().hex()
    print(json.dumps([name, str(data.dtype), list(data.shape), bits]))
"""


def read_elsewhere(program, folder, names):
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), *names], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def expected(names):
    return [
        [name, str(saved.NUMPY[name].dtype), list(saved.NUMPY[name].shape), saved.bits(saved.NUMPY[name]).hex()]
        for name in names
    ]


def root(url, layout):
    return next(url.glob("*/*.zarr.zip" if layout == "packed" else "*.zarr"))


@pytest.mark.parametrize("compression", [None, "zstd"], ids=str)
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_tensorstore(tmp_path, layout, compression):
    cloudckpt.save(saved.state(), tmp_path, layout=layout, compression=compression)
    assert read_elsewhere(BLOCKED + TENSORSTORE, root(tmp_path, layout), NAMES) == expected(NAMES)


@pytest.mark.parametrize("compression", [None, "zstd"], ids=str)
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_stock_zarr_without_our_types(tmp_path, layout, compression):
    """zarr itself knows all but bfloat16 and float8."""
    cloudckpt.save(saved.state(), tmp_path, layout=layout, compression=compression)
    names = ["model.w", "scalar", "flags", "c64"]
    program = "import zarr.registry, importlib.metadata\n" + ZARR
    assert read_elsewhere(program, root(tmp_path, layout), names) == expected(names)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_stock_zarr_finds_our_types_by_itself(tmp_path, layout):
    """Nothing imports cloudckpt there: it is enough that it is installed."""
    cloudckpt.save(saved.state(), tmp_path, layout=layout)
    names = [name for name in saved.NUMPY if name not in ("be", "empty")]
    assert read_elsewhere(ZARR, root(tmp_path, layout), names) == expected(names)


WHOLE = torch.arange(48, dtype=torch.float32).reshape(8, 6)


def save_rows(url, layout):
    """Each rank writes its half of the rows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    cloudckpt.save({"w": distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])}, url, layout=layout)


@pytest.mark.parametrize("program", [BLOCKED + TENSORSTORE, ZARR], ids=["tensorstore", "zarr"])
def test_the_zarr_layout_of_several_ranks_is_opened_as_a_whole(tmp_path, ranks, program):
    ranks.run(2, save_rows, tmp_path, "zarr")
    assert read_elsewhere(program, root(tmp_path, "zarr"), ["w"]) == [
        ["w", "float32", [8, 6], WHOLE.numpy().tobytes().hex()]
    ]


def test_a_pack_holds_the_part_of_one_rank(tmp_path, ranks):
    """Opened alone, the other ranks' chunks read as the fill value; ``open_zarr`` has all."""
    ranks.run(2, save_rows, tmp_path, "packed")
    packs = sorted(tmp_path.glob("*/*.zarr.zip"))
    assert len(packs) == 2
    halves = [WHOLE.clone(), WHOLE.clone()]
    halves[0][4:] = 0
    halves[1][:4] = 0
    for pack, half in zip(packs, halves, strict=True):
        assert read_elsewhere(ZARR, pack, ["w"]) == [["w", "float32", [8, 6], half.numpy().tobytes().hex()]]
    assert np.array_equal(cloudckpt.open_zarr(tmp_path)["w"][...], WHOLE.numpy())


def test_types_of_several_bytes_without_a_zarr_name(tmp_path):
    """Their chunk keys have one more index: absent chunks would read as zeros."""
    cloudckpt.save(saved.state(), tmp_path, layout="zarr")
    (found,) = read_elsewhere(BLOCKED + TENSORSTORE, root(tmp_path, "zarr"), ["c32"])
    assert found[1:] == ["uint8", [4, 4], np.arange(1, 5, dtype="<i4").tobytes().hex()]


def test_a_pack_is_a_sound_zip_file_with_aligned_payloads(tmp_path):
    cloudckpt.save(saved.state(), tmp_path)
    with zipfile.ZipFile(root(tmp_path, "packed")) as pack:
        assert pack.testzip() is None
        stored = [info for info in pack.infolist() if info.compress_type == zipfile.ZIP_STORED]
        assert {info.filename for info in stored} >= {"model.w/c/0/0", "scalar/c", "c32/c/0/0"}
    with cloudckpt.open_checkpoint(tmp_path) as checkpoint:
        assert all(checkpoint.manifest.columns.byte_offset % 64 == 0)


def test_tensorstore_takes_every_amount_of_padding_in_a_pack(tmp_path):
    arrays = {f"n{i:02d}": np.arange(i, dtype=np.uint8) for i in range(1, 65)}
    cloudckpt.save(arrays, tmp_path)
    found = read_elsewhere(BLOCKED + TENSORSTORE, root(tmp_path, "packed"), arrays)
    assert [bytes.fromhex(bits) for *_, bits in found] == [array.tobytes() for array in arrays.values()]


def test_bits_of_the_types_are_those_of_ml_dtypes():
    assert saved.bits(np.array([1.0], dtype=ml_dtypes.bfloat16)) == b"\x80\x3f"
