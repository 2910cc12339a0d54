"""What torch's own tests of its checkpoint package check, with this library's storage; each names the one it follows.

Anew and on CPUs, where many of torch's need GPUs. Not followed: those of file names, formats on disk and stream
transforms (`test_fsspec.TestFileSystem`, `test_file_system_checkpoint_cpu` with ``_extensions``, `test_format_utils`,
`test_hf_storage`), and those that touch no storage (`test_planner`, `test_traverse`, `test_nested_dict`,
`test_dedup_tensors`, `test_state_dict_utils`, `test_state_dict`).
"""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.tensor import Replicate, Shard

from cloudckpt.dcp import StorageReader, StorageWriter
from tests.dcp.jobs import SMALL, blank, cut, load, mesh, numbers, quiet, save
from tests.ranks import RankPool


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = torch.nn.Linear(5, 5)
        self.linear_2 = torch.nn.Linear(5, 1)
        self.emb = torch.nn.EmbeddingBag(5, 10)


class Blob:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"blob": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["blob"]


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key], key


def test_only_tensors(tmp_path: Path):
    """test_file_system_checkpoint_cpu: test_read_write_only_tensor, by the functions that torch is about to drop."""
    stored, found = Model().state_dict(), Model().state_dict()
    with quiet():
        dcp.save_state_dict(stored, StorageWriter(tmp_path / "a", config=SMALL), no_dist=True)
        dcp.load_state_dict(found, StorageReader(tmp_path / "a"), no_dist=True)
    assert_equal(found, stored)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_tensors_and_a_blob(tmp_path: Path, compression: Any):
    """test_file_system_checkpoint_cpu: test_read_write_tensor_and_blob, and with zstd instead of its transforms."""
    stored = {**Model().state_dict(), "test_blob": Blob(b"SomeBlobForTesting")}
    found = {**Model().state_dict(), "test_blob": Blob(b"")}
    save(stored, f"{tmp_path}/a", compression=compression)
    load(found, f"{tmp_path}/a")
    assert found.pop("test_blob").value == stored.pop("test_blob").value
    assert_equal(found, stored)


def test_other_dtypes_are_cast(tmp_path: Path):
    """test_file_system_checkpoint_cpu: test_dtype_mismatch_casting."""
    stored = {"w": torch.rand(4, 3)}
    save(stored, f"{tmp_path}/a")
    found = {"w": torch.zeros(4, 3, dtype=torch.bfloat16)}
    load(found, f"{tmp_path}/a")
    assert torch.equal(found["w"], stored["w"].to(torch.bfloat16))


def test_overwrite(tmp_path: Path):
    """e2e/test_e2e_save_and_load and test_fsspec: test_overwrite."""
    save({"random": torch.randn(10)}, f"{tmp_path}/a", overwrite=False)
    second = {"random": torch.randn(10)}
    save(second, f"{tmp_path}/a")
    found = {"random": torch.zeros(10)}
    load(found, f"{tmp_path}/a")
    assert_equal(found, second)
    with pytest.raises(dcp.CheckpointException, match="already holds a committed checkpoint"):
        save(second, f"{tmp_path}/a", overwrite=False)


def test_nothing(tmp_path: Path):
    """e2e/test_e2e_save_and_load: test_no_dist."""
    with quiet():
        dcp.save({}, checkpoint_id=tmp_path / "a", storage_writer=StorageWriter())
        dcp.load({}, checkpoint_id=tmp_path / "a", storage_reader=StorageReader())


def test_storage_meta(tmp_path: Path):
    """test_compatibility: test_storage_meta."""
    writer = save({"a": torch.zeros(4, 4)}, f"{tmp_path}/a")
    reader = StorageReader(f"{tmp_path}/a")
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert (meta.checkpoint_id, meta.save_id, meta.load_id) == (f"{tmp_path}/a", writer.save_id, reader.load_id)


