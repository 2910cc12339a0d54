"""Planners of all kinds: torch's own with kept plans, and those that change what is saved and loaded."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt.dcp import StorageReader
from cloudckpt.errors import InvalidStateError, MismatchError
from tests.dcp.jobs import cut, load, mesh, numbers, save
from tests.ranks import RankPool


def keeping() -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(enable_plan_caching=True)


def forget() -> None:
    for kept in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(dcp.planner.SavePlanner, f"_cached_{kept}").clear()


def keep_plans(folder: str) -> None:
    forget()
    rank, size = dist.get_rank(), dist.get_world_size()
    device_mesh = mesh(size)

    def state(step: int) -> dict[str, Any]:
        made: dict[str, Any] = {"w": cut(numbers(8, 6) + step, device_mesh, [Shard(0)]), "step": step}
        if step in (3, 4):
            made["new"] = step  # on one rank after all, so that the plan of the other one stays
        if step >= 5:
            made["w"] = cut(numbers(8, 6) + step, device_mesh, [Shard(1)])
        if step == 6 and rank == 1:
            made["mine"] = torch.full((40,), 6.0)
        return made

    for step in range(8):
        url = f"{folder}/step-{step}" if step % 2 else f"{folder}/again"
        save(state(step), url, planner=keeping())
        dist.barrier()
        found = cloudckpt.read(url)
        assert torch.equal(found["w"], numbers(8, 6) + step), step
        assert found["step"] == step
        assert found.keys() - {"w", "step"} == ({"new"} if step in (3, 4) else {"mine"} if step == 6 else set())
        dist.barrier()
    # A save that fails in between leaves nobody out of step.
    with pytest.raises(dcp.CheckpointException, match="cannot be stored as plain data"):
        save({**state(7), "step": object()}, f"{folder}/failed", planner=keeping())
    save(state(7), f"{folder}/after", planner=keeping())
    dist.barrier()
    assert torch.equal(cloudckpt.read(f"{folder}/after")["w"], numbers(8, 6) + 7)
    # Kept plans do not notice dtypes; it must not be stored as something else.
    forget()
    save({"w": numbers(4)}, f"{folder}/d", planner=keeping())
    with pytest.raises(
        dcp.CheckpointException, match=r"'w': the plan has a torch.float32 tensor .*enable_plan_caching"
    ):
        save({"w": numbers(4, dtype=torch.bfloat16)}, f"{folder}/d", planner=keeping())
    dist.barrier()
    assert cloudckpt.read(f"{folder}/d")["w"].dtype == torch.float32
    forget()


def test_kept_plans(ranks: RankPool, tmp_path: Path):
    ranks.run(2, keep_plans, str(tmp_path))


def test_plans_kept_from_other_storage(tmp_path: Path):
    forget()
    state = {"w": numbers(4), "step": 1}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "files"), planner=keeping())
    save(state, f"{tmp_path}/a", planner=keeping())
    assert torch.equal(cloudckpt.read(f"{tmp_path}/a")["w"], state["w"])
    forget()


def keep_plans_of_a_save_that_failed(folder: str) -> None:
    forget()
    state = {f"w{dist.get_rank()}": numbers(3)}
    with pytest.raises(dcp.CheckpointException, match=r"rank 1 saves to .*, but rank 0 to"):
        save(state, f"{folder}/{dist.get_rank()}", planner=keeping())
    save(state, f"{folder}/0", planner=keeping())
    dist.barrier()
    assert cloudckpt.read(f"{folder}/0").keys() == {"w0", "w1"}
    forget()


def test_plans_kept_from_a_save_that_failed(ranks: RankPool, tmp_path: Path):
    ranks.run(2, keep_plans_of_a_save_that_failed, str(tmp_path))


class HalfPlanner(dcp.DefaultSavePlanner):
    """As in torch's documentation: the plan and the data are changed together."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data if write_item.type == WriteItemType.BYTE_IO else data.to(torch.float16)


class JsonPlanner(dcp.DefaultSavePlanner):
    """Its values are not torch.save's, and its own data are no mapping of keys."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(object).encode())
        return object

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data={"made by": "JsonPlanner", 1: (2, 3)})


class JsonLoader(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert self.metadata is not None
        assert self.metadata.planner_data == {"made by": "JsonPlanner", 1: (2, 3)}
        self.original_state_dict[read_item.dest_index.fqn] = json.load(value)


def test_changed_while_saving(tmp_path: Path):
    state = {"w": numbers(5, 3), "n": {"lr": 0.5}}
    save(state, f"{tmp_path}/half", planner=HalfPlanner())
    assert torch.equal(cloudckpt.read(f"{tmp_path}/half")["w"], state["w"].half())
    flat = {"w": numbers(5, 3), "n": [1, "x"]}
    save(flat, f"{tmp_path}/json", planner=JsonPlanner())
    found: dict[str, Any] = {"w": torch.zeros(5, 3), "n": None}
    load(found, f"{tmp_path}/json", planner=JsonLoader())
    assert found["n"] == [1, "x"]
    assert torch.equal(found["w"], flat["w"])
    assert cloudckpt.read(f"{tmp_path}/json")["n"] == b'[1, "x"]'


class RenamingLoader(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"foo_{k}": v for k, v in state_dict.items()}, metadata, is_coordinator)
        self.original_state_dict = state_dict

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class Materializing(dcp.DefaultLoadPlanner):
    """Has no memory for the tensor before it is asked for it."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = tensor


