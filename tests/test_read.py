"""read(): the saved structure without a template."""

import os
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.errors import CorruptChunkError, FormatError, InvalidStateError, NotFoundError, StoreError
from cloudckpt.format.codec import decompress, encode_chunk
from cloudckpt.verify import verify
from tests.format.exact import same
from tests.interop import saved
from tests.sharding import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(params=["packed", "zarr"])
def layout(request):
    return request.param


def save_per_rank(url):
    import torch.distributed as dist

    rank = dist.get_rank()
    state = {"rng": cloudckpt.PerRank({"seed": 100 + rank, "state": torch.full((3,), rank)})}
    if rank == 1:
        state["late"] = cloudckpt.PerRank(np.array([rank], dtype=">u2"))
    cloudckpt.save(state, url)


def test_structure_types_and_bits(tmp_path, layout):
    state = saved.state()
    cloudckpt.save(state, tmp_path, layout=layout)
    found = cloudckpt.read(tmp_path)
    assert list(found) == list(state)
    assert same_bits(found["model"]["w"], state["model"]["w"])
    for name in ("scalar", "flags", "empty", "f8", "e8", "c64", "c32"):
        assert same_bits(found[name], state[name]), name
    assert found["be"].dtype == np.dtype(">i4")
    assert found["be"].tolist() == [0, 1, 2, 3]
    assert found["step"] == 5


@pytest.mark.parametrize("compression", [None, "zstd"], ids=str)
def test_shards_become_whole_tensors(tmp_path, layout, compression, ranks):
    ranks.run(4, saved.save_irregular, tmp_path, layout, compression)
    found = cloudckpt.read(tmp_path)
    assert np.array_equal(found["w"].numpy(), saved.IRREGULAR)
    assert found["raw"].dtype == torch.complex32
    assert found["raw"].view(torch.int32).tolist() == saved.IRREGULAR_RAW.tolist()


def test_tied_tensors_are_one(tmp_path):
    w = torch.arange(4.0)
    cloudckpt.save({"a": w, "b": [w], "c": torch.arange(4.0)}, tmp_path)
    found = cloudckpt.read(tmp_path)
    assert found["a"] is found["b"][0]
    assert found["c"] is not found["a"]
    assert torch.equal(found["c"], found["a"])


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "längere", ""]),
        np.array([b"x", b"yz"]),
        np.array(["2026-01-02", "NaT"], dtype="M8[D]"),
        np.arange(6, dtype=">f8").reshape(2, 3),
        np.array(3, dtype="<u2"),
        np.zeros((0, 2), dtype=">c16"),
        np.array([1, -2], dtype=ml_dtypes.int4),
        np.array([1.5], dtype=ml_dtypes.bfloat16),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ],
    ids=lambda a: str(a.dtype),
)
def test_numpy_arrays_have_their_type_again(tmp_path, array):
    cloudckpt.save([array], tmp_path)
    (found,) = cloudckpt.read(tmp_path)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    found[...] = found  # writable


def test_values_that_differ_per_rank_are_a_list(tmp_path, ranks):
    ranks.run(2, save_per_rank, tmp_path)
    found = cloudckpt.read(tmp_path)
    assert [value["seed"] for value in found["rng"]] == [100, 101]
    assert [value["state"].tolist() for value in found["rng"]] == [[0, 0, 0], [1, 1, 1]]
    assert found["late"][0] is None
    assert found["late"][1].dtype == np.dtype(">u2")


NAMED = {
    "model": {"layers": [{"w": torch.zeros(1)}, {"w": torch.ones(1), "b": 2}], "norm": torch.ones(2)},
    "optimizer": OrderedDict(step=3, groups=(torch.ones(3), 0.1)),
    ("k", 1): 5,
    "odd[0]": 6,
}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("model.norm", {"model": {"norm": [1, 1]}}),
        ("model.layers.1", {"model": {"layers": [{"w": [1], "b": 2}]}}),
        ("model.*.w", {"model": {"layers": [{"w": [0]}, {"w": [1]}]}}),
        ("*.w", {"model": {"layers": [{"w": [0]}, {"w": [1]}]}}),
        (["optimizer.step", "('k', 1)"], {"optimizer": OrderedDict(step=3), ("k", 1): 5}),
        ("optimizer.groups.1", {"optimizer": OrderedDict(groups=(0.1,))}),
        ("odd[0]", {"odd[0]": 6}),
        ("m?del.norm", {"model": {"norm": [1, 1]}}),
        (["model", "model.norm"], {"model": {"layers": [{"w": [0]}, {"w": [1], "b": 2}], "norm": [1, 1]}}),
        ([], {}),
    ],
    ids=str,
)
def test_names(tmp_path, names, expected):
    cloudckpt.save(NAMED, tmp_path)
    assert same(as_lists(cloudckpt.read(tmp_path, names)), expected)


def as_lists(value):
    if isinstance(value, torch.Tensor):
        return [int(v) for v in value]
    if isinstance(value, dict):
        return type(value)((key, as_lists(item)) for key, item in value.items())
    return type(value)(map(as_lists, value)) if isinstance(value, (list, tuple)) else value


def test_star_is_everything(tmp_path):
    cloudckpt.save(NAMED, tmp_path)
    assert same(as_lists(cloudckpt.read(tmp_path, "*")), as_lists(NAMED))


