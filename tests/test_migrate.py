"""Checkpoints that are written anew under other names, cuts and dtypes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import Concatenate, FlatLayout, FlatShards, PerRank, Stack, Transpose, Unstack
from cloudckpt.config import MIB, Config
from cloudckpt.errors import (
    AlreadyCommittedError,
    CorruptChunkError,
    InvalidStateError,
    MismatchError,
    NotFoundError,
)
from cloudckpt.plan import migrations
from cloudckpt.verify import verify
from tests.ranks import RankPool
from tests.recipes.test_memory import bound, extra_memory
from tests.servers.process import S3Server

SMALL = Config(memory_bytes=64 * 1024, chunk_bytes=2048)
"""So that the tensors below take many windows."""


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    tied = torch.randn(150, 100)
    return {
        "experts": {str(e): torch.randn(30, 20) for e in range(4)},
        "w": torch.randn(123, 217),
        "tied": [tied, tied],
        "odd": torch.randn(7, 3, 11, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "ints": torch.arange(1000),
        "float8": torch.randn(64).to(torch.float8_e4m3fn),
        "numpy": {"plain": np.arange(12.0).reshape(3, 4), "text": np.array(["a", "bcd"])},
        "values": {3: ("x", None), "lr": 0.1},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.view(-1).view(torch.uint8).equal(b.view(-1).view(torch.uint8))
        )
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and (a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture
def src(tmp_path: Path) -> str:
    url = str(tmp_path / "src")
    cloudckpt.save(state(), url, step=9, metadata={"loss": 0.5}, model_version="1", config=SMALL)
    return url


@pytest.fixture
def dst(tmp_path: Path) -> str:
    return str(tmp_path / "dst")


RULES = [
    Stack("experts.{e}", "experts", dim=1),
    Transpose("w"),
    Concatenate(("tied.0", "tied.1"), "twice", dim=1),
    ("numpy.{name}", "arrays.{name}"),
    ("values.lr", "lr"),
]


@pytest.mark.parametrize("config", [Config(), SMALL], ids=["one window", "many windows"])
@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("compression", [None, "zstd"], ids=["plain", "zstd"])
def test_it_holds_what_a_load_would_see(tmp_path: Path, dst: str, layout: str, compression: str | None, config: Config):
    src = str(tmp_path / "c")
    cloudckpt.save(state(), src, step=9, layout=layout, compression=compression, metadata={"loss": 0.5}, config=SMALL)
    commit = cloudckpt.migrate(src, dst, rename=RULES, config=config)
    assert (commit.step, commit.url) == (9, dst)
    assert same(cloudckpt.read(dst), cloudckpt.read(src, rename=RULES))
    assert torch.equal(cloudckpt.read(dst)["w"], state()["w"].t())
    assert verify(dst).faults == ()
    with cloudckpt.open_checkpoint(dst) as checkpoint:
        document = checkpoint.manifest.document
        assert (document.layout, checkpoint.metadata) == (layout, {"loss": 0.5})
        assert {info.compression for info in checkpoint.arrays.values()} == {compression}
        assert max(checkpoint.manifest.columns.nbytes) <= config.chunk_bytes + 100


def test_without_rules_it_is_the_same_again(src: str, dst: str):
    cloudckpt.migrate(src, dst, config=SMALL)
    found = cloudckpt.read(dst)
    assert same(found, cloudckpt.read(src))
    assert found["tied"][0] is found["tied"][1]
    with cloudckpt.open_checkpoint(src) as old, cloudckpt.open_checkpoint(dst) as new:
        assert [a.grid for a in old.arrays.values()] == [a.grid for a in new.arrays.values()]
        assert old.manifest.document.commit_id != new.manifest.document.commit_id
        assert new.manifest.document.model_version == "1"


def test_versions(src: str, dst: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(migrations, "_registered", {})
    cloudckpt.migration("1", "2")(lambda: [("w", "weight"), ("none", "nothing")])
    cloudckpt.migrate(src, dst, model_version="2")
    target = {"weight": torch.zeros(123, 217)}
    assert cloudckpt.load(target, dst, model_version="2", strict=False).migrated == []
    assert torch.equal(target["weight"], state()["w"])
    with pytest.raises(MismatchError, match="src holds model version '1', and version '3' is asked for"):
        cloudckpt.migrate(src, dst, model_version="3")


def test_casts(src: str, dst: str):
    cloudckpt.migrate(src, dst, cast={"odd": "float32", "experts.*": "float8_e5m2", "*": "bfloat16"}, config=SMALL)
    found, old = cloudckpt.read(dst), state()
    assert torch.equal(found["odd"], old["odd"].float())
    assert found["experts"]["2"].dtype == torch.float8_e5m2
    assert torch.equal(
        found["experts"]["2"].view(torch.uint8), old["experts"]["2"].to(torch.float8_e5m2).view(torch.uint8)
    )
    assert torch.equal(found["w"], old["w"].bfloat16())
    assert torch.equal(found["float8"], old["float8"].bfloat16())
    assert found["tied"][0] is found["tied"][1]
    for name in ("ints", "numpy", "values"):
        assert same(found[name], old[name])
    assert verify(dst).faults == ()


@pytest.mark.parametrize(
    ("cast", "what"),
    [
        ("int8", "'int8' is never converted"),
        ({"ints": "float32"}, "no tensor of floats matches 'ints'"),
        ({"w": "bfloat16", "x*": "bfloat16"}, r"no tensor of floats matches 'x\*'"),
    ],
    ids=["ints", "of ints", "nothing"],
)
def test_casts_that_cannot_be(src: str, dst: str, cast: Any, what: str):
    with pytest.raises(InvalidStateError, match=what):
        cloudckpt.migrate(src, dst, cast=cast)
    assert not Path(dst).exists()


def save_sharded(url: str) -> None:
    rank = dist.get_rank()
    layout = FlatLayout.of({"a": (7, 9), "b": (5,)})
    half = -(-layout.numel // 2)
    whole = torch.arange(2.0 * half)
    state = {"flat": FlatShards(whole[rank * half : (rank + 1) * half].clone(), layout, rank * half)}
    cloudckpt.save({**state, "rng": PerRank({"seed": rank, "t": torch.full((2,), rank)})}, url, config=SMALL)


def load_per_rank(url: str) -> tuple[int, list[float]]:
    state = {"rng": PerRank({"seed": -1, "t": torch.zeros(2, dtype=torch.int64)}), "flat": {"x": torch.zeros(9, 7)}}
    cloudckpt.load(state, url, strict=False)
    return state["rng"].value["seed"], state["flat"]["x"][0].tolist()


def test_flat_shards_and_values_by_rank(ranks: RankPool, tmp_path: Path, dst: str):
    src = str(tmp_path / "c")
    ranks.run(2, save_sharded, src)
    cloudckpt.migrate(src, dst, rename=[Transpose("flat.a", target="flat.x")], config=SMALL)
    a = torch.arange(63.0).reshape(7, 9)
    assert torch.equal(cloudckpt.read(dst)["flat"]["x"], a.t())
    assert cloudckpt.read(dst)["flat"]["b"].tolist() == [63.0, 64.0, 65.0, 66.0, 67.0]
    for rank, (seed, row) in enumerate(ranks.run(2, load_per_rank, dst)):
        assert (seed, row) == (rank, a[:, 0].tolist())


def test_another_checkpoint_is_in_the_way(src: str, dst: str):
    cloudckpt.save({"x": 1}, dst)
    before = sorted(Path(dst).rglob("*"))
    with pytest.raises(AlreadyCommittedError, match="dst already holds"):
        cloudckpt.migrate(src, dst)
    assert sorted(Path(dst).rglob("*")) == before
    cloudckpt.migrate(src, dst, overwrite=True)
    assert "w" in cloudckpt.read(dst)


def test_in_place(src: str):
    cloudckpt.migrate(src, src, rename=[("w", "v")], overwrite=True, config=SMALL)
    assert torch.equal(cloudckpt.read(src)["v"], state()["w"])


def test_a_damaged_source_leaves_nothing(src: str, dst: str):
    with cloudckpt.open_checkpoint(src) as checkpoint:
        manifest = checkpoint.manifest
    chunk = len(manifest.columns) // 2
    path = Path(src) / manifest.objects[int(manifest.columns.object[chunk])].key
    data = bytearray(path.read_bytes())
    data[int(manifest.columns.byte_offset[chunk])] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptChunkError, match="checksum mismatch"):
        cloudckpt.migrate(src, dst, config=SMALL)
    assert not [found for found in Path(dst).rglob("*") if found.is_file()]
    with pytest.raises(NotFoundError):
        cloudckpt.migrate(f"{src}-none", dst)


def test_unstacked_and_stacked_again_it_is_what_it_was(src: str, dst: str):
    cloudckpt.migrate(src, f"{dst}-1", rename=[Unstack("w", "w.{i}")], config=SMALL)
    cloudckpt.migrate(f"{dst}-1", dst, rename=[Stack("w.{i}", "w")], config=SMALL)
    assert torch.equal(cloudckpt.read(dst)["w"], state()["w"])


@pytest.fixture
def fresh() -> Iterator[RankPool]:
    """A process in which nothing has grown the heap before."""
    pool = RankPool()
    yield pool
    pool.stop()


def measure(url: str, options: dict[str, Any]) -> dict[str, int]:
    config = Config(memory_bytes=64 * MIB)
    both = {"src_options": options, "dst_options": options, "config": config}
    cloudckpt.save({"w": torch.ones(1000, 10)}, f"{url}-small", storage_options=options)  # imports and connections
    cloudckpt.migrate(f"{url}-small", f"{url}-small-2", rename=[Transpose("w")], **both)
    cloudckpt.copy(f"{url}-small", f"{url}-small-3", **both)
    large = torch.arange(64 * MIB, dtype=torch.float32).reshape(8192, 8192)
    cloudckpt.save({"w": large, "v": large.sum(1)}, url, storage_options=options, config=Config(pack_bytes=64 * MIB))
    del large
    gc.collect()
    found = {
        "migrate": extra_memory(
            lambda: cloudckpt.migrate(url, f"{url}-2", rename=[Transpose("w")], cast={"w": "bfloat16"}, **both)
        ),
        "copy": extra_memory(lambda: cloudckpt.copy(url, f"{url}-3", **both)),
    }
    assert verify(f"{url}-2", storage_options=options).ok
    assert verify(f"{url}-3", storage_options=options).ok
    return found


@pytest.mark.parametrize("place", ["local", "s3"])
def test_memory_is_bounded(fresh: RankPool, tmp_path: Path, place: str, request: pytest.FixtureRequest):
    """The one tensor is 256 MiB, four times the budget."""
    url, options = str(tmp_path / "large"), {}
    if place == "s3":
        server: S3Server = request.getfixturevalue("juicefs_s3")
        url, options = f"s3://{server.make_bucket('migrate-memory')}/large", server.storage_options
    for name, nbytes in fresh.run(1, measure, url, options)[0].items():
        assert nbytes <= bound(64 * MIB), name


def test_a_run_that_went_back_keeps_its_order(tmp_path: Path, dst: str):
    run = cloudckpt.Checkpointer(tmp_path / "run")
    run.save(100, {"x": torch.zeros(3)})
    run.save(20, {"x": torch.ones(3)})
    for step in (20, 100):
        name = f"step-{step:08d}"
        cloudckpt.migrate(tmp_path / "run" / name, f"{dst}/{name}", rename=[("x", "y")])
    assert cloudckpt.Checkpointer(dst).latest() == 20
    assert torch.equal(cloudckpt.read(f"{dst}/step-00000020")["y"], torch.ones(3))