class Window(dcp.DefaultLoadPlanner):
    """Rows 2 to 4 of columns 1 to 2, into the middle of a smaller tensor; and twice, from another start."""

    def create_local_plan(self) -> LoadPlan:
        (item,) = super().create_local_plan().items
        part = replace(
            item, storage_offsets=torch.Size([2, 1]), dest_offsets=torch.Size([1, 0]), lengths=torch.Size([3, 2])
        )
        index = MetadataIndex("w", torch.Size([2, 1]))
        other = replace(part, storage_index=index, storage_offsets=torch.Size([0, 0]))
        return LoadPlan([part, other])


def test_changed_while_loading(tmp_path: Path):
    save({"foo_w": numbers(5, 3), "foo_n": 7}, f"{tmp_path}/a")
    found: dict[str, Any] = {"w": torch.zeros(5, 3), "n": 0}
    load(found, f"{tmp_path}/a", planner=RenamingLoader())
    assert torch.equal(found["w"], numbers(5, 3))
    assert found["n"] == 7
    found = {"foo_w": (given := torch.zeros(5, 3))}
    load(found, f"{tmp_path}/a", planner=Materializing())
    assert torch.equal(found["foo_w"], numbers(5, 3))
    assert not given.any()
    save({"w": numbers(6, 4)}, f"{tmp_path}/b")
    found = {"w": torch.zeros(6, 4)}
    load(found, f"{tmp_path}/b", planner=Window())
    expected = torch.zeros(6, 4)
    expected[1:4, 0:2] = numbers(6, 4)[2:5, 1:3]
    assert torch.equal(found["w"], expected)


def test_partial_loads(tmp_path: Path):
    save({"a": numbers(3), "b": {"x": 1, "y": torch.ones(2)}}, f"{tmp_path}/a")
    found: dict[str, Any] = {"b": {"y": torch.zeros(2)}, "c": 5}
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: c"):
        load(found, f"{tmp_path}/a")
    load(found, f"{tmp_path}/a", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert found["c"] == 5
    assert torch.equal(found["b"]["y"], torch.ones(2))
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(4)}, f"{tmp_path}/a")
    with pytest.raises(dcp.CheckpointException, match="Invalid checkpoint metadata for a"):
        load({"a": "text"}, f"{tmp_path}/a")


class Wrong(dcp.DefaultLoadPlanner):
    """Changes its first item: ``change``."""

    def __init__(self, **change: Any) -> None:
        super().__init__()
        self.change = change

    def create_local_plan(self) -> LoadPlan:
        items = super().create_local_plan().items
        return LoadPlan([replace(items[0], **self.change), *items[1:]])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"storage_index": MetadataIndex("nobody")}, MismatchError, "has no 'nobody', which the planner asks for"),
        ({"storage_offsets": torch.Size([3, 0])}, InvalidStateError, "the planner asks for .* the tensor is"),
        ({"storage_index": MetadataIndex("n")}, MismatchError, "'n' is a value, and the planner asks for a tensor"),
        ({"lengths": torch.Size([9, 9])}, InvalidStateError, "the planner asks for"),
    ],
)
def test_planners_that_ask_for_what_is_not_there(tmp_path: Path, change: Any, error: type, text: str):
    save({"a": numbers(4, 4), "n": 1}, f"{tmp_path}/a")
    with pytest.raises(dcp.CheckpointException, match=text) as caught:
        load({"a": torch.zeros(4, 4)}, f"{tmp_path}/a", planner=Wrong(**change))
    assert type(caught.value.failures[0][0]) is error


class Forgetful(dcp.DefaultLoadPlanner):
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(central_plan.items)


class Clumsy(dcp.DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return SavePlan(new_plan.items)


def lose_storage_data(folder: str) -> None:
    save({"a": numbers(4)}, f"{folder}/a")
    with pytest.raises(dcp.CheckpointException, match=r"lost its storage_data.*exchange=.none"):
        load({"a": torch.zeros(4)}, f"{folder}/a", planner=Forgetful(), config=cloudckpt.Config(rank_timeout_s=1.0))
    found = {"a": torch.zeros(4)}
    load(found, f"{folder}/a", planner=Forgetful(), exchange="none")
    load(found, f"{folder}/a")
    assert torch.equal(found["a"], numbers(4))
    with pytest.raises(dcp.CheckpointException, match="lost its storage_data"):
        save({"a": numbers(4)}, f"{folder}/b", planner=Clumsy())


def test_planners_that_lose_storage_data(ranks: RankPool, tmp_path: Path):
    ranks.run(2, lose_storage_data, str(tmp_path))


def test_unusual_targets(tmp_path: Path):
    save({"a": numbers(4, 4), "c": torch.ones(3, dtype=torch.complex64) * 1j}, f"{tmp_path}/a")
    whole = torch.zeros(8, 8)
    found = {"a": whole[::2, 1::2].t(), "c": torch.zeros(3, dtype=torch.complex64).conj()}
    load(found, f"{tmp_path}/a")
    assert torch.equal(whole[::2, 1::2].t(), numbers(4, 4))
    assert torch.equal(found["c"].resolve_conj(), torch.ones(3, dtype=torch.complex64) * 1j)
    with pytest.raises(dcp.CheckpointException, match="share memory"):
        load({"a": torch.zeros(4).expand(4, 4)}, f"{tmp_path}/a")
    metadata = StorageReader(f"{tmp_path}/a").read_metadata()
    assert [len(kind.chunks) for kind in metadata.state_dict_metadata.values()] == [1, 1]