def test_loaded_in_place(tmp_path: Path):
    """e2e/test_e2e_save_and_load: test_init_state_dict."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict

    def made(lr: float) -> Any:
        model = Model()
        return model, torch.optim.Adam(model.parameters(), lr=lr)

    def states(model: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    stored = states(*made(0.1))
    save(stored, f"{tmp_path}/a")
    model, optimizer = made(0.2)
    found = states(model, optimizer)
    parts = dict(found)
    load(found, f"{tmp_path}/a")
    assert found["model"] is parts["model"]
    assert found["optimizer"] is parts["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_equal(get_model_state_dict(model), stored["model"])


class Watched(dict[str, Any]):
    was_set = False

    def __setitem__(self, key: str, value: Any) -> None:
        self.was_set = True
        super().__setitem__(key, value)


class Empty:
    was_loaded = False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.was_loaded = True


def test_stateful_and_other_parts(tmp_path: Path):
    """e2e/test_e2e_save_and_load: test_stateful_and_non_stateful_loads."""
    for part in (Empty(), {"replicated": torch.rand(10, 10), "bytes": [1, 2, 3, 4]}):
        state = Watched(part=part)
        save(state, f"{tmp_path}/a")
        load(state, f"{tmp_path}/a")
        assert state.was_set == isinstance(part, dict)
        assert isinstance(part, dict) or part.was_loaded


def sharded_by(spec: Any, *size: int) -> Any:
    from torch.distributed._shard import sharded_tensor

    return sharded_tensor.rand(spec, *size, init_rrefs=False)


def whole(tensor: Any) -> torch.Tensor | None:
    found = torch.zeros(tensor.size()) if dist.get_rank() == 0 else None
    tensor.gather(out=found)
    return found


def specs(rows: int) -> list[Any]:
    """Of legacy ShardedTensors whose dim 0 has ``rows``: on two ranks, with several shards a rank, and uneven ones."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec

    rest = [20] if rows == 10 else []

    def enumerated(*cuts: tuple[int, int, int]) -> Any:
        shards = [
            ShardMetadata([start, *[0] * len(rest)], [n, *rest], placement=f"rank:{r}/cpu") for start, n, r in cuts
        ]
        return EnumerableShardingSpec(shards)

    return [
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]),
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"]),
        enumerated((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, rows - 9, 0)),
        enumerated((0, 8, 1), (8, rows - 8, 0)),
    ]


def reshard_legacy(folder: str) -> None:
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    # test_load_with_different_shard_plan
    for number, (before, after) in enumerate(permutations(specs(10), 2)):
        stored, found = {"x": sharded_by(before, 10, 20)}, {"x": sharded_by(after, 10, 20)}
        with quiet():
            dcp.save_state_dict(stored, StorageWriter(f"{folder}/a{number}", config=SMALL))
            dcp.load_state_dict(found, StorageReader(f"{folder}/a{number}"))
        a, b = whole(stored["x"]), whole(found["x"])
        assert a is None or torch.equal(a, b), number
    # test_load_rowwise_to_colwise
    stored = {"x": sharded_by(specs(10)[0], 10, 20)}
    found = {"x": sharded_by(ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]), 10, 20)}
    save(stored, f"{folder}/b")
    load(found, f"{folder}/b")
    a, b = whole(stored["x"]), whole(found["x"])
    assert a is None or torch.equal(a, b)
    # test_switch_between_sharded_tensor_to_tensor
    for number, spec in enumerate(specs(32)):
        stored = {"sharded": sharded_by(spec, 32), "replicated": numbers(32)}
        found = {"sharded": torch.zeros(32), "replicated": sharded_by(specs(32)[number - 1], 32)}
        save(stored, f"{folder}/c{number}")
        load(found, f"{folder}/c{number}")
        a, b = whole(stored["sharded"]), whole(found["replicated"])
        if a is not None:
            assert torch.equal(a, found["sharded"])
            assert torch.equal(stored["replicated"], b)
    # test_save_load_bytes
    save({"bytes0": [1], "bytes1": "string"}, f"{folder}/d")
    values: dict[str, Any] = {"bytes0": [2], "bytes1": "other"}
    load(values, f"{folder}/d")
    assert values == {"bytes0": [1], "bytes1": "string"}


