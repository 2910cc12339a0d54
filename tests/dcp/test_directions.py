"""What torch's functions save is a checkpoint like any other, and the other way round."""

from __future__ import annotations

from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.tensor import Replicate, Shard

import cloudckpt
from cloudckpt.dcp import StorageReader, StorageWriter
from cloudckpt.errors import InvalidStateError, MismatchError
from cloudckpt.format.manifest import decode_manifest, with_objects
from cloudckpt.verify import verify
from tests.dcp.jobs import SMALL, blank, cut, load, mesh, numbers, quiet, save
from tests.field.places import Place
from tests.ranks import RankPool


def many_kinds() -> dict[str, Any]:
    return {
        "model": {"w": numbers(30, 8), "b": numbers(5, dtype=torch.bfloat16), "empty": torch.zeros(0, 3)},
        "scalar": torch.tensor(3.5),
        "transposed": numbers(6, 4).t(),
        "list": [torch.ones(2), {"a": 1}],
        "plain": {"lr": 0.1, "betas": (0.9, 0.95), "none": None, "when": datetime(2026, 1, 2, tzinfo=UTC)},
        "odd $ key/..": torch.ones(3),
        "numpy": np.arange(5, dtype=np.int16),
        "rng": np.random.default_rng(1).bit_generator.state,
        "pair": (torch.arange(3), "x", np.ones(2)),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        equal = torch.equal if isinstance(a, torch.Tensor) else np.array_equal
        return type(a) is type(b) and a.dtype == b.dtype and equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_saved_by_torch(tmp_path: Path, layout: Any):
    state = many_kinds()
    url = f"{tmp_path}/step-00000012"
    writer = save(state, url, layout=layout, metadata={"by": "me"}, model_version="v1")
    assert writer.commit is not None
    assert (writer.commit.step, writer.commit.url) == (12, url)
    assert same(cloudckpt.read(url), state)
    with cloudckpt.open_checkpoint(url) as checkpoint:
        assert checkpoint.metadata == {"by": "me"}
        assert checkpoint.manifest.document.model_version == "v1"
        assert checkpoint.arrays["model.w"].shape == (30, 8)
    assert not verify(url).faults
    assert np.array_equal(cloudckpt.open_zarr(url)["model.w"][:], numbers(30, 8).numpy())
    found = many_kinds()
    found["model"]["w"].zero_()
    cloudckpt.load(found, url)
    assert same(found, state)
    found = blank(state)
    load(found, url)
    assert same(found, state)
    assert {path.name.split("-")[0] for path in tmp_path.rglob("*") if path.is_file()} >= {"manifest.json"}


def test_saved_by_us(tmp_path: Path):
    shared = numbers(4, 4)
    state = {
        **many_kinds(),
        "tied": {"a": shared, "b": shared},
        "numbered": {0: {"x": torch.ones(2)}, 1: {"x": torch.zeros(2)}},
        "ordered": OrderedDict(k=torch.ones(1)),
        "per rank": cloudckpt.PerRank({"seed": 7}),
    }
    cloudckpt.save(state, f"{tmp_path}/a")
    metadata = StorageReader(f"{tmp_path}/a").read_metadata()
    assert {"tied.a", "numbered.0.x", "list.0", "list.1.a", "rng", "pair", "per rank"} <= {
        key.replace("rng.bit_generator", "rng") for key in metadata.state_dict_metadata
    } | {"rng"}
    found = blank(state)
    found["numbered"] = {0: {"x": torch.zeros(2)}, 1: {"x": torch.ones(2)}}
    load(found, f"{tmp_path}/a")
    assert found.pop("per rank") == [{"seed": 7}]
    del state["per rank"]
    assert same({**found, "ordered": dict(found["ordered"])}, {**state, "ordered": dict(state["ordered"])})
    with quiet():
        everything = _load_state_dict_from_keys(storage_reader=StorageReader(f"{tmp_path}/a"))
    assert same(everything["model"], state["model"])
    assert same(everything["tied"], state["tied"])


def test_flat_keys_stay_flat(tmp_path: Path):
    state = {"layers.0.w": numbers(4, 2), "layers.0": 3, "a.b": [1, 2]}
    save(state, f"{tmp_path}/a")
    assert same(cloudckpt.read(f"{tmp_path}/a"), state)
    found = blank(state)
    load(found, f"{tmp_path}/a")
    assert same(found, state)


def test_containers_that_a_planner_does_not_flatten(tmp_path: Path):
    state = {"model": {"w": torch.ones(3)}, "n": {"deep": [1, {"x": 2}]}}
    planners = {
        "planner": dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    }
    save(state, f"{tmp_path}/a", **planners)
    assert same(cloudckpt.read(f"{tmp_path}/a"), state)
    found: dict[str, Any] = {"model": None, "n": None}
    load(
        found,
        f"{tmp_path}/a",
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    assert same(found, state)


def test_renamed_on_the_way(tmp_path: Path):
    cloudckpt.save({"old": {"w": numbers(4, 2)}}, f"{tmp_path}/a")
    found = {"new": {"w": torch.zeros(4, 2)}}
    load(found, f"{tmp_path}/a", rename={"old.{k:*}": "new.{k}"})
    assert torch.equal(found["new"]["w"], numbers(4, 2))
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: new.w"):
        load(found, f"{tmp_path}/a")


def test_casts_may_be_forbidden(tmp_path: Path):
    save({"w": torch.ones(3)}, f"{tmp_path}/a")
    with pytest.raises(dcp.CheckpointException, match=r"'w' is torch.float32, the target torch.float16") as caught:
        load({"w": torch.ones(3, dtype=torch.float16)}, f"{tmp_path}/a", cast=False)
    assert isinstance(caught.value.failures[0][0], MismatchError)


def test_objects_need_leave(tmp_path: Path):
    state = {"thing": pytest.approx, "w": torch.ones(2)}
    with pytest.raises(dcp.CheckpointException, match=r"thing.*allow_pickle=True"):
        save(state, f"{tmp_path}/a")
    assert not list(tmp_path.rglob("*.zip"))
    save(state, f"{tmp_path}/a", allow_pickle=True)
    found = {"w": torch.zeros(2)}
    load(found, f"{tmp_path}/a")
    assert torch.equal(found["w"], state["w"])
    with pytest.raises(dcp.CheckpointException, match=r"'thing'.*pickled"):
        load({"thing": None}, f"{tmp_path}/a")
    whole: dict[str, Any] = {"thing": None}
    load(whole, f"{tmp_path}/a", allow_pickle=True)
    assert whole["thing"] is pytest.approx


def test_urls():
    for good in ("/a/b", "relative", Path("x"), "s3://b/k", "memory://x", "gs://b/x", "file:///x", "hf://x/y"):
        assert StorageWriter.validate_checkpoint_id(good), good
        assert StorageReader.validate_checkpoint_id(good), good
    for bad in ("abc://abc.abc", "", 5, None):
        assert not StorageWriter.validate_checkpoint_id(bad), bad  # type: ignore[arg-type]
    with quiet(), pytest.raises(dcp.CheckpointException, match=r"StorageWriter has no URL"):
        dcp.save({}, storage_writer=StorageWriter())
    with pytest.raises(InvalidStateError, match="layout"):
        StorageWriter("x", layout="flat")  # type: ignore[arg-type]


def test_what_is_replaced_is_removed(tmp_path: Path):
    for number in range(2):
        save({"w": torch.full((3,), number)}, f"{tmp_path}/best")
        save({"w": torch.full((3,), number)}, f"{tmp_path}/step-1")
    assert len(list((tmp_path / "best").rglob("*.zip"))) == 1
    assert len(list((tmp_path / "step-1").rglob("*.zip"))) == 2, "others of the run may refer to it"
    assert cloudckpt.read(f"{tmp_path}/best")["w"][0] == 1


def test_what_a_manifest_claims_to_be_its_own_is_not_removed(tmp_path: Path):
    folder = tmp_path / "best"
    save({"w": numbers(3)}, str(folder))
    (pack,) = folder.rglob("*.zip")
    written = (folder / "manifest.json").read_bytes()
    entry = decode_manifest(written, "").objects[0]
    (folder / "manifest.json").write_bytes(with_objects(written, [msgspec.structs.replace(entry, key="notes.txt")]))
    (folder / "notes.txt").write_text("somebody else's")
    save({"w": numbers(3) + 1}, str(folder))
    assert (folder / "notes.txt").read_text() == "somebody else's"
    assert pack.exists()
    assert torch.equal(cloudckpt.read(folder)["w"], numbers(3) + 1)


def on_ranks(root: str, options: Any) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    device_mesh = mesh(size)

    def state(fill: float) -> dict[str, Any]:
        return {
            "rows": cut(numbers(7, 6) * fill, device_mesh, [Shard(0)]),
            "columns": cut(numbers(7, 6) * fill, device_mesh, [Shard(1)]),
            "all": cut(numbers(5) * fill, device_mesh, [Replicate()]),
            "plain": numbers(3, 3) * fill,
            "step": int(3 * fill),
            "pair": (torch.ones(2) * fill, np.ones(2) * fill),
            f"own.{rank}": {"t": torch.full((2,), rank * fill), "v": rank * fill},
        }

    # torch -> ours, and ours -> torch, each cut in another way
    save(state(1), f"{root}/a", options)
    found = state(0)
    found["rows"], found["columns"] = found["columns"], found["rows"]
    cloudckpt.load(found, f"{root}/a", storage_options=options, strict=False, config=SMALL)
    assert torch.equal(found["rows"].full_tensor(), numbers(7, 6))
    assert found["step"] == 3
    assert found[f"own.{rank}"]["v"] == rank
    assert torch.equal(found["pair"][0], torch.ones(2))
    cloudckpt.save(state(1), f"{root}/b", storage_options=options, config=SMALL)
    for url in ("a", "b"):
        found = state(0)
        found["rows"], found["columns"] = found["columns"], found["rows"]
        reader = load(found, f"{root}/{url}", options)
        for key in ("rows", "columns"):
            assert torch.equal(found[key].full_tensor(), numbers(7, 6)), (url, key)
        assert torch.equal(found["all"].to_local(), numbers(5))
        assert torch.equal(found[f"own.{rank}"]["t"], torch.full((2,), float(rank)))
        assert torch.equal(found["pair"][0], torch.ones(2))
        report = reader.report
        assert report is not None
        assert report.exchange != "none", report.exchange_reason
        assert report.bytes_fetched < 1.2 * report.bytes_needed + 4096  # and ZIP headers, as large as such chunks
        alone = load(found, f"{root}/{url}", options, exchange="none").report
        assert alone is not None
        assert alone.exchange == "none"
    if rank == 0:  # alone, while the others do something else
        with_dist = {"plain": torch.zeros(3, 3)}
        load(with_dist, f"{root}/a", options, no_dist=True)
        assert torch.equal(with_dist["plain"], numbers(3, 3))


@pytest.mark.parametrize("place", ["local", "juicefs", "juicefs-fsspec"], indirect=True)
def test_ranks(ranks: RankPool, place: Place):
    ranks.run(2, on_ranks, place.root, place.options)


def on_a_part(folder: str) -> None:
    pair = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        state = {"w": numbers(8, 2), "n": 1}
        save(state, f"{folder}/a", process_group=pair)
        for group in (None, pair):
            found = blank(state)
            reader = load(found, f"{folder}/a", process_group=pair, group=group)
            assert torch.equal(found["w"], numbers(8, 2))
            assert reader.report is not None
            assert (reader.report.exchange == "none") == (group is None)
    dist.barrier()


def test_a_part_of_the_ranks(ranks: RankPool, tmp_path: Path):
    ranks.run(3, on_a_part, str(tmp_path))
