"""torch's asynchronous saves, in a thread and in a process of its own."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt.dcp import StorageWriter
from tests.dcp.jobs import SMALL, cut, load, mesh, numbers, quiet
from tests.field.places import Place
from tests.ranks import RankPool


def save_beside(kind: AsyncCheckpointerType, root: str, options: Any) -> None:
    """torch's test_async_process_executor, and e2e/test_e2e_save_and_load: test_e2e_async_cached."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # daemons have no children
    device_mesh = mesh(dist.get_world_size())
    local = torch.zeros(4, 6)
    state = {"w": cut(local.clone(), device_mesh, [Shard(0)]), "plain": torch.zeros(5), "step": 0}
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in (1, 2, 3):
        state["w"].to_local().fill_(step)
        state["plain"].fill_(step)
        state["step"] = step
        writer = StorageWriter(f"{root}/step-{step}", storage_options=options, config=SMALL)
        with quiet():
            future: Any = async_save(state, storage_writer=writer, async_checkpointer_type=kind, planner=planner)
        state["w"].to_local().fill_(-1)  # training goes on
        state["plain"].fill_(-1)
        getattr(future, "upload_completion", future).result()
        found = {"w": cut(local.clone(), device_mesh, [Shard(1)]), "plain": torch.zeros(5), "step": 0}
        load(found, f"{root}/step-{step}", options)
        assert torch.equal(found["w"].full_tensor(), torch.full((4, 6), float(step)))
        assert torch.equal(found["plain"], torch.full((5,), float(step)))
        assert found["step"] == step
    with quiet():
        future = async_save(
            {"x": object()}, storage_writer=StorageWriter(f"{root}/bad", storage_options=options), planner=planner
        )
        with pytest.raises(dcp.CheckpointException, match="cannot be stored as plain data"):
            getattr(future, "upload_completion", future).result()
    # The daemon of torch's would outlive the process group of this test.
    import torch.distributed.checkpoint._async_process_executor as executor

    executor._CHECKPOINT_PROCESS = None


@pytest.mark.parametrize("place", ["local", "juicefs"], indirect=True)
def test_in_a_thread(ranks: RankPool, place: Place):
    ranks.run(2, save_beside, AsyncCheckpointerType.THREAD, place.root, place.options)


def test_in_a_process(ranks: RankPool, tmp_path: Path):
    ranks.run(2, save_beside, AsyncCheckpointerType.PROCESS, str(tmp_path), None)


def test_writers_are_pickled(tmp_path: Path):
    writer: StorageWriter = pickle.loads(pickle.dumps(StorageWriter(f"{tmp_path}/a", step=3, layout="zarr")))
    with quiet():
        dcp.save({"w": numbers(3)}, storage_writer=writer)
    assert writer.commit is not None
    assert writer.commit.step == 3
    assert torch.equal(cloudckpt.read(f"{tmp_path}/a")["w"], numbers(3))
    pickle.dumps(writer)
