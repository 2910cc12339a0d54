"""Bad input gets an error that says what is wrong and where, and nothing is lost by it."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from cloudckpt.errors import (
    AlreadyCommittedError,
    CloudckptError,
    CorruptChunkError,
    FormatError,
    InvalidStateError,
    MismatchError,
    NotFoundError,
    RankError,
    StoreError,
)
from cloudckpt.format.document import ChunkColumns, Document
from cloudckpt.format.manifest import Manifest
from tests.ranks import RankPool
from tests.servers.process import S3Server
from tests.sharding import error_of, make_mesh

STATE = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)}, "step": 5}
ENGINES = ["auto", "fsspec"]


def zeros() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3)}, "step": 0}


def check_untouched(target: dict[str, Any]) -> None:
    assert target["step"] == 0
    assert not any(tensor.any() for tensor in target["model"].values())


def check_whole(url: Any, **arguments: Any) -> None:
    found = cloudckpt.read(url, **arguments)
    assert torch.equal(found["model"]["w"], STATE["model"]["w"])
    assert found["step"] == 5


# URLs


@pytest.mark.parametrize("url", ["s4://bucket/run", "http2://host/x", "://x", "s3://", "s3:///run", "file://", ""])
def test_urls_that_name_no_store(url: str):
    for call in (cloudckpt.save, cloudckpt.load):
        with pytest.raises(InvalidStateError) as caught:
            call(zeros(), url)
        assert url in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_bucket(juicefs_s3: S3Server, engine: Any):
    options, config = juicefs_s3.storage_options, cloudckpt.Config(engine=engine)
    for call in (cloudckpt.save, cloudckpt.load):
        target = zeros()
        with pytest.raises(NotFoundError, match=r"bucket.*no-such-bucket|no-such-bucket.*bucket"):
            call(target, "s3://no-such-bucket/run", storage_options=options, config=config)
        check_untouched(target)


@pytest.mark.parametrize("wrong", [{"secret": "wrong-secret"}, {"key": "nobody"}], ids=["secret", "key"])
@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_credentials(juicefs_s3: S3Server, engine: Any, wrong: dict[str, str]):
    bucket = juicefs_s3.make_bucket(f"bad-credentials-{engine}-{next(iter(wrong))}")
    url, config = f"s3://{bucket}/run", cloudckpt.Config(engine=engine)
    cloudckpt.save(STATE, url, storage_options=juicefs_s3.storage_options)
    options = juicefs_s3.storage_options | wrong
    for call in (cloudckpt.load, lambda *args, **more: cloudckpt.save(*args, overwrite=True, **more)):
        target = zeros()
        with pytest.raises(StoreError) as caught:
            call(target, url, storage_options=options, config=config)
        assert not caught.value.retryable
        assert url in str(caught.value) or "manifest.json" in str(caught.value)
        assert not any(secret in str(caught.value) for secret in ("wrong-secret", juicefs_s3.secret))
        check_untouched(target)
    check_whole(url, storage_options=juicefs_s3.storage_options)


def test_no_checkpoint_there(tmp_path: Path):
    target = zeros()
    with pytest.raises(NotFoundError, match=r"no checkpoint at .*nothing-here"):
        cloudckpt.load(target, tmp_path / "nothing-here")
    check_untouched(target)
    assert not (tmp_path / "nothing-here").exists()


def test_an_uncommitted_checkpoint(tmp_path: Path):
    cloudckpt.save(STATE, tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match="holds objects but no manifest: the checkpoint was never committed"):
        cloudckpt.load(zeros(), tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "said"),
    [(".metadata", "torch DCP.*import dcp"), ("model.safetensors", "load_hf and `cloudckpt import hf`")],
)
def test_files_of_another_format(tmp_path: Path, name: str, said: str):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_bytes(b"x")
    with pytest.raises(NotFoundError, match=rf"holds objects but no manifest.*{said}"):
        cloudckpt.load(zeros(), tmp_path / "c")


def test_a_run_in_place_of_a_step(tmp_path: Path):
    cloudckpt.save(STATE, tmp_path / "run" / "step-00000005")
    with pytest.raises(NotFoundError, match=r"looks like a run: its steps are step-00000005"):
        cloudckpt.load(zeros(), tmp_path / "run")


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_committed_step_saved_again(tmp_path: Path, layout: Any):
    cloudckpt.save(STATE, tmp_path / "c", layout=layout)
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(AlreadyCommittedError, match="pass overwrite=True"):
        cloudckpt.save(zeros(), tmp_path / "c", layout=layout)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    check_whole(tmp_path / "c")
    cloudckpt.save({"step": 6}, tmp_path / "c", layout=layout, overwrite=True)
    assert cloudckpt.read(tmp_path / "c") == {"step": 6}


# Options


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layout": "zip"}, "layout"),
        ({"compression": "gzip"}, "compression"),
        ({"values": "mine"}, "values"),
        ({"step": -1}, "step"),
        ({"step": 1.0}, "step"),
        ({"metadata": {"x": object()}}, "object"),
        ({"storage_options": {"key": "x"}}, "storage_options"),
    ],
    ids=["layout", "compression", "values", "negative-step", "float-step", "metadata", "local-options"],
)
def test_options_that_mean_nothing(tmp_path: Path, arguments: dict[str, Any], text: str):
    with pytest.raises(InvalidStateError, match=text):
        cloudckpt.save(STATE, tmp_path / "c", **arguments)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def save_with_own_option(url: str, name: str) -> CloudckptError | None:
    """Only rank 1 asks for something that is not possible at all."""
    arguments: dict[str, Any] = {name: "nonsense"} if dist.get_rank() == 1 else {}
    config = cloudckpt.Config(rank_timeout_s=20.0)
    return error_of(lambda: cloudckpt.save(STATE, url, config=config, **arguments))


@pytest.mark.parametrize("name", ["layout", "compression", "values"])
def test_a_bad_option_on_one_rank_reaches_all(ranks: RankPool, tmp_path: Path, name: str):
    for error in ranks.run(2, save_with_own_option, str(tmp_path / "c"), name):
        assert name in str(error)
        assert "nonsense" in str(error)


# Stored bytes


@pytest.fixture(params=["packed", "zarr"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "c"
    cloudckpt.save(STATE, folder, layout=request.param)
    return folder


def data_of(folder: Path, array: str = "model.w") -> Path:
    """The object with the first chunk of an array."""
    with cloudckpt.open_checkpoint(folder) as checkpoint:
        manifest = checkpoint.manifest
        row = manifest.arrays[manifest.array_index[array]].first_chunk
        return folder / manifest.objects[int(manifest.columns.object[row])].key


def fails_to_load(folder: Path, kind: type[CloudckptError], *texts: str) -> CloudckptError:
    target = zeros()
    with pytest.raises(kind) as caught:
        cloudckpt.load(target, folder)
    assert target["step"] == 0
    assert all(text in str(caught.value) for text in texts)
    with pytest.raises(kind):
        cloudckpt.read(folder)
    return caught.value


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_manifest_that_is_cut_off(saved: Path, part: float):
    path = saved / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    fails_to_load(saved, FormatError, str(saved), "cut off" if part < 0.999 else "manifest")


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"step":5', b'"step":6'), (b'"world_size":1', b'"world_size":2'), (b'"float32"', b'"float64"')],
)
def test_a_manifest_that_was_altered(saved: Path, old: bytes, new: bytes):
    path = saved / "manifest.json"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    fails_to_load(saved, FormatError, "the manifest was altered")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b'{"format":"zarr"}', b"\xff\xfe", b"[" * 100_000])
def test_something_else_in_place_of_the_manifest(saved: Path, content: bytes):
    (saved / "manifest.json").write_bytes(content)
    fails_to_load(saved, FormatError, str(saved))


def test_a_newer_major_version_is_named(saved: Path):
    path = saved / "manifest.json"
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "version": "2.3", "chunks": "of a form that only version 2 knows"}))
    fails_to_load(saved, FormatError, "2.3", "newer", "upgrade cloudckpt")


def test_a_flipped_bit(saved: Path):
    path = data_of(saved)
    with cloudckpt.open_checkpoint(saved) as checkpoint:
        manifest = checkpoint.manifest
        row = manifest.arrays[manifest.array_index["model.w"]].first_chunk
        offset = int(manifest.columns.byte_offset[row])
    data = bytearray(path.read_bytes())
    data[offset + 5] ^= 0x10
    path.write_bytes(data)
    error = fails_to_load(saved, CorruptChunkError, "model.w", "checksum")
    assert isinstance(error, CorruptChunkError)
    assert (error.array, error.box, error.byte_offset) == ("model.w", ((0, 0), (3, 4)), offset)
    assert path.name in error.key or error.key.endswith(path.name)


def test_a_data_object_that_is_cut_off(saved: Path):
    path = data_of(saved)
    data = path.read_bytes()
    path.write_bytes(data[:10])
    error = fails_to_load(saved, CorruptChunkError, "cut off")
    assert isinstance(error, CorruptChunkError)
    assert (saved / error.key) == path


def test_a_data_object_that_is_missing(saved: Path):
    path = data_of(saved)
    path.unlink()
    error = fails_to_load(saved, CorruptChunkError, "missing")
    assert isinstance(error, CorruptChunkError)
    assert (saved / error.key) == path


# Manifests that are whole but lie, from somebody who knows the format


def forge(folder: Path, change: Callable[[Document], Document]) -> None:
    with cloudckpt.open_checkpoint(folder) as checkpoint:
        document = checkpoint.manifest.document
    (folder / "manifest.json").write_bytes(Manifest(change(document)).encode())


@pytest.mark.parametrize(
    "key",
    ["../secret", "a/../../secret", "/etc/passwd", "", ".", "..", "a//b", "a/./b", "a\\..\\b", "s3://bucket/key", "\0"],
)
def test_keys_that_lead_out_of_the_checkpoint(saved: Path, key: str):
    def change(document: Document) -> Document:
        first = msgspec.structs.replace(document.objects[0], key=key)
        return msgspec.structs.replace(document, objects=(first, *document.objects[1:]))

    (saved.parent / "secret").write_bytes(data_of(saved).read_bytes())
    if key == "s3://bucket/key":
        forge(saved, change)
        with pytest.raises(CloudckptError):
            cloudckpt.load(zeros(), saved)
        return
    forge(saved, change)
    fails_to_load(saved, FormatError, str(saved))


@pytest.mark.parametrize("name", ["../x", "/x", "", "a/../b"])
def test_array_names_that_lead_out(saved: Path, name: str):
    def change(document: Document) -> Document:
        first = msgspec.structs.replace(document.arrays[0], name=name)
        return msgspec.structs.replace(document, arrays=(first, *document.arrays[1:]))

    forge(saved, change)
    fails_to_load(saved, FormatError, str(saved))


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((2**62, 4), (3, 4)),
        ((2**31, 2**31), (2**31, 2**31)),
        ((3, 2**40), (3, 2**40)),
        ((2**63, 1), (1, 1)),
        ((2**70,), (1,)),
        ((-3, 4), (3, 4)),
        ((3, 4), (0, 4)),
        ((3, 4), (3,)),
        ((3, 4), (((1, 2**40),), 4)),
        ((2**30, 2**30), (1, 1)),
    ],
    ids=str,
)
def test_shapes_that_claim_absurd_sizes(saved: Path, shape: tuple[int, ...], grid: tuple[Any, ...]):
    def change(document: Document) -> Document:
        number = next(i for i, entry in enumerate(document.arrays) if entry.name == "model.w")
        arrays = list(document.arrays)
        arrays[number] = msgspec.structs.replace(arrays[number], shape=shape, grid=grid)
        return msgspec.structs.replace(document, arrays=tuple(arrays))

    forge(saved, change)
    fails_to_load(saved, FormatError, str(saved))


@pytest.mark.parametrize(
    "column", [("byte_offset", 2**63), ("byte_offset", 2**40), ("nbytes", 2**32 - 1), ("object", 2**31), ("nbytes", 0)]
)
def test_chunk_tables_that_point_elsewhere(saved: Path, column: tuple[str, int]):
    name, value = column

    def change(document: Document) -> Document:
        columns = ChunkColumns(document.chunks)
        held: dict[str, Any] = {n: getattr(columns, n) for n in ("object", "byte_offset", "nbytes", "crc32c")}
        held[name] = held[name].astype(np.uint64)
        held[name][0] = value
        return msgspec.structs.replace(document, chunks=ChunkColumns.pack(**held))

    forge(saved, change)
    fails_to_load(saved, FormatError, str(saved))


def test_a_huge_claim_about_objects_is_refused(saved: Path):
    def change(document: Document) -> Document:
        first = msgspec.structs.replace(document.objects[0], nbytes=2**63)
        return msgspec.structs.replace(document, objects=(first, *document.objects[1:]))

    forge(saved, change)
    fails_to_load(saved, FormatError, "impossible size")


def test_an_array_of_another_numpy_type_than_its_bytes(tmp_path: Path):
    cloudckpt.save({"a": np.zeros(4, dtype=np.float32)}, tmp_path / "c")

    def change(document: Document) -> Document:
        tree = copy.deepcopy(document.tree)
        tree["a"]["numpy"] = "<f8"
        return msgspec.structs.replace(document, tree=tree)

    forge(tmp_path / "c", change)
    target = {"a": np.ones(4)}
    with pytest.raises(CloudckptError):
        cloudckpt.load(target, tmp_path / "c")
    assert (target["a"] == 1).all()
    with pytest.raises(FormatError):
        cloudckpt.read(tmp_path / "c")


# States


class Opaque:
    """Neither plain nor with a state of its own."""


class Subclass(torch.Tensor):
    """Nobody knows what its bytes mean."""


def cyclic() -> dict[str, Any]:
    state: dict[str, Any] = {"a": {}}
    state["a"]["self"] = state
    return state


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (Opaque, "Opaque"),
    "function": (lambda: print, "builtin_function_or_method"),
    "lock": (threading.Lock, "lock"),
    "class": (lambda: Opaque, "type"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta tensor"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
    "subclass": (lambda: torch.ones(3).as_subclass(Subclass), "Subclass"),
    "object-array": (lambda: np.array([object()]), "object"),
    "structured-array": (lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]), "'a'"),
    "masked-array": (lambda: np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
    "cycle": (cyclic, "contains itself"),
    "key": (lambda: {Opaque(): 1}, "Opaque"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_objects_are_refused_by_path(tmp_path: Path, name: str):
    make, text = UNSUPPORTED[name]
    with pytest.raises(InvalidStateError) as caught:
        cloudckpt.save({"fine": torch.ones(2), "outer": [{"bad": make()}]}, tmp_path / "c")
    assert "outer.0.bad" in str(caught.value)
    assert text in str(caught.value)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("state", [5, "text", None, (torch.ones(1),), {1, 2}], ids=repr)
def test_targets_that_cannot_be_filled_in_place(tmp_path: Path, state: Any):
    cloudckpt.save(state, tmp_path / "c")
    with pytest.raises(InvalidStateError, match=type(state).__name__):
        cloudckpt.load(state, tmp_path / "c")


def test_a_read_only_array_is_no_target(tmp_path: Path):
    array = np.zeros(3)
    cloudckpt.save({"a": array}, tmp_path / "c")
    array.flags.writeable = False
    with pytest.raises(InvalidStateError, match=r"'a'.*read-only"):
        cloudckpt.load({"a": array}, tmp_path / "c")


def test_pickles_need_consent_on_both_sides(tmp_path: Path):
    cloudckpt.save({"model": {"x": Opaque()}}, tmp_path / "c", allow_pickle=True)
    target = {"model": {"x": None}}
    with pytest.raises(CloudckptError, match="allow_pickle"):
        cloudckpt.load(target, tmp_path / "c")
    assert target == {"model": {"x": None}}
    cloudckpt.load(target, tmp_path / "c", allow_pickle=True)
    assert isinstance(target["model"]["x"], Opaque)


# Ranks that disagree


def claim(kind: str) -> Any:
    """What a rank holds under one key."""
    rank = dist.get_rank()
    mesh = make_mesh((2,))
    return {
        "shape": torch.ones(3 + rank),
        "dims": torch.ones((2,) * (1 + rank)),
        "dtype": torch.ones(2, dtype=[torch.float32, torch.float64][rank]),
        "tensor-number": [torch.ones(()), 1.0][rank],
        "tensor-array": [torch.ones(2), np.ones(2, dtype=np.float32)][rank],
        "dict-list": [{"a": 1}, [1]][rank],
        "dict-tensor": [{"a": 1}, torch.ones(1)][rank],
        "number-text": [1, "1"][rank],
        "value": rank,
        "length": [0] * rank,
        "per-rank": [cloudckpt.PerRank(1), 1][rank],
        "sharded-shape": DTensor.from_local(
            torch.ones(2, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2 + rank)), stride=(2 + rank, 1)
        )
        if kind == "sharded-shape"
        else None,
        "sharded-dtype": DTensor.from_local(
            torch.ones(2, dtype=[torch.float32, torch.int32][rank]), mesh, [Replicate()], run_check=False
        ),
    }[kind]


def save_claim(url: str, kind: str) -> CloudckptError | None:
    return error_of(lambda: cloudckpt.save({"outer": {"x": claim(kind)}}, url))


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("shape", ("(3,)", "(4,)", "rank 0", "rank 1")),
        ("dims", ("(2,)", "(2, 2)", "rank 1")),
        ("dtype", ("float32", "float64", "rank 1")),
        ("tensor-number", ("tensor", "float", "rank 1")),
        ("tensor-array", ("tensor", "ndarray", "rank 1")),
        ("dict-list", ("dict", "list", "rank 1")),
        ("dict-tensor", ("dict", "tensor", "rank 1")),
        ("number-text", ("int", "str", "rank 1")),
        ("value", ("0 and 1", "PerRank", "rank0")),
        ("length", ("length", "PerRank")),
        ("per-rank", ("PerRank", "rank 1")),
        ("sharded-shape", ("rank 1",)),
        ("sharded-dtype", ("float32", "int32", "rank 1")),
    ],
)
def test_ranks_that_claim_one_key_differently(ranks: RankPool, tmp_path: Path, kind: str, texts: tuple[str, ...]):
    for error in ranks.run(2, save_claim, str(tmp_path / "c"), kind):
        assert isinstance(error, (InvalidStateError, RankError))
        assert "outer.x" in str(error)
        assert all(text in str(error) for text in texts), str(error)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def save_gap(url: str) -> CloudckptError | None:
    """Both ranks say that they are rank 0 of the mesh's shards: rows 2 and 3 are held by nobody."""
    mesh = make_mesh((4,), [0, 1, 2, 3])
    held = DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)], run_check=False)
    state = {"w": held} if dist.get_rank() < 2 else {}
    return error_of(lambda: cloudckpt.save(state, url))