def test_legacy_sharded_tensors(ranks: RankPool, tmp_path: Path):
    """test_file_system_checkpoint_cpu: TestDistributedReshardOnLoad, and test_read_write_shard_tensor within."""
    ranks.run(2, reshard_legacy, str(tmp_path))


def reshard_dtensors(folder: str) -> None:
    tensor = numbers(6, 4)
    one_d = [[Shard(0)], [Replicate()], [Shard(1)]]
    two_d = [[Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(0)]]
    layouts = [(mesh(4), p) for p in one_d] + [(mesh(2, 2), p) for p in two_d]
    for number, (device_mesh, placements) in enumerate(layouts):
        save({"dtensor": cut(tensor, device_mesh, placements), "t": tensor}, f"{folder}/{number}")
        found = [cut(torch.zeros(6, 4), m, p) for m, p in layouts]
        # All in one load: a planner that names the same stored tensor many times.
        load({"dtensor": found[number - 1], "t": torch.zeros(6, 4)}, f"{folder}/{number}")
        assert torch.equal(found[number - 1].full_tensor(), tensor)
        load({"dtensor": found[number - 3]}, f"{folder}/{number}")
        assert torch.equal(found[number - 3].full_tensor(), tensor)


def test_dtensors(ranks: RankPool, tmp_path: Path):
    """test_dtensor_resharding: all of it, with uneven shards and dim 1; test_tp_checkpoint, test_hsdp_checkpoint."""
    ranks.run(4, reshard_dtensors, str(tmp_path))


def extra_state(folder: str) -> None:
    device_mesh = mesh(dist.get_world_size())
    state = {
        "sdt": cut(numbers(4), device_mesh, [Shard(0)]),
        "rdt": cut(numbers(4) + 4, device_mesh, [Replicate()]),
        "_extra_state": {"extra_state": 1, "extra_state_tensor": torch.zeros(1)},
    }
    with quiet():
        dcp.save_state_dict(state, StorageWriter(f"{folder}/a"), planner=dcp.DefaultSavePlanner())
    found = {
        "sdt": cut(numbers(4) * 10, device_mesh, [Shard(0)]),
        "rdt": cut(numbers(4) * 10, device_mesh, [Replicate()]),
        "_extra_state": {"extra_state": 10, "extra_state_tensor": torch.ones(1)},
    }
    with quiet():
        dcp.load_state_dict(found, StorageReader(f"{folder}/a"), planner=dcp.DefaultLoadPlanner())
    assert torch.equal(found["sdt"].full_tensor(), numbers(4))
    assert torch.equal(found["rdt"].to_local(), numbers(4) + 4)
    assert found["_extra_state"] == {"extra_state": 1, "extra_state_tensor": torch.zeros(1)}


def test_extra_state(ranks: RankPool, tmp_path: Path):
    """test_dtensor_checkpoint: test_distributed_tensor_planner."""
    ranks.run(2, extra_state, str(tmp_path))


class TrainState:
    """Keeps its losses in a stream, as torch's test and others do."""

    def __init__(self, step: int = 0, losses: list[float] | None = None) -> None:
        self.step = step
        self.losses = losses or []

    def state_dict(self) -> dict[str, Any]:
        stream = io.BytesIO()
        torch.save(self.losses, stream)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"].item())
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])


