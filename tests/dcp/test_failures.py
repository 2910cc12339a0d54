"""A rank that fails or dies, damaged checkpoints, stores in the middle of it: nothing half done, errors that tell."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

import cloudckpt
from cloudckpt.dcp import StorageWriter
from cloudckpt.errors import CorruptChunkError, FormatError, InvalidStateError, NotFoundError
from tests.dcp.jobs import SMALL, cut, load, mesh, numbers, quiet, save
from tests.ranks import RankPool
from tests.recipes.kills import Zygote


class FailsHalfWay(dcp.DefaultSavePlanner):
    """On rank 1, after some of it was written."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "z":
            raise RuntimeError("out of luck")
        return super().resolve_data(write_item)


def fail_half_way(folder: str, layout: str) -> None:
    device_mesh = mesh(2)
    state = {name: cut(numbers(64, 4), device_mesh, [Shard(0)]) for name in "abcz"}
    save(state, f"{folder}/a", layout=layout)
    with pytest.raises(dcp.CheckpointException, match="out of luck") as caught:
        save(state, f"{folder}/a", layout=layout, planner=FailsHalfWay())
    assert list(caught.value.failures) == [1]
    dist.barrier()
    assert torch.equal(cloudckpt.read(f"{folder}/a")["z"], numbers(64, 4)), "the one before is still whole"
    dist.barrier()
    save(state, f"{folder}/a", layout=layout)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_one_rank_fails_half_way(ranks: RankPool, tmp_path: Path, layout: str):
    ranks.run(2, fail_half_way, str(tmp_path), layout)
    assert torch.equal(cloudckpt.read(f"{tmp_path}/a")["z"], numbers(64, 4))


def use_again_after_a_failure(folder: str) -> None:
    state = {name: cut(numbers(64, 4), mesh(2), [Shard(0)]) for name in "abcz"}
    writer = StorageWriter(f"{folder}/a", config=SMALL)
    with quiet():
        with pytest.raises(dcp.CheckpointException, match="out of luck"):
            dcp.save(state, storage_writer=writer, planner=FailsHalfWay())
        dist.barrier()
        assert not list(Path(folder, "a").rglob("r00001*")), "the failed rank has removed what it wrote"
        dist.barrier()
        dcp.save(state, storage_writer=writer)
    dist.barrier()
    assert len(list(Path(folder, "a").rglob("*.zip"))) == 2, "and what the other rank wrote is gone, too"


def test_what_a_failure_leaves_is_removed(ranks: RankPool, tmp_path: Path):
    ranks.run(2, use_again_after_a_failure, str(tmp_path))


class Dies(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "z":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def save_and_die(folder: str) -> str:
    state = {name: cut(numbers(64, 4), mesh(2), [Shard(0)]) for name in "az"}
    try:
        save(state, f"{folder}/a", planner=Dies())
    except BaseException as error:  # noqa: BLE001  # torch's are no Exceptions
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_rank_is_killed(zygote: Zygote, tmp_path: Path):
    first, second = zygote.run([(save_and_die, str(tmp_path))] * 2)
    assert second.signal == signal.SIGKILL
    assert "saved" not in (first.returned or "")
    with pytest.raises(NotFoundError, match="never committed"):
        cloudckpt.read(f"{tmp_path}/a")


def load_damaged(folder: str, error: str) -> None:
    state = {"a": cut(torch.zeros(64, 8), mesh(2), [Replicate()]), "b": cut(torch.zeros(64, 8), mesh(2), [Shard(1)])}
    with pytest.raises(dcp.CheckpointException, match=error) as caught:
        load(state, f"{folder}/a", config=replace(SMALL, rank_timeout_s=5.0))
    assert list(caught.value.failures) == [0, 1]
    found = {"a": torch.zeros(64, 8)}
    load(found, f"{folder}/b")
    assert torch.equal(found["a"], numbers(64, 8))


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_damaged_packs(ranks: RankPool, tmp_path: Path, damage: str):
    state = {"a": numbers(64, 8), "b": numbers(64, 8)}
    for name in "ab":
        save(state, f"{tmp_path}/{name}")
    (pack,) = (tmp_path / "a").rglob("*.zip")
    data = bytearray(pack.read_bytes())
    if damage == "missing":
        pack.unlink()
    else:
        at = data.index(numbers(64, 8)[40:42, 0].numpy().tobytes())
        data[at] ^= 1
        pack.write_bytes(data if damage == "flipped" else data[:at])
    error = {"missing": "missing from the store", "flipped": "checksum mismatch", "cut": "cut off"}[damage]
    with pytest.raises(dcp.CheckpointException, match=error) as caught:
        load({"b": torch.zeros(64, 8), "a": torch.zeros(64, 8)}, f"{tmp_path}/a")
    assert isinstance(caught.value.failures[0][0], CorruptChunkError)
    ranks.run(2, load_damaged, str(tmp_path), error)


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ({"whole": [["model", 1.5]]}, "a list of paths"),
        ({"raw": "model"}, "a list of paths"),
        ([], "is not an object"),
        ({"raw": [["n"]]}, "noted as the bytes of a planner"),
    ],
)
def test_hostile_notes(tmp_path: Path, notes: Any, text: str):
    cloudckpt.save({"w": numbers(3), "n": 1}, f"{tmp_path}/a", metadata={"torch.distributed.checkpoint": notes})
    with pytest.raises(dcp.CheckpointException, match=text):
        load({"w": torch.zeros(3), "n": 0}, f"{tmp_path}/a")


def test_keys_that_are_two(tmp_path: Path):
    cloudckpt.save({"a": {"b": 1}, "a.b": 2, "c": 3}, f"{tmp_path}/a")
    with pytest.raises(dcp.CheckpointException, match=r"are both 'a.b' to torch.distributed.checkpoint"):
        load({"c": 0}, f"{tmp_path}/a")


def elsewhere(folder: str) -> None:
    with pytest.raises(dcp.CheckpointException, match=r"rank 1 saves to .*, but rank 0 to") as caught:
        save({f"w{dist.get_rank()}": numbers(3)}, f"{folder}/{dist.get_rank()}")
    assert list(caught.value.failures) == [1]


def test_ranks_that_save_to_other_places(ranks: RankPool, tmp_path: Path):
    ranks.run(2, elsewhere, str(tmp_path))
    with pytest.raises((NotFoundError, FormatError)):
        cloudckpt.read(f"{tmp_path}/0")


def test_unusable_tensors(tmp_path: Path):
    for tensor, text in (
        (torch.ones(3).to_sparse(), "layout torch.sparse"),
        (torch.empty(3, device="meta"), "meta tensor"),
    ):
        with pytest.raises(dcp.CheckpointException, match=text):
            save({"w": tensor}, f"{tmp_path}/a")
    with quiet(), pytest.raises(InvalidStateError, match="use_collectives=False"):
        dcp.save({}, storage_writer=StorageWriter(f"{tmp_path}/b"), use_collectives=False)
