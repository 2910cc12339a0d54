"""Saves of a layout that was saved before: only digests and values travel; and never a plan of another layout."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError, InvalidStateError, StoreError
from cloudckpt.pytorch.group import make_group
from cloudckpt.transfer.planning import Planner
from tests.collectives import counted_collectives
from tests.ranks import RankPool
from tests.sharding import error_of, make_mesh, noise, same_bits, shard


def _how(call: Callable[[], object]) -> tuple[str, int]:
    """How the plan of a save came about, on this rank; and how many collectives it took."""
    planner = make_group(None, 60).kept(Planner)
    kept = dict(planner._plans)
    with counted_collectives() as counts:
        call()
    return "warm" if planner._plans.keys() == kept.keys() else "cold", counts.total()


def _many(mesh: Any, num_tensors: int, step: int) -> dict[str, Any]:
    half = num_tensors // 2
    local = torch.full((half, 2, 3), float(step)) + dist.get_rank()
    model = {f"layers.{i // 10}.w{i % 10}": DTensor.from_local(local[i] + i, mesh, [Shard(0)]) for i in range(half)}
    # Plain tensors are proved equal by digest on every save.
    buffers = {f"buffer.{i}": torch.full((2, 2), float(i + step)) for i in range(half)}
    groups = [{"lr": 0.1 / (step + 1), "params": list(range(num_tensors))}]
    return {"model": model, "buffers": buffers, "param_groups": groups, "step": step}


def save_many(root: str, layout: Any, num_tensors: int) -> list[tuple[str, int]]:
    mesh = make_mesh((dist.get_world_size(),))
    rng = cloudckpt.PerRank(bytes([dist.get_rank()] * 5000))
    found = []
    for step in range(2):
        state = {**_many(mesh, num_tensors, step), "rng": rng}
        found.append(_how(partial(cloudckpt.save, state, f"{root}/{step}", layout=layout)))
    return found


# What is planned does not depend on the layout, and a file for each tensor takes its time.
@pytest.mark.parametrize(("layout", "num_tensors"), [("packed", 2000), ("zarr", 200)])
def test_warm_saves_of_many_tensors_run_no_collective(ranks: RankPool, tmp_path: Path, layout: str, num_tensors: int):
    for (first, _), (second, num_collectives) in ranks.run(4, save_many, str(tmp_path), layout, num_tensors):
        assert (first, second, num_collectives) == ("cold", "warm", 0)
    stored = cloudckpt.read(str(tmp_path / "1"))
    assert stored["step"] == 1
    assert stored["param_groups"][0]["lr"] == 0.1 / 2
    assert stored["model"]["layers.7.w3"][:, 0].tolist() == [74.0, 74.0, 75.0, 75.0, 76.0, 76.0, 77.0, 77.0]
    assert stored["buffers"]["buffer.9"].tolist() == [[10.0, 10.0], [10.0, 10.0]]
    first, second = (cloudckpt.open_checkpoint(str(tmp_path / step)).manifest.document for step in "01")
    assert first.arrays == second.arrays
    assert first.chunks.nbytes == second.chunks.nbytes
    assert sorted((e.nbytes, e.rank) for e in first.objects) == sorted((e.nbytes, e.rank) for e in second.objects)


def _states(mesh: Any, other: Any) -> dict[str, Callable[[int], Any]]:
    """States by name; each takes the seed of its bits. Some differ on one rank only."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def whole(seed: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (8, 6)) -> torch.Tensor:
        return noise(shape, dtype, seed)

    def plain(seed: int) -> Any:
        return {"w": whole(seed), "b": whole(seed + 1), "n": seed}

    def tied(seed: int) -> Any:
        w = whole(seed)
        return {"w": w, "b": w, "n": seed}

    def tied_on_one(seed: int) -> Any:
        w = whole(seed)
        return {"w": w, "b": w if rank == 0 else w.clone(), "n": seed}

    def view(seed: int) -> Any:
        w = whole(seed)
        return {"w": w, "b": w[:], "n": seed}

    def sharded(placement: Any, on: Any) -> Callable[[int], Any]:
        return lambda seed: {"w": shard(whole(seed), on, placement), "b": whole(seed + 1), "n": seed}

    def one_more(seed: int) -> Any:
        return plain(seed) | ({"extra": whole(seed + 2)} if rank == size - 1 else {})

    return {
        "plain": plain,
        "tied": tied,
        "tied_on_one": tied_on_one,
        "view": view,
        "rows": sharded([Shard(0)], mesh),
        "columns": sharded([Shard(1)], mesh),
        "replicas": sharded([Replicate()], mesh),
        "mesh": sharded([Replicate(), Shard(0)], other),
        "names": lambda seed: {"w": shard(whole(seed), mesh, [Shard(0)]), "n": seed, "b": [whole(seed + 1)]},
        "dtype": lambda seed: {"w": whole(seed, torch.bfloat16), "b": whole(seed + 1), "n": seed},
        "shape": lambda seed: {"w": whole(seed, shape=(6, 8)), "b": whole(seed + 1), "n": seed},
        "one_more": one_more,
        "stages": lambda seed: {f"stage.{rank}": {"w": whole(seed + rank)}, "n": seed},
        "nothing": lambda seed: {"n": seed} if rank else plain(seed),
    }