def trained(parallel: str, steps: int = 2, lr: float = 0.1) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 6))
    if parallel == "fsdp+tp":
        both = mesh(2, 2, names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=both["dp"])
    elif parallel == "hsdp":
        fully_shard(model, mesh=mesh(2, 2, names=("replicas", "shards")))
    elif parallel == "fsdp":
        fully_shard(model, mesh=mesh(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.rand(4, 8)).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, TrainState(steps, losses)


class App:
    """Model and optimizer by torch's own functions, as its tutorials have it."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def full(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def train_and_resume(folder: str) -> None:
    for before, after in (("fsdp", "hsdp"), ("fsdp+tp", "fsdp"), ("hsdp", "fsdp+tp")):
        model, optimizer, state = trained(before)
        save({"app": App(model, optimizer), "train_state": state}, f"{folder}/{before}")
        other, other_optimizer, other_state = trained(after, steps=1, lr=0.5)
        load({"app": App(other, other_optimizer), "train_state": other_state}, f"{folder}/{before}")
        assert (other_state.step, other_state.losses) == (state.step, state.losses)
        assert other_optimizer.param_groups[0]["lr"] == 0.1
        assert_equal(full(other), full(model))
        for m, o in ((model, optimizer), (other, other_optimizer)):  # moments are the same if one more step is
            torch.manual_seed(9)
            m(torch.rand(4, 8)).sum().backward()
            o.step()
        for name, value in full(model).items():
            torch.testing.assert_close(full(other)[name], value)
    # test_partial_load
    part, _, _ = trained("fsdp", steps=0)
    wanted = {"app": {"model": part.state_dict()}}
    load(wanted, f"{folder}/fsdp+tp")
    with quiet():
        found = _load_state_dict_from_keys(
            "app.model", checkpoint_id=f"{folder}/fsdp+tp", storage_reader=StorageReader()
        )
        moments = _load_state_dict_from_keys({"app.optimizer.state"}, storage_reader=StorageReader(f"{folder}/fsdp+tp"))
    assert_equal(found["app"]["model"], full(part))
    assert set(moments["app"]["optimizer"]) == {"state"}


def test_training_state(ranks: RankPool, tmp_path: Path):
    """e2e/test_e2e_save_and_load: test_e2e, test_partial_load; e2e/test_fine_tuning; test_fsdp_optim_state,
    test_fsdp_model_state, test_2d_fsdp_dt_checkpoint, test_fsdp_tp_checkpoint_conversion: with FSDP2.
    """
    ranks.run(4, train_and_resume, str(tmp_path))


class Meets:
    """Its load needs all ranks at the same time."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dist.all_reduce(torch.ones(1))


def meet_in_another_order(folder: str) -> None:
    names = ["A", "B"] if dist.get_rank() == 0 else ["B", "A"]
    state = {name: Meets() for name in names} | {"t": torch.ones(3)}
    save(state, f"{folder}/a")
    load(state, f"{folder}/a")


def test_other_order_of_keys(ranks: RankPool, tmp_path: Path):
    """e2e/test_e2e_save_and_load: test_different_ordered_state_dict_keys."""
    ranks.run(2, meet_in_another_order, str(tmp_path))


def fail_at(folder: str) -> None:
    from unittest.mock import patch

    state = {"sharded": cut(numbers(20, 20), mesh(2), [Shard(0)]), "replicated": numbers(10, 10), "bytes": [1, 2]}
    save(state, f"{folder}/whole")
    steps = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
    loads = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")
    for kind, name, act in [
        *((StorageWriter, s, save) for s in steps),
        *((StorageReader, s, load) for s in loads),
    ]:
        on = 0 if name in ("prepare_global_plan", "finish") else 1
        real = getattr(kind, name)

        def failing(self: Any, *args: Any, on: int = on, real: Any = real, **others: Any) -> Any:
            if dist.get_rank() == on:
                raise ValueError("no")
            return real(self, *args, **others)

        with patch.object(kind, name, failing), pytest.raises(dcp.CheckpointException) as caught:
            act(blank(state), f"{folder}/{'whole' if act is load else name}", config=replace(SMALL, rank_timeout_s=2.0))
        assert on in caught.value.failures, (name, caught.value)
        if act is save:
            with pytest.raises(dcp.CheckpointException, match=r"no checkpoint|never committed"):
                load(blank(state), f"{folder}/{name}")
    found = blank(state)
    load(found, f"{folder}/whole")
    assert torch.equal(found["sharded"].full_tensor(), numbers(20, 20))


def test_errors_on_one_rank(ranks: RankPool, tmp_path: Path):
    """test_checkpoint: test_save_error_handling, test_load_error_handling."""
    ranks.run(2, fail_at, str(tmp_path))
