"""Runs of several ranks, in real processes."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from cloudckpt import Checkpointer, Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, InvalidStateError, NotFoundError, RankError
from tests.ranks import RankPool
from tests.servers.process import S3Server
from tests.sharding import make_mesh, shard

NUM_RANKS = 3
CONFIG = Config(rank_timeout_s=20.0, retry_deadline_s=2.0)


def state(value: float) -> dict[str, Any]:
    whole = torch.arange(60.0).reshape(12, 5) + value
    return {"w": shard(whole, make_mesh((dist.get_world_size(),)), [Shard(0)]), "value": value}


def check(run: Checkpointer, step: int | None, value: float) -> int:
    target = state(-1.0)
    found = run.load(target, step)
    assert target["value"] == value
    assert torch.equal(target["w"].full_tensor(), torch.arange(60.0).reshape(12, 5) + value)
    return found


def save_and_load(root: str, options: dict[str, Any], settings: dict[str, Any]) -> tuple[list[int], int]:
    with Checkpointer(root, storage_options=options, keep_last=2, config=CONFIG, **settings) as run:
        with pytest.raises(NotFoundError, match="no step committed"):
            run.load(state(0))
        run.save(1, state(1))
        run.keep(1)
        for step in (2, 3, 4):
            run.async_save(step, state(step)).result()
        assert check(run, None, 4.0) == 4
        assert check(run, 1, 1.0) == 1
        with pytest.raises(InvalidStateError, match="not on all ranks"):
            run.load(state(0), dist.get_rank())
    dist.barrier()
    with Checkpointer(root, storage_options=options, keep_last=2, config=CONFIG, **settings) as run:
        before = run.prune()
        run.release(1)
        after = run.prune()
        dist.barrier()
        assert run.latest() == 4
        return [*before, *after], len(run.steps())


SETTINGS = [
    {},
    {"coordination": "collectives"},
    {"executor": "process"},
    {"incremental": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_save_and_load(ranks: RankPool, tmp_path: Path, settings: dict[str, Any]):
    assert ranks.run(NUM_RANKS, save_and_load, str(tmp_path), {}, settings) == [([1], 2)] * NUM_RANKS


def test_save_and_load_on_s3(ranks: RankPool, juicefs_s3: S3Server):
    bucket = juicefs_s3.make_bucket("runs-of-ranks")
    found = ranks.run(NUM_RANKS, save_and_load, f"s3://{bucket}/run", juicefs_s3.storage_options, {})
    assert found == [([1], 2)] * NUM_RANKS


def train_until_told(root: str, told: dict[int, int], last: int) -> tuple[int | None, list[int]]:
    """``told``: at which step a rank gets the signal. Returns the step of the save."""
    rank, saved = dist.get_rank(), []
    with Checkpointer(root, save_on_signal=True, config=CONFIG) as run:
        for step in range(last):
            dist.all_reduce(torch.zeros(1))
            if told.get(rank) == step:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.save_due(step):
                run.save(step, state(step))
                saved.append(step)
            if run.preempted:
                return step, saved
    return None, saved


@pytest.mark.parametrize(("told", "due"), [({2: 5}, 7), ({0: 5}, 7), ({0: 5, 1: 5, 2: 6}, 7), ({}, None)])
def test_all_ranks_save_at_one_step_after_a_signal(
    ranks: RankPool, tmp_path: Path, told: dict[int, int], due: int | None
):
    found = ranks.run(NUM_RANKS, train_until_told, str(tmp_path), told, 20)
    assert found == [(due, [] if due is None else [due])] * NUM_RANKS
    assert Checkpointer(tmp_path).latest() == due


def save_twice_after_signals(root: str) -> list[int]:
    saved = []
    with Checkpointer(root, save_on_signal=[signal.SIGUSR1], config=CONFIG) as run:
        for step in range(20):
            dist.barrier()
            if dist.get_rank() == 1 and step in (3, 10):
                os.kill(os.getpid(), signal.SIGUSR1)
            if run.save_due(step):
                run.save(step, state(step))
                saved.append(step)
    return saved


def test_every_signal_counts(ranks: RankPool, tmp_path: Path):
    assert ranks.run(NUM_RANKS, save_twice_after_signals, str(tmp_path)) == [[5, 12]] * NUM_RANKS


def fail_on_one_rank(root: str, on_error: str) -> list[str | None]:
    """What the saves of a run do, of which the second cannot be saved by rank 1."""
    outcomes: list[str | None] = []
    with Checkpointer(root, on_error=on_error, retries=1, config=CONFIG) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (1, 2, 3):
            held = state(step)
            if step == 2 and dist.get_rank() == 1:
                held["odd"] = object()
            try:
                commit = run.save(step, held)
                outcomes.append(None if commit is None else commit.url)
            except RankError as error:
                outcomes.append(error.causes[1].partition(":")[0])
        status = run.status()
        assert (status.last_step, status.num_failed, status.last_error_step) == (3, 0, 2)
        assert run.steps() == [1, 3]
    return outcomes


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_rank_that_cannot_save_fails_all_and_the_next_save_works(ranks: RankPool, tmp_path: Path, on_error: str):
    second = "InvalidStateError" if on_error == "raise" else None
    urls = [f"{tmp_path}/step-00000001", second, f"{tmp_path}/step-00000003"]
    assert ranks.run(NUM_RANKS, fail_on_one_rank, str(tmp_path), on_error) == [urls] * NUM_RANKS


def save_while_the_store_is_away(root: str, home: str, in_background: bool, settings: dict[str, Any]) -> list[bool]:
    """The run's root is a file for a while, so that nothing can be saved below it."""
    rank = dist.get_rank()
    if home:
        os.environ["HOME"] = f"{home}/node-{rank}"  # every rank has a disk of its own
    blocked, in_fallback = Path(root), []
    settings = {"fallback_url": "~/waiting", **settings}
    with Checkpointer(root, config=Config(rank_timeout_s=5.0), **settings) as run:
        for step in (1, 2, 3, 4):
            dist.barrier()
            if rank == 0 and step == 2:
                blocked.rename(f"{root}.away")
                blocked.write_text("no folder")
            if rank == 0 and step == 4:
                blocked.unlink()
                Path(f"{root}.away").rename(blocked)
            dist.barrier()
            commit = run.async_save(step, state(step)).result() if in_background else run.save(step, state(step))
            in_fallback.append(commit.in_fallback)
        dist.barrier()
        for step in (1, 2, 3, 4):
            assert check(run, step, float(step)) == step
    return in_fallback


