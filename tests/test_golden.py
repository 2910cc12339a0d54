"""Checkpoints that released versions of the format have left behind: what is in them must be found for ever.

The values are written down here, not taken from tests/data/make_golden.py.
"""

import math
import shutil
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.verify import verify
from tests.format.exact import same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FOLDER = Path(__file__).parent / "data"
GOLDEN = [f"{version}/{name}" for version in ("format-1.0",) for name in ("packed", "plain", "zstd")]

ITEMSIZES = {
    1: "bool int8 uint8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 bits8"
    " bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
PATTERN = bytes.fromhex(
    "030a11181f262d343b424950575e656c737a81888f969da4abb2b9c0c7ced5dce3eaf1f8ff060d141b222930373e454c535a61686f767d848b9299"
    "a0a7aeb5bcc3cad1d8dfe6edf4fb020910171e252c"
)

MODEL = {
    "uneven": (torch.float32, (10, 6), list(range(60))),
    "tied": (torch.float32, (10, 6), list(range(60))),
    "grid": (torch.bfloat16, (8, 12), list(range(96))),
    "rows": (torch.float32, (8, 12), list(range(96))),
    "padded": (torch.int16, (7, 5), list(range(35))),
    "scalar": (torch.float64, (), [2.5]),
    "empty": (torch.float32, (0, 3), []),
}
NUMPY = {
    "text": ("<U3", [2], "610000000000000000000000620000006300000064000000"),
    "big": (">i4", [3], "000000010000000200000100"),
    "time": ("<M8[D]", [1], "e74f000000000000"),
    "plain": ("<f8", [3], "0000000000000000000000000000f03f0000000000000040"),
}
VALUES = [
    None,
    -0.0,
    math.nan,
    -math.inf,
    1208925819614629174706176,
    b"\x00\xff",
    (1, "x", {2.5: {"y", "z"}}),
    OrderedDict(b=1, a=2),
    datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    torch.Size([2, 3]),
    torch.bfloat16,
    np.float32(0.1),
]


@pytest.fixture(params=GOLDEN)
def url(request):
    return FOLDER / request.param


def check_model(model):
    assert list(model) == list(MODEL)
    for name, (dtype, shape, values) in MODEL.items():
        tensor = model[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
        assert tensor.flatten().tolist() == values, name


def check_block(block):
    assert [(type(key), key) for key in block] == [(int, 1), (str, "1"), (bool, False), (str, "größe/ä")]
    assert (block[1].tolist(), block["1"].tolist(), block[False], block["größe/ä"].tolist()) == ([1], [2], "no", [3])


def check_numpy(arrays):
    for name, (dtype, shape, bits) in NUMPY.items():
        assert (arrays[name].dtype.str, list(arrays[name].shape)) == (dtype, shape), name
        assert arrays[name].tobytes().hex() == bits, name


def check_types(types):
    sizes = {name: size for size, names in ITEMSIZES.items() for name in names.split()}
    assert sorted(types) == sorted(sizes)
    for name, tensor in types.items():
        expected = PATTERN[: 5 * sizes[name]] if name != "bool" else b"\1\0\1\1\0"
        assert tensor.dtype == getattr(torch, name)
        assert tensor.view(torch.uint8).numpy().tobytes() == expected, name


def test_read(url):
    state = cloudckpt.read(url)
    assert list(state)[:5] == ["model", ("block", 3), "numpy", "values", "rng"]
    check_model(state["model"])
    assert state["model"]["tied"] is state["model"]["uneven"]
    check_block(state["block", 3])
    check_numpy(state["numpy"])
    assert same(state["values"], VALUES)
    assert [value["seed"] for value in state["rng"]] == [100, 101, 102, 103]
    assert [value["state"].tolist() for value in state["rng"]] == [[rank, 255] for rank in range(4)]
    assert state["rng"][0]["state"].dtype == torch.uint8
    if url.name == "packed":
        check_types(state["types"])


def test_load(url):
    model = {name: torch.full(shape, 9, dtype=dtype) for name, (dtype, shape, _) in MODEL.items()}
    block = {key: torch.zeros(1, dtype=torch.int64) for key in (1, "1", "größe/ä")}
    state = {
        "model": model,
        ("block", 3): {1: block[1], "1": block["1"], False: None, "größe/ä": block["größe/ä"]},
        "numpy": {name: np.zeros(shape, dtype) for name, (dtype, shape, _) in NUMPY.items()},
        "values": None,
    }
    report = cloudckpt.load(state, url, strict=False)
    assert report.missing == []
    assert {key.split(".")[0] for key in report.unexpected} <= {"rng", "types"}
    check_model(model)
    check_block(state["block", 3])
    check_numpy(state["numpy"])
    assert same(state["values"], VALUES)


def load_on_other_mesh(url):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {
        "model": {
            "uneven": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(1)]),
            "grid": distribute_tensor(torch.zeros(8, 12, dtype=torch.bfloat16), mesh, [Shard(0)]),
        }
    }
    cloudckpt.load(state, url, strict=False)
    return {name: tensor.full_tensor().flatten().tolist() for name, tensor in state["model"].items()}


