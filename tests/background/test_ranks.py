"""Background saves of several ranks: who hears of what, and that nothing is left."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt import _async
from cloudckpt.errors import BusyError, CloudckptError, HelperError, InvalidStateError, NotFoundError, RankError
from tests.ranks import RankPool
from tests.sharding import make_mesh, noise, same_bits, shard

WAYS = [("thread", "store"), ("thread", "collectives"), ("process", "store")]
FULL = noise((10, 6))


def state(step: int) -> dict[str, Any]:
    mesh = make_mesh((dist.get_world_size(),))
    return {
        "w": shard(FULL, mesh, [Shard(0)]),
        "plain": torch.full((3,), float(step)),
        "rank": cloudckpt.PerRank(dist.get_rank()),
        "step": step,
    }


def save_and_load(root: str, options: dict[str, Any], executor: str, coordination: str) -> list[Any]:
    found: list[Any] = []
    for step in range(3):
        held = state(step)
        pending = cloudckpt.async_save(
            held, f"{root}/{step}", step=step, storage_options=options, executor=executor, coordination=coordination
        )
        with torch.no_grad():
            held["w"].to_local().fill_(-1)
        held["plain"].fill_(-1)
        found.append(pending.result(60))
    target = state(0)
    with torch.no_grad():
        target["w"].to_local().fill_(0)
    cloudckpt.load(target, f"{root}/2", storage_options=options)
    right = same_bits(target["w"].to_local(), state(2)["w"].to_local())
    assert right
    assert target["rank"].value == dist.get_rank()
    assert (target["step"], target["plain"].tolist()) == (2, [2.0] * 3)
    return found


@pytest.mark.parametrize(("executor", "coordination"), WAYS)
@pytest.mark.parametrize("server", ["local", "moto", "juicefs"])
def test_every_way_on_every_store(
    ranks: RankPool, tmp_path: Path, request: pytest.FixtureRequest, server: str, executor: str, coordination: str
):
    root, options = str(tmp_path), {}
    if server != "local":
        running = request.getfixturevalue(f"{server}_s3")
        bucket = running.make_bucket(f"async-{executor}-{coordination}")
        root, options = f"s3://{bucket}/run", running.storage_options
    commits = ranks.run(3, save_and_load, root, options, executor, coordination)
    assert commits[0] == commits[1] == commits[2]
    for step, commit in enumerate(commits[0]):
        assert commit.step == step
        with cloudckpt.open_checkpoint(commit.url, storage_options=options) as found:
            keys = {o.key for o in found.store.list("")}
            assert keys == {"manifest.json", *(o.key for o in found.manifest.objects)}


def fail_in_the_foreground(root: str, executor: str, coordination: str) -> tuple[str, CloudckptError | None]:
    held: dict[str, Any] = state(1)
    if dist.get_rank() == 1:
        held["lock"] = object()
    try:
        cloudckpt.async_save(held, f"{root}/1", executor=executor, coordination=coordination).result(60)
    except CloudckptError as error:
        found = error
    cloudckpt.async_save(state(2), f"{root}/2", executor=executor, coordination=coordination).result(60)
    return type(found).__name__, found


@pytest.mark.parametrize(("executor", "coordination"), WAYS)
def test_a_rank_that_cannot_save_is_named_by_the_others(
    ranks: RankPool, tmp_path: Path, executor: str, coordination: str
):
    found = ranks.run(3, fail_in_the_foreground, str(tmp_path), executor, coordination)
    assert isinstance(found[1][1], InvalidStateError)
    for rank in (0, 2):
        error = found[rank][1]
        assert isinstance(error, RankError)
        assert list(error.causes) == [1]
        assert "lock: a value of type" in error.causes[1]
    with pytest.raises(NotFoundError):
        cloudckpt.read(tmp_path / "1")
    assert cloudckpt.read(tmp_path / "2")["step"] == 2


def lose_the_helper(root: str) -> CloudckptError | None:
    cloudckpt.async_save(state(0), f"{root}/0", executor="process").result(60)
    helper = _async._LANES["process"].executor._helper._process
    if dist.get_rank() == 2:
        os.kill(helper.pid, signal.SIGSTOP)
    dist.barrier()
    pending = cloudckpt.async_save(state(1), f"{root}/1", executor="process")
    time.sleep(0.5)
    if dist.get_rank() == 2:
        os.kill(helper.pid, signal.SIGKILL)
    found = None
    try:
        pending.result(60)
    except CloudckptError as error:
        found = error
    cloudckpt.async_save(state(2), f"{root}/2", executor="process").result(60)
    return found


def test_a_rank_that_loses_its_helper(ranks: RankPool, tmp_path: Path):
    found = ranks.run(3, lose_the_helper, str(tmp_path))
    assert isinstance(found[2], HelperError)
    for rank in (0, 1):
        assert isinstance(found[rank], RankError)
        assert list(found[rank].causes) == [2]
        assert "signal 9" in found[rank].causes[2]
    with pytest.raises(NotFoundError):
        cloudckpt.read(tmp_path / "1")
    assert cloudckpt.read(tmp_path / "2")["step"] == 2


def lose_the_helper_of_a_run(root: str) -> float:
    """How long the others wait, where retries and a fallback come after the try in which a helper was lost."""
    with cloudckpt.Checkpointer(
        f"{root}/run", executor="process", retries=1, fallback_url=f"{root}/fallback", on_error="warn"
    ) as run:
        run.async_save(0, state(0)).result(60)
        helper = _async._LANES["process"].executor._helper._process
        if dist.get_rank() == 2:
            os.kill(helper.pid, signal.SIGSTOP)
        dist.barrier()
        pending = run.async_save(1, state(1))
        time.sleep(0.5)
        if dist.get_rank() == 2:
            os.kill(helper.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(CloudckptError):
            pending.result(90)
        seconds = time.monotonic() - start
        with warnings.catch_warnings(record=True):
            run.async_save(2, state(2)).result(60)
    return seconds


def test_a_lost_helper_is_told_in_all_tries(ranks: RankPool, tmp_path: Path):
    # Nothing is waited for: rank_timeout_s is 600.
    assert max(ranks.run(3, lose_the_helper_of_a_run, str(tmp_path))) < 60
    assert cloudckpt.Checkpointer(tmp_path / "run").steps() == [0, 2]


def stay_away(root: str, coordination: str) -> CloudckptError | None:
    config = cloudckpt.Config(rank_timeout_s=3)
    cloudckpt.async_save(state(0), f"{root}/0", config=config, coordination=coordination).result(60)
    found = None
    if dist.get_rank() != 1:
        try:
            cloudckpt.async_save(state(1), f"{root}/1", config=config, coordination=coordination).result(60)
        except CloudckptError as error:
            found = error
    dist.barrier()
    return found


@pytest.mark.parametrize("coordination", ["store", "collectives"])
def test_a_rank_that_never_comes(ranks: RankPool, tmp_path: Path, coordination: str):
    found = ranks.run(3, stay_away, str(tmp_path), coordination)
    for rank in (0, 2):
        assert isinstance(found[rank], RankError)
        assert list(found[rank].causes) == [1]
    with pytest.raises(NotFoundError):
        cloudckpt.read(tmp_path / "1")


def be_busy_on_one_rank(root: str) -> CloudckptError | None:
    config = cloudckpt.Config(when_busy="raise", max_pending_saves=1 if dist.get_rank() == 0 else 2)
    from tests.background.gate import gated_uploads

    with gated_uploads() as gate:
        first = cloudckpt.async_save(state(1), f"{root}/1", config=config)
        found = None
        try:
            second = cloudckpt.async_save(state(2), f"{root}/2", config=config)
        except BusyError as error:
            found = error
        gate.open()
        first.result(60)
        if found is None:
            try:
                second.result(60)
            except RankError as error:
                found = error
    return found


def test_a_busy_rank_is_named_by_the_others(ranks: RankPool, tmp_path: Path):
    found = ranks.run(2, be_busy_on_one_rank, str(tmp_path))
    assert isinstance(found[0], BusyError)
    assert isinstance(found[1], RankError)
    assert "max_pending_saves" in found[1].causes[0]
    assert cloudckpt.read(tmp_path / "1")["step"] == 1
    with pytest.raises(NotFoundError):
        cloudckpt.read(tmp_path / "2")


def save_alone(root: str) -> str:
    try:
        cloudckpt.async_save(state(1), f"{root}/1", coordination="none")
    except InvalidStateError as error:
        return str(error)
    return ""


def test_none_is_for_one_process(ranks: RankPool, tmp_path: Path):
    assert all("is for one process" in text for text in ranks.run(2, save_alone, str(tmp_path)))


def miss_a_save(root: str, is_refused: bool) -> list[str]:
    ends = []
    config = cloudckpt.Config(rank_timeout_s=2)
    for step in range(4):
        odd = dist.get_rank() == 1 and step == 1
        try:
            if not odd or is_refused:
                executor: Any = "bogus" if odd else "thread"
                held = {"w": torch.ones(3)}
                cloudckpt.async_save(held, f"{root}/{step}", step=step, executor=executor, config=config).result(60)
            ends.append("")
        except CloudckptError as error:
            ends.append(type(error).__name__)
        dist.barrier()  # the one that missed it is not to wait for the other in the next meanwhile
    return ends


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_rank_that_missed_a_save_is_in_the_next(ranks: RankPool, tmp_path: Path, is_refused: bool):
    ends = ranks.run(2, miss_a_save, str(tmp_path), is_refused)
    assert ends == [["", "RankError", "", ""], ["", "InvalidStateError" if is_refused else "", "", ""]]