def _expected(name: str, seed: int, size: int) -> dict[str, torch.Tensor]:
    """What is stored: dotted path to the whole tensor."""
    w, b = noise((8, 6), seed=seed), noise((8, 6), seed=seed + 1)
    if name in {"tied", "tied_on_one", "view"}:
        return {"w": w, "b": w}
    if name == "dtype":
        return {"w": noise((8, 6), torch.bfloat16, seed), "b": b}
    if name == "shape":
        return {"w": noise((6, 8), seed=seed), "b": b}
    if name == "names":
        return {"w": w, "b.0": b}
    if name == "one_more":
        return {"w": w, "b": b, "extra": noise((8, 6), seed=seed + 2)}
    if name == "stages":
        return {f"stage.{r}.w": noise((8, 6), seed=seed + r) for r in range(size)}
    return {"w": w, "b": b}


def _stored(url: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, torch.Tensor):
            found[path] = node
        elif isinstance(node, (dict, list)):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk(child, f"{path}.{key}".lstrip("."))

    walk(cloudckpt.read(url), "")
    return found


def save_in_turn(root: str, seed: int) -> dict[str, int]:
    """Random states one after another, some with options or a failure between them; all are read back."""
    dice = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    makers = _states(make_mesh((size,)), make_mesh((2, size // 2)))
    seen = {"warm": 0, "cold": 0}
    favourites = dice.sample(sorted(makers), 3)
    for number in range(24):
        name = dice.choice(favourites) if dice.random() < 0.7 else dice.choice(sorted(makers))
        config = Config(chunk_bytes=dice.choice([64, 64, 128]), check_replicas=dice.choice(["plain", "plain", "all"]))
        layout = dice.choice(["packed", "packed", "zarr"])
        url = f"{root}/{seed}-{number}"
        save = partial(cloudckpt.save, config=config, layout=layout)
        fault = dice.random()
        if fault < 0.1:  # one rank's state cannot be stored
            broken = {"w": object()} if rank == size - 1 else makers[name](number)
            assert error_of(partial(save, broken, url)) is not None
        elif fault < 0.2:  # one rank is called otherwise
            error = error_of(partial(save, makers[name](number), url, step=int(rank == 1)))
            assert "save() was called with" in str(error)
        elif fault < 0.3:  # plain values differ
            error = error_of(partial(save, makers[name](number) | {"n": rank}, url))
            assert "'n' differs between ranks 0 and" in str(error)
        elif fault < 0.4:  # nothing can be written
            with patch("cloudckpt._write.upload", side_effect=StoreError("the disk is full")):
                assert "the disk is full" in str(error_of(partial(save, makers[name](number), url)))
        how, _ = _how(partial(save, makers[name](number), url))
        seen[how] += 1
        expected, stored = _expected(name, number, size), _stored(url)
        assert stored.keys() == expected.keys(), (name, number)
        assert all(same_bits(stored[path], expected[path]) for path in expected), (name, number)
        arrays = cloudckpt.open_checkpoint(url).manifest.arrays
        assert len(arrays) == len(expected) - (name in {"tied", "view"}), (name, number)
    return seen


def test_random_layouts_in_turn(ranks: RankPool, tmp_path: Path):
    total = {"warm": 0, "cold": 0}
    for seed in range(2):
        found = ranks.run(4, save_in_turn, str(tmp_path), seed)
        assert all(seen == found[0] for seen in found)
        for how, count in found[0].items():
            total[how] += count
    assert total["warm"] >= 6
    assert total["cold"] >= 6


def train_and_save(root: str) -> list[tuple[str, int]]:
    """A whole training job: everything changes with every step but the layout, once the optimizer has stepped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    fully_shard(model, mesh=make_mesh((dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"train": cloudckpt.TrainingState(model, optimizer, scheduler), "losses": []}
    found = []
    for step in range(4):
        if step:
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state["losses"].append(step)
        torch.rand(1 + dist.get_rank())
        found.append(_how(partial(cloudckpt.save, state, f"{root}/{step}")))
    return found


def test_training_steps_do_not_change_the_layout(ranks: RankPool, tmp_path: Path):
    for found in ranks.run(2, train_and_save, str(tmp_path)):
        assert [how for how, _ in found] == ["cold", "cold", "warm", "warm"]
        assert [count for _, count in found[2:]] == [0, 0]
    first, second = (cloudckpt.read(str(tmp_path / step)) for step in "23")
    assert second["losses"] == [1, 2, 3]
    weights = first["train"]["model"]["0.weight"], second["train"]["model"]["0.weight"]
    assert not torch.equal(*weights)


def replicas_drift(root: str) -> tuple[CloudckptError | None, str]:
    """Content is no layout: replicas that become different are found on a warm save as well."""
    weight = torch.zeros(4)
    cloudckpt.save({"w": weight}, f"{root}/0")
    weight += dist.get_rank()
    error = error_of(lambda: cloudckpt.save({"w": weight}, f"{root}/1"))
    weight.fill_(3.0)
    how, _ = _how(lambda: cloudckpt.save({"w": weight}, f"{root}/1"))
    return error, how


def test_replicas_that_drift_apart_are_found(ranks: RankPool, tmp_path: Path):
    for error, how in ranks.run(2, replicas_drift, str(tmp_path)):
        assert isinstance(error, InvalidStateError)
        assert "'w' [0:4] counts as replicated, but ranks 0 and 1 hold different values" in str(error)
        assert how == "warm"
    assert cloudckpt.read(str(tmp_path / "1"))["w"].tolist() == [3.0] * 4


def groups_come_and_go(root: str) -> tuple[list[str], bool]:
    """A group of other ranks has plans of its own, which go when it goes."""
    rank = dist.get_rank()
    state = {"w": torch.arange(6.0)}
    found = [_how(partial(cloudckpt.save, state, f"{root}/all-{i}"))[0] for i in range(2)]
    pair = dist.new_group([0, 1])
    kept = None
    if rank < 2:
        for i in range(2):
            planner = make_group(pair, 60).kept(Planner)
            before = len(planner._plans)
            cloudckpt.save(state, f"{root}/pair-{i}", group=pair)
            found.append("warm" if len(planner._plans) == before else "cold")
        kept = weakref.ref(planner)
        del planner
        dist.destroy_process_group(pair)
    del pair
    gc.collect()
    return found, kept is None or kept() is None


def test_every_group_has_its_own_plans(ranks: RankPool, tmp_path: Path):
    answers = ranks.run(3, groups_come_and_go, str(tmp_path))
    assert [found for found, _ in answers] == [["cold", "warm", "cold", "warm"]] * 2 + [["cold", "warm"]]
    assert all(gone for _, gone in answers)


def test_the_garbage_collector_is_as_it_was(tmp_path: Path):
    seen: list[bool] = []

    class Asking:
        def state_dict(self) -> dict[str, Any]:
            seen.append(gc.isenabled())
            return {"w": torch.zeros(2)}

        def load_state_dict(self, state: Any) -> None: ...

    cloudckpt.save({"m": Asking()}, tmp_path / "a")
    assert gc.isenabled()
    assert error_of(partial(cloudckpt.save, {"m": Asking(), "n": object()}, tmp_path / "b")) is not None
    assert gc.isenabled()
    gc.disable()
    try:
        cloudckpt.save({"m": Asking()}, tmp_path / "c")
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False] * 3


def test_one_process_keeps_plans_but_no_tensors(tmp_path: Path):
    planner = make_group(None, 60).kept(Planner)
    weight = torch.arange(12.0).reshape(3, 4)
    kept = []
    for step in range(3):
        cloudckpt.save({"w": weight, "step": step}, tmp_path / str(step))
        kept.append(list(planner._plans))
        weight += 1
    assert kept[0] == kept[1] == kept[2]
    assert cloudckpt.read(tmp_path / "2")["w"].tolist() == (torch.arange(12.0).reshape(3, 4) + 2).tolist()
    assert cloudckpt.read(tmp_path / "2")["step"] == 2
    gone = weakref.ref(weight.untyped_storage())
    del weight
    gc.collect()
    assert gone() is None