@pytest.mark.parametrize("names", ["model.nothing", ["model", "x*"], "Model"], ids=str)
def test_a_name_that_matches_nothing(tmp_path, names):
    cloudckpt.save(NAMED, tmp_path)
    missing = names if isinstance(names, str) else names[-1]
    with pytest.raises(NotFoundError) as caught:
        cloudckpt.read(tmp_path, names)
    assert repr(missing) in str(caught.value)
    assert "'model'" not in str(caught.value)


def test_only_what_is_named_is_fetched(tmp_path):
    cloudckpt.save({"a": torch.zeros(10), "b": torch.ones(10)}, tmp_path, layout="zarr")
    next(tmp_path.glob("*.zarr/b/c/0")).unlink()
    assert torch.equal(cloudckpt.read(tmp_path, "a")["a"], torch.zeros(10))
    with pytest.raises(CorruptChunkError, match="'b'"):
        cloudckpt.read(tmp_path)


def test_every_flipped_bit_of_a_chunk_is_noticed(tmp_path):
    cloudckpt.save({"w": torch.arange(4.0)}, tmp_path, layout="zarr")
    path = next(tmp_path.glob("*.zarr/w/c/0"))
    raw = path.read_bytes()
    for i in range(8 * len(raw)):
        path.write_bytes(raw[: i // 8] + bytes([raw[i // 8] ^ 1 << i % 8]) + raw[i // 8 + 1 :])
        with pytest.raises(CorruptChunkError):
            cloudckpt.read(tmp_path)


@pytest.mark.parametrize("size", [1, 100, 255, 256, 257, 65791, 65792, 300_000], ids=str)
def test_a_zstd_frame_of_another_size_is_refused(size):
    """numcodecs would take a shorter one, and leave old memory in the rest."""
    frame = encode_chunk(np.ones(size, dtype=np.uint8), "zstd").payload
    assert decompress(frame, size, "x").tobytes() == b"\x01" * size
    for other in (size - 1, size + 1):
        with pytest.raises(FormatError, match="not a zstd frame"):
            decompress(frame, other, "x")
    for end in (0, 3, 5, len(frame) - 1):
        with pytest.raises(FormatError):
            decompress(frame[:end], size, "x")


def test_more_than_the_machine_has(tmp_path, monkeypatch):
    cloudckpt.save({"w": torch.zeros(3)}, tmp_path)

    def refuse(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(InvalidStateError, match="'w' takes 12 bytes"):
        cloudckpt.read(tmp_path)


def test_a_bare_value_and_a_bare_tensor(tmp_path):
    cloudckpt.save(5, tmp_path / "a")
    cloudckpt.save(torch.ones(2), tmp_path / "b")
    assert cloudckpt.read(tmp_path / "a") == 5
    assert torch.equal(cloudckpt.read(tmp_path / "b"), torch.ones(2))


def test_unknown_scheme():
    with pytest.raises((InvalidStateError, StoreError), match="nosuch"):
        cloudckpt.read("nosuch://bucket/x")


@pytest.mark.parametrize("shape", [(0,), (0, 2), (10**7, 0, 3), (0, 60000, 60000)], ids=str)
def test_nothing_but_a_tensor_without_elements(tmp_path, shape):
    cloudckpt.save({"a": torch.zeros(shape)}, tmp_path)
    assert cloudckpt.read(tmp_path)["a"].shape == shape
    assert cloudckpt.open_zarr(tmp_path)["a"].shape == shape


def test_on_s3(juicefs_s3):
    url = f"s3://{juicefs_s3.make_bucket('read')}/step-00000001"
    cloudckpt.save(saved.state(), url, storage_options=juicefs_s3.storage_options)
    found = cloudckpt.read(url, ["model", "c32"], storage_options=juicefs_s3.storage_options)
    assert torch.equal(found["model"]["w"], saved.state()["model"]["w"])
    assert list(found) == ["model", "c32"]
    group = cloudckpt.open_zarr(url, storage_options=juicefs_s3.storage_options)
    assert np.array_equal(group["model.w"][1:3], saved.NUMPY["model.w"][1:3])
    group.store.close()


def test_copies_made_by_other_tools(tmp_path, juicefs_s3):
    """Row 80: google/orbax#394. Nothing in a checkpoint knows where or when it was written."""
    cloudckpt.save(saved.state(), tmp_path / "a")
    bucket = juicefs_s3.make_bucket("copies")
    url, options = f"s3://{bucket}/elsewhere", juicefs_s3.storage_options
    files = sorted((path for path in (tmp_path / "a").rglob("*") if path.is_file()), reverse=True)
    assert files[0].name == "manifest.json"
    client = juicefs_s3.client()
    for path in files:
        client.put_object(Bucket=bucket, Key=f"elsewhere/{path.relative_to(tmp_path / 'a')}", Body=path.read_bytes())
    assert torch.equal(cloudckpt.read(url, storage_options=options)["model"]["w"], saved.state()["model"]["w"])
    assert verify(url, storage_options=options).ok
    for path in files:
        target = tmp_path / "b" / path.relative_to(tmp_path / "a")
        target.parent.mkdir(parents=True, exist_ok=True)
        found = client.get_object(Bucket=bucket, Key=f"elsewhere/{path.relative_to(tmp_path / 'a')}")
        target.write_bytes(found["Body"].read())
        os.utime(target, (0, 0))
    client.close()
    before = sorted(tmp_path.rglob("*"))
    assert torch.equal(cloudckpt.read(tmp_path / "b")["model"]["w"], saved.state()["model"]["w"])
    assert cloudckpt.open_zarr(tmp_path / "b")["scalar"][()] == 7
    assert verify(tmp_path / "b").ok
    assert sorted(tmp_path.rglob("*")) == before  # reading leaves nothing behind