def test_parts_that_nobody_holds(ranks: RankPool, tmp_path: Path):
    for error in ranks.run(4, save_gap, str(tmp_path / "c")):
        assert isinstance(error, InvalidStateError)
        assert "'w'" in str(error)
        assert "no rank holds" in str(error)


def load_elsewhere(url: str) -> CloudckptError | None:
    return error_of(lambda: cloudckpt.load(zeros(), f"{url}-{dist.get_rank()}"))


def test_ranks_that_load_different_checkpoints(ranks: RankPool, tmp_path: Path):
    for rank in range(2):
        cloudckpt.save(STATE, tmp_path / f"c-{rank}")
    for error in ranks.run(2, load_elsewhere, str(tmp_path / "c")):
        assert isinstance(error, InvalidStateError)
        assert "rank 1" in str(error)
        assert "c-0" in str(error)
        assert "c-1" in str(error)


def test_the_folder_is_a_file(tmp_path: Path):
    (tmp_path / "c").write_text("not a folder")
    with pytest.raises(CloudckptError, match="c"):
        cloudckpt.save(STATE, tmp_path / "c")
    with pytest.raises(CloudckptError, match="c"):
        cloudckpt.load(zeros(), tmp_path / "c")
    assert (tmp_path / "c").read_text() == "not a folder"


def test_a_checkpoint_that_was_moved_is_whole(saved: Path):
    shutil.move(saved, saved.parent / "elsewhere")
    check_whole(saved.parent / "elsewhere")


def test_keys_that_are_not_there(saved: Path):
    target = {**zeros(), "extra": {"x": torch.zeros(1)}}
    del target["model"]["b"]
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load(target, saved)
    assert (caught.value.missing, caught.value.unexpected) == (["extra.x"], ["model.b"])
    assert target["step"] == 0
