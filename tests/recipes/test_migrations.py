"""Checkpoints of earlier model versions, loaded as if they were of the present one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from cloudckpt import Concatenate, Split, Stack, Transpose
from cloudckpt.errors import CloudckptError, InvalidStateError, MismatchError
from cloudckpt.plan import migrations
from tests.ranks import RankPool
from tests.sharding import make_mesh


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_registered", {})


def register() -> None:
    """From separate q, k, v (1) to one (2), to experts in a stack and another name for all (3)."""
    migrations._registered.clear()

    @cloudckpt.migration("1", "2")
    def fuse() -> list[Any]:
        parts = tuple(f"{{p:*}}.layers.{{n}}.{name}" for name in "qkv")
        return [
            Concatenate(parts, "{p}.layers.{n}.qkv"),
            Transpose("{p:*}.head"),
            ("optimizer.{r:*}.moment", "optimizer.{r}.exp_avg"),
        ]

    @cloudckpt.migration("2", "3")
    def stack() -> list[Any]:
        return [Stack("{p:*}.experts.{e}", "{p}.experts"), ("model.{r:*}", "net.{r}")]


def first_version() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    model: dict[str, Any] = {"head": torch.randn(4, 6, generator=generator)}
    for n in range(2):
        for name, rows in (("q", 8), ("k", 2), ("v", 2)):
            model[f"layers.{n}.{name}"] = torch.randn(rows, 6, generator=generator)
        for e in range(3):
            model[f"layers.{n}.experts.{e}"] = torch.randn(4, 6, generator=generator)
    return {"model": model, "step": 5}


def third_version(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = state["model"]
    found = {"head": model["head"].t()}
    for n in range(2):
        found[f"layers.{n}.qkv"] = torch.cat([model[f"layers.{n}.{x}"] for x in "qkv"])
        found[f"layers.{n}.experts"] = torch.stack([model[f"layers.{n}.experts.{e}"] for e in range(3)])
    return found


@contextmanager
def registered() -> Iterator[None]:
    """In a process of the pool, which other tests use as well."""
    register()
    try:
        yield
    finally:
        migrations._registered.clear()


def sharded_load(url: str) -> list[str | None]:
    with registered():
        return _sharded_load(url)


def _sharded_load(url: str) -> list[str | None]:
    mesh = make_mesh((2,))
    whole = third_version(first_version())
    target = {
        name: distribute_tensor(torch.zeros(tensor.shape), mesh, [Shard(tensor.dim() - 1)], src_data_rank=None)
        for name, tensor in whole.items()
    }
    report = cloudckpt.load({"net": target, "step": 0}, url, model_version="3")
    for name, tensor in target.items():
        assert torch.equal(tensor.full_tensor(), whole[name]), name
    return report.migrated


def test_two_migrations_into_a_sharded_target(ranks: RankPool, tmp_path: Path):
    cloudckpt.save(first_version(), tmp_path / "c", model_version="1")
    assert ranks.run(2, sharded_load, str(tmp_path / "c")) == [["1", "2", "3"]] * 2
    with cloudckpt.open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.manifest.document.model_version == "1"


def test_own_rules_come_last_and_read_knows_versions(tmp_path: Path):
    register()
    cloudckpt.save(first_version(), tmp_path / "c", model_version="1")
    rules = [Split("net.layers.{n}.qkv", ("q.{n}", "kv.{n}"), (8, 4)), ("net.head", "head")]
    found = cloudckpt.read(tmp_path / "c", ["q.*", "head"], model_version="3", rename=rules)
    assert {*found} == {"q.0", "q.1", "head"}
    assert torch.equal(found["q.1"], first_version()["model"]["layers.1.q"])


def test_stored_as_it_is_wanted_or_not_asked_for(tmp_path: Path):
    register()
    state = first_version()
    cloudckpt.save(state, tmp_path / "c", model_version="1")
    for version in ("1", None):
        target = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}, "step": 0}
        report = cloudckpt.load(target, tmp_path / "c", model_version=version)
        assert report.migrated == []
        assert torch.equal(target["model"]["head"], state["model"]["head"])


def test_checkpoints_from_before_there_were_versions(tmp_path: Path):
    register()
    cloudckpt.migration(None, "1")(lambda: {"old.{r:*}": "model.{r}"})
    cloudckpt.save({"old": first_version()["model"]}, tmp_path / "c")
    found = cloudckpt.read(tmp_path / "c", model_version="2")
    assert "layers.0.qkv" in found["model"]


def test_no_way_changes_nothing(tmp_path: Path):
    register()
    cloudckpt.save(first_version(), tmp_path / "c", model_version="1")
    target = {"net": torch.zeros(1)}
    with pytest.raises(MismatchError, match="c holds model version '1', and version '9' is asked for"):
        cloudckpt.load(target, tmp_path / "c", model_version="9")
    with pytest.raises(MismatchError, match="but no migrations lead there"):
        cloudckpt.read(tmp_path / "c", model_version="9")


def test_rules_that_do_not_fit_name_the_migration(tmp_path: Path):
    migrations._registered.clear()
    cloudckpt.migration("1", "2")(lambda: [Stack("model.layers.0.{x}", "model.all")])
    cloudckpt.migration("1", "3")(lambda: 7)  # type: ignore[arg-type,return-value]
    cloudckpt.save(first_version(), tmp_path / "c", model_version="1")
    with pytest.raises(InvalidStateError, match=r"migration '1' -> '2': rename rule Stack.* is no number"):
        cloudckpt.read(tmp_path / "c", model_version="2")
    with pytest.raises(InvalidStateError, match=r"migration '1' -> '3': rename must be a list of rules, not 7"):
        cloudckpt.read(tmp_path / "c", model_version="3")


@pytest.mark.parametrize("version", ["", 3])
def test_what_is_no_version(tmp_path: Path, version: Any):
    with pytest.raises(InvalidStateError, match="a model version is a string"):
        cloudckpt.save({"x": 1}, tmp_path / "c", model_version=version)


def differing(url: str) -> tuple[str, str]:
    rank = dist.get_rank()
    try:
        cloudckpt.save({"x": 1}, f"{url}-new", model_version=str(rank))
        saved = ""
    except CloudckptError as error:
        saved = str(error)
    target = {"net": {"head": torch.zeros(6, 4)}}
    loaded = ""
    with registered():
        if rank == 1:
            del migrations._registered["2", "3"]
            cloudckpt.migration("2", "3")(list)
        try:
            cloudckpt.load(target, url, model_version="3", strict=False)
        except CloudckptError as error:
            loaded = str(error)
    return saved, loaded


def test_ranks_must_agree(ranks: RankPool, tmp_path: Path):
    cloudckpt.save(first_version(), tmp_path / "c", model_version="1")
    for saved, loaded in ranks.run(2, differing, str(tmp_path / "c")):
        assert re.search("called with .*model_version='0'.* on rank 0 but .*model_version='1'.* on rank 1", saved)
        assert "was called with rename=\"migrations ['1' -> '2', '2' -> '3'], " in loaded


def test_background_saves_take_a_version_too(tmp_path: Path):
    register()
    cloudckpt.async_save(first_version(), tmp_path / "c", model_version="1").result(timeout_s=60)
    assert "layers.0.qkv" in cloudckpt.read(tmp_path / "c", model_version="2")["model"]