def test_load_on_another_mesh(url, ranks):
    for found in ranks.run(2, load_on_other_mesh, url):
        assert found == {"uneven": list(range(60)), "grid": list(range(96))}


def test_open_zarr(url):
    group = cloudckpt.open_zarr(url)
    for name, (dtype, shape, values) in MODEL.items():
        if name != "tied":
            array = group[f"model.{name}"]
            assert (str(array.dtype), array.shape) == (str(dtype).removeprefix("torch."), shape)
            assert array[...].flatten().tolist() == values
    assert group["numpy.big"][...].tobytes().hex() == NUMPY["big"][2]
    paths = [array.attrs["cloudckpt_path"] for _, array in group.arrays()]
    assert paths.count("('block', 3).1") == 2  # 1 and "1" look the same; their arrays have names of their own
    group.store.close()


def test_open_checkpoint(url):
    with cloudckpt.open_checkpoint(url) as checkpoint:
        document = checkpoint.manifest.document
        assert (document.version, checkpoint.step, document.world_size) == ("1.0", 1000, 4)
        assert document.layout == ("zarr" if url.name == "plain" else "packed")
        assert checkpoint.metadata == {"note": "golden", "loss": 0.25}
        assert [(mesh.shape, mesh.dim_names) for mesh in document.meshes] == [((2, 2), ("dp", "tp"))]
        assert not checkpoint.arrays["model.uneven"].grid.is_regular
        assert checkpoint.arrays["model.grid"].grid.is_regular
        assert {info.compression for info in checkpoint.arrays.values()} == {"zstd" if url.name == "zstd" else None}


def test_verify(url):
    report = verify(url)
    assert report.faults == ()
    assert report.num_chunks > 20


LAYOUTS = FOLDER / "format-1.1" / "layouts"


def test_read_of_layouts():
    found = cloudckpt.read(LAYOUTS)
    assert found["qkv"].tolist() == torch.arange(32.0).reshape(8, 4).tolist()
    assert found["flat"]["w"].tolist() == torch.arange(12.0).reshape(3, 4).tolist()
    assert found["flat"]["b"].tolist() == [12.0, 13.0, 14.0]
    parts = found["quantised"]
    assert isinstance(parts, cloudckpt.TensorParts)
    assert parts["codes"].tolist() == [0, 1, 2, 3, 4, 5]
    assert parts["scale"].tolist() == [0.5]
    assert parts.context == {"bits": 8}
    assert verify(LAYOUTS).faults == ()


def test_segments_that_an_old_file_records_still_count():
    rules = cloudckpt.ShardingRules([("qkv", {"tp": 0})], cloudckpt.ParallelConfig())
    target = {"qkv": torch.zeros(8, 4)}
    cloudckpt.load(target, LAYOUTS, rules=rules, strict=False)  # whole, so nothing is cut
    assert target["qkv"].tolist() == torch.arange(32.0).reshape(8, 4).tolist()


RUNS = [FOLDER / "format-1.2" / name for name in ("packed", "zstd")]


def frozen_and_trained(step):
    trained = torch.arange(32, dtype=torch.bfloat16).reshape(8, 4)
    trained[-1] = step - 1200
    return torch.arange(64.0).reshape(16, 4), trained


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
@pytest.mark.parametrize("step", [1200, 1202])
def test_steps_of_an_incremental_run(run, step):
    url = run / f"step-{step:08d}"
    frozen, trained = frozen_and_trained(step)
    found = cloudckpt.read(url)
    assert found["step"] == step
    assert torch.equal(found["frozen"], frozen)
    assert torch.equal(found["trained"], trained)
    target = {"frozen": torch.zeros(16, 4), "trained": torch.zeros(8, 4, dtype=torch.bfloat16), "step": 0}
    cloudckpt.load(target, url)
    assert torch.equal(target["frozen"], frozen)
    assert torch.equal(target["trained"], trained)
    assert verify(url).faults == ()
    group = cloudckpt.open_zarr(url)
    assert group["frozen"][...].tolist() == frozen.tolist()
    group.store.close()


def test_fields_of_an_incremental_run():
    with cloudckpt.open_checkpoint(RUNS[0] / "step-00001202") as checkpoint:
        manifest = checkpoint.manifest
        assert (manifest.document.branch, manifest.document.model_version) == (2, "v3")
        assert len(manifest.document.topology) == 32
        own = [entry.key for entry in manifest.objects if not entry.key.startswith("../")]
        assert len(own) == 1
        assert {entry.key.split("/")[1] for entry in manifest.objects if entry.key not in own} == {"step-00001200"}
        assert manifest.columns.digest.shape == (manifest.document.chunks.count, 16)


def test_a_base_of_an_old_file_serves_a_new_save(tmp_path):
    """So that what is hashed, and how, stays as it is."""
    shutil.copytree(RUNS[0], tmp_path / "run")
    frozen, trained = frozen_and_trained(1203)
    state = {"frozen": frozen, "trained": trained, "step": 1203}
    url = tmp_path / "run" / "step-00001203"
    commit = cloudckpt.save(state, url, step=1203, incremental=True, config=cloudckpt.Config(chunk_bytes=32))
    assert commit.nbytes_new < commit.nbytes / 5
    assert torch.equal(cloudckpt.read(url)["trained"], trained)