@pytest.mark.parametrize("in_background", [False, True])
def test_a_fallback_on_the_disks_of_the_nodes(ranks: RankPool, tmp_path: Path, in_background: bool):
    root, home = tmp_path / "run", tmp_path / "homes"
    found = ranks.run(NUM_RANKS, save_while_the_store_is_away, str(root), str(home), in_background, {})
    assert found == [[False, True, True, False]] * NUM_RANKS
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_a_shared_fallback_of_a_helper_process(ranks: RankPool, tmp_path: Path):
    root, settings = tmp_path / "run", {"fallback_url": str(tmp_path / "shared"), "executor": "process"}
    found = ranks.run(NUM_RANKS, save_while_the_store_is_away, str(root), "", True, settings)
    assert found == [[False, True, True, False]] * NUM_RANKS


def save_beside_another_job(root: str) -> tuple[str, list[int]]:
    """Two jobs of two ranks each, of which both save step 1, and each another one."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = dist.get_rank() // 2
    held = {"w": torch.full((50,), float(job))}
    with Checkpointer(root, group=groups[job], config=CONFIG) as run:
        try:
            outcome = run.save(1, held).commit_id
        except AlreadyCommittedError as error:
            outcome = type(error).__name__
        run.save(10 + job, held)
        dist.barrier()
        target = {"w": torch.zeros(50)}
        run.load(target, 10 + job)
        assert torch.equal(target["w"], held["w"])
        dist.barrier()
        return outcome, run.steps()


def test_two_jobs_that_write_one_run(ranks: RankPool, tmp_path: Path):
    found = ranks.run(4, save_beside_another_job, str(tmp_path))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert [outcome == "AlreadyCommittedError" for outcome, _ in found].count(True) == 2
    assert all(steps == [1, 10, 11] for _, steps in found)


def close_with_an_unseen_failure(root: str) -> str:
    run = Checkpointer(root, config=Config(rank_timeout_s=3.0))
    run.async_save(1, state(1))
    try:
        run.close()
    except CloudckptError as error:
        return type(error).__name__
    return "nothing"


def test_an_unseen_failure_comes_out_on_all_ranks(ranks: RankPool, tmp_path: Path):
    (tmp_path / "run").write_text("no folder")
    found = ranks.run(NUM_RANKS, close_with_an_unseen_failure, str(tmp_path / "run"))
    assert "nothing" not in found


def fail_on_one_rank_and_go_on(root: str, settings: dict[str, Any]) -> list[str]:
    """The rank whose state is bad knows at once, the other one later."""
    ends = []
    run = Checkpointer(root, config=Config(rank_timeout_s=20, **settings))
    for step in range(1, 7):
        bad = {"x": object()} if (dist.get_rank(), step) == (0, 2) else {}
        try:
            run.async_save(step, state(step) | bad)
            ends.append("")
        except CloudckptError as error:
            ends.append(type(error).__name__)
    run.close()
    return ends


@pytest.mark.parametrize("settings", [{}, {"max_pending_saves": 2}])
def test_a_failure_of_one_rank_costs_one_step(ranks: RankPool, tmp_path: Path, settings: dict[str, Any]):
    ends = ranks.run(2, fail_on_one_rank_and_go_on, str(tmp_path), settings)
    assert ends[0] == ["", "InvalidStateError", "", "", "", ""]
    assert sorted(ends[1]) == ["", "", "", "", "", "RankError"]
    assert Checkpointer(tmp_path).steps() == [1, 3, 4, 5, 6]
