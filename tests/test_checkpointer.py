"""Runs of one process: saving in spite of failures, finding the latest, keeping and removing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt import Checkpointer, Config, KeepLast, _fallback, _tries, catalog
from cloudckpt.errors import (
    AlreadyCommittedError,
    InvalidStateError,
    NotFoundError,
    StoreError,
)
from cloudckpt.format.keys import PIN
from cloudckpt.store.local import LocalStore
from tests.field.places import Place
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3

FAST = Config(retry_deadline_s=0.3, request_timeout_s=5.0)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100,), float(value))}


def loaded(run: Checkpointer, step: int | None = None) -> tuple[int, float]:
    target = state(-1)
    return run.load(target, step), target["w"][0].item()


@pytest.fixture
def s3() -> Iterator[FaultyS3]:
    with faulty_s3() as server:
        yield server


def on(server: FaultyS3, **options) -> Checkpointer:
    return Checkpointer("s3://bkt/run", storage_options=server.storage_options, config=FAST, **options)


def test_save_find_load(place: Place):
    with Checkpointer(place.root, storage_options=place.options, config=place.config()) as run:
        assert run.latest() is None
        assert run.steps() == []
        with pytest.raises(NotFoundError, match="no step committed in"):
            run.load(state(0))
        for step in (9, 10, 100):
            commit = run.save(step, state(step), metadata={"n": step})
            assert commit is not None
            assert (commit.step, commit.url) == (step, f"{place.root}/step-{step:08d}")
        assert run.latest() == 100
        assert run.steps() == [9, 10, 100]
        assert loaded(run) == (100, 100.0)
        assert loaded(run, 10) == (10, 10.0)
        with pytest.raises(NotFoundError, match=r"step 11 is not committed in .*3 steps up to 100: 9, 10, 100"):
            run.load(state(0), 11)


def test_background_saves(tmp_path: Path):
    with Checkpointer(tmp_path, keep_last=2) as run:
        for step in range(5):
            pending = run.async_save(step, state(step))
            assert pending is not None
        assert pending.result().step == 4
        assert run.status().last_step == 4
    assert run.steps() == [3, 4]
    assert loaded(run) == (4, 4.0)


def test_retention_follows_every_commit(tmp_path: Path):
    with Checkpointer(tmp_path, keep_last=2, keep_every=10) as run:
        for step in range(0, 35, 5):
            run.save(step, state(step))
    assert run.steps() == [0, 10, 20, 25, 30]


def test_policies_of_the_users_own(tmp_path: Path):
    class Odd:
        def keep(self, steps):
            return [saved for saved in steps if saved.step % 2]

    with Checkpointer(tmp_path, policies=[Odd(), KeepLast(1)]) as run:
        for step in range(6):
            run.save(step, state(step))
    assert run.steps() == [1, 3, 5]


def test_a_policy_that_fails_is_told(tmp_path: Path):
    class Broken:
        def keep(self, steps):
            raise ZeroDivisionError("no such luck")

    run = Checkpointer(tmp_path, policies=[Broken()])
    run.save(1, state(1))
    with pytest.warns(UserWarning, match="ZeroDivisionError: no such luck"):
        run.close()
    assert run.steps() == [1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": 0}, "keep_every"),
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'warn', not 'ignore'"),
        ({"retries": -1}, "retries must be an int from 0"),
        ({"retries": True}, "retries"),
        ({"orphan_age_s": 0}, "orphan_age_s must be positive"),
        ({"policies": [3]}, r"keep\(steps\)"),
        ({"fallback_url": "run/"}, "fallback_url is the run itself"),
        ({"save_on_signal": ["SIGNOT"]}, "save_on_signal"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(InvalidStateError, match=text):
        Checkpointer("run", **settings)


def test_a_rollback_is_the_latest_from_its_first_save_on(tmp_path: Path):
    with Checkpointer(tmp_path, keep_last=2) as run:
        for step in (9, 10, 100):
            run.save(step, state(step))
    with Checkpointer(tmp_path, keep_last=2) as run:
        assert loaded(run, 10) == (10, 10.0)
        run.save(20, state(20))
        assert run.latest() == 20
        run.save(30, state(30))
    assert run.steps() == [20, 30]
    assert run.latest() == 30


def test_after_a_rollback_and_a_restart_the_base_is_what_was_saved_last(tmp_path: Path, monkeypatch):
    big = torch.arange(100_000.0)
    with Checkpointer(tmp_path, incremental=True) as run:
        for step in (9, 100, 20):
            run.save(step, {"big": big + step, "small": torch.full((3,), float(step))})
    monkeypatch.setattr("cloudckpt.pytorch.group._KEPT_ALONE", {})  # as in a new process
    with Checkpointer(tmp_path, incremental=True) as run:
        assert run.latest() == 20
        commit = run.save(21, {"big": big + 20, "small": torch.full((3,), 21.0)})
    assert commit.nbytes_new < 100


def test_going_back_to_a_number_that_is_taken(tmp_path: Path):
    with Checkpointer(tmp_path) as run:
        for step in (10, 20):
            run.save(step, state(step))
        run.load(state(0), 10)
        with pytest.raises(AlreadyCommittedError, match=r"step-00000020 already holds"):
            run.save(20, state(21))
        assert loaded(run) == (20, 20.0)
        run.save(20, state(21), overwrite=True)
        assert loaded(run) == (20, 21.0)
        store = LocalStore(tmp_path)
        assert [(s.branch, s.step) for s in catalog.find_steps(store).committed] == [(1, 20), (0, 10)]


def test_saves_that_overlap_are_of_one_branch(tmp_path: Path):
    config = Config(max_pending_saves=4)
    with Checkpointer(tmp_path, config=config) as run:
        run.save(100, state(0))
        for step in (20, 30, 40):
            run.async_save(step, state(step))
    assert run.latest() == 40


@pytest.mark.parametrize("order", [(40, 30, 20), (30, 40, 20), (40, 20, 30)])
def test_saves_that_overtake_one_another_are_of_one_branch(tmp_path: Path, monkeypatch, order: tuple[int, ...]):
    turns = {step: threading.Event() for step in order}
    turns[order[0]].set()
    real = _tries.run_save

    def run_save(*args, **options):
        step = int(args[2][-8:])
        if step == 100:
            return real(*args, **options)
        assert turns[step].wait(60)
        try:
            return real(*args, **options)
        finally:
            following = order[order.index(step) + 1 :]
            if following:
                turns[following[0]].set()

    monkeypatch.setattr(_tries, "run_save", run_save)
    with Checkpointer(tmp_path, config=Config(max_pending_saves=4)) as run:
        run.save(100, state(0))
        for step in (20, 30, 40):
            run.async_save(step, state(step))
    assert run.latest() == 40
    found = [catalog.read_step(LocalStore(tmp_path), f"step-{step:08d}") for step in (20, 30, 40)]
    assert [saved.branch for saved in found if saved] == [1, 1, 1]


def test_pins(tmp_path: Path):
    with Checkpointer(tmp_path, keep_last=1) as run:
        run.save(1, state(1))
        run.keep(1)
        run.save(2, state(2))
        run.save(3, state(3))
    assert (tmp_path / "step-00000001" / PIN).exists()
    assert run.steps() == [1, 3]
    with Checkpointer(tmp_path, keep_last=1) as run:
        with pytest.raises(NotFoundError, match="step 2 is not committed"):
            run.keep(2)
        run.release(1)
        run.release(3)
        assert run.prune() == [1]
        assert run.prune() == []


def test_a_copy_under_another_number_is_pinned_and_released_with_its_step(tmp_path: Path):
    with Checkpointer(tmp_path) as run:
        run.save(7, state(7))
        cloudckpt.copy(tmp_path / "step-00000007", tmp_path / "step-00000005")
        run.keep(7)
        assert sorted(path.parent.name for path in tmp_path.rglob(PIN)) == ["step-00000005", "step-00000007"]
        run.release(7)
        assert not list(tmp_path.rglob(PIN))


def test_a_step_may_be_pinned_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    real = LocalStore.put_if_absent

    def slow(self, key, data):
        gate.wait()
        return real(self, key, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", slow)
    with Checkpointer(tmp_path, keep_last=1) as run:
        run.async_save(1, state(1))
        run.keep(1)
        assert run.prune() == []
        gate.set()
        run.async_save(2, state(2))
    assert run.steps() == [1, 2]


def test_status_of_what_is_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    real = LocalStore.put_if_absent

    def slow(self, key, data):
        gate.wait()
        return real(self, key, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", slow)
    with Checkpointer(tmp_path) as run:
        assert run.status() == cloudckpt.RunStatus()
        pending = run.async_save(1, state(1))
        while pending.progress != (400, 400):
            assert not pending.wait(0.01)
        (flight,) = run.status().in_flight
        assert (flight.step, flight.done_bytes, flight.nbytes) == (1, 400, 400)
        assert flight.elapsed_s > 0
        gate.set()
        pending.result()
        assert run.status() == cloudckpt.RunStatus(1, str(tmp_path / "step-00000001"))


def test_progress_is_passed_on(tmp_path: Path):
    seen = []
    with Checkpointer(tmp_path) as run:
        run.save(1, state(1), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (400, 400)


def test_failures_are_raised(s3: FaultyS3):
    with on(s3) as run:
        s3.faults.append(Fault("status", "PUT", "step-00000001", times=ALWAYS, status=403, code="AccessDenied"))
        with pytest.raises(StoreError, match="AccessDenied"):
            run.save(1, state(1))
        status = run.status()
        assert (status.num_failed, status.last_error_step, status.last_step) == (1, 1, None)
        assert "AccessDenied" in status.last_error
        run.save(2, state(2))
        status = run.status()
        assert (status.num_failed, status.last_error_step, status.last_step) == (0, 1, 2)


def test_failures_are_state_not_death(s3: FaultyS3, caplog: pytest.LogCaptureFixture):
    with on(s3, on_error="warn") as run:
        s3.faults.append(Fault("status", "PUT", "step-0000000", times=ALWAYS, status=403, code="AccessDenied"))
        with pytest.warns(UserWarning, match=r"step 1 was not saved to s3://bkt/run: StoreError: .*AccessDenied"):
            assert run.save(1, state(1)) is None
        pending = run.async_save(2, state(2))
        with pytest.raises(StoreError, match="AccessDenied"):
            pending.result()
        with pytest.warns(UserWarning, match="step 2 was not saved"):
            run.async_save(3, state(3))
        with pytest.warns(UserWarning, match=r"step 3 was not saved.*AccessDenied"):
            run.save(11, state(11))
        assert run.status().num_failed == 0
        assert run.status().last_error_step == 3
    assert run.steps() == [11]
    assert sum("was not saved" in r.message for r in caplog.records if r.levelno == logging.WARNING) == 3


def test_a_background_failure_is_raised_by_the_next_save(s3: FaultyS3):
    run = on(s3)
    s3.faults.append(Fault("status", "PUT", "step-00000001", times=ALWAYS, status=403, code="AccessDenied"))
    run.async_save(1, state(1))
    with pytest.raises(StoreError, match="AccessDenied"):
        run.async_save(2, state(2))
    run.async_save(2, state(2)).result()
    assert run.steps() == [2]
    pending = run.async_save(1, state(1))
    with pytest.raises(StoreError, match="AccessDenied"):
        pending.result()
    run.close()  # it was seen


def test_a_background_failure_is_raised_by_close(s3: FaultyS3):
    run = on(s3)
    s3.faults.append(Fault("status", "PUT", "step-00000001", times=ALWAYS, status=403, code="AccessDenied"))
    run.async_save(1, state(1))
    with pytest.raises(StoreError, match="AccessDenied"):
        run.close()


@pytest.mark.parametrize("in_background", [False, True])
def test_retries(s3: FaultyS3, in_background: bool):
    """The store's own retries end with their deadline; then comes another try, with an attempt of its own."""
    s3.faults.append(Fault("status", "PUT", "manifest.json", times=ALWAYS, status=503, code="SlowDown"))
    timer = threading.Timer(1.0, s3.faults.clear)
    timer.start()
    with on(s3, retries=30) as run:
        commit = run.async_save(1, state(1)).result() if in_background else run.save(1, state(1))
        assert commit.step == 1
        assert run.status().last_step == 1
        assert run.status().num_failed == 0
    timer.join()
    assert loaded(run) == (1, 1.0)


def test_what_no_retry_mends_is_not_tried_again(s3: FaultyS3):
    with on(s3, retries=5) as run:
        run.save(1, state(1))
        run._upkeep.wait()
        before = len(s3.requests)
        with pytest.raises(AlreadyCommittedError):
            run.save(1, state(1))
        with pytest.raises(InvalidStateError):
            run.save(2, {"w": object()})
        assert len(s3.requests) - before < 5
        s3.faults.append(Fault("status", "PUT", "step-00000003", times=ALWAYS, status=403, code="AccessDenied"))
        with pytest.raises(StoreError):
            run.save(3, state(3))
        assert s3.count("PUT", "step-00000003") == 1


def test_a_try_whose_commit_was_never_answered_counts(s3: FaultyS3):
    s3.faults.append(Fault("lost_reply", "PUT", "manifest.json"))
    s3.faults.append(Fault("status", "", "manifest.json", times=12, status=503, code="SlowDown"))
    with on(s3, retries=20) as run:
        commit = run.save(1, state(1))
        assert commit.step == 1
        assert commit.num_chunks == 1
        assert loaded(run) == (1, 1.0)
    (attempt,) = {key.split("/")[2] for key in s3.objects if ".zip" in key}
    assert attempt


@pytest.fixture
def down(s3: FaultyS3) -> Fault:
    """The store is out of reach until this is taken out of its list of faults."""
    fault = Fault("reset", times=ALWAYS)
    s3.faults.append(fault)
    return fault


@pytest.mark.parametrize("in_background", [False, True])
def test_a_fallback_takes_what_the_store_does_not(s3: FaultyS3, down: Fault, tmp_path: Path, in_background: bool):
    with on(s3, fallback_url=tmp_path / "local") as run:
        for step in (1, 2):
            commit = run.async_save(step, state(step)).result() if in_background else run.save(step, state(step))
            assert commit.url == f"{tmp_path}/local/step-{step:08d}"
        assert run.status().last_url == commit.url
        s3.faults.clear()
        commit = run.async_save(3, state(3)).result() if in_background else run.save(3, state(3))
        assert commit.url == "s3://bkt/run/step-00000003"
        assert run.steps() == [1, 2, 3]
        assert run.latest() == 3
        for step in (1, 2, 3):
            assert loaded(run, step) == (step, float(step))
    assert not any(path.is_file() for path in (tmp_path / "local").rglob("*"))


def test_a_load_brings_back_what_waits(s3: FaultyS3, down: Fault, tmp_path: Path):
    with on(s3, fallback_url=tmp_path / "local") as run:
        run.save(7, state(7))
    s3.faults.clear()
    with on(s3, fallback_url=tmp_path / "local") as run:
        assert loaded(run) == (7, 7.0)


def test_what_waits_is_not_taken_for_new(s3: FaultyS3, tmp_path: Path):
    """Saved in the fallback, then abandoned by going back: once uploaded it is older than what came after."""
    with on(s3, fallback_url=tmp_path / "local") as run:
        run.save(10, state(10))
        run._upkeep.wait()  # it would warn of the fault
        s3.faults.append(Fault("reset", times=ALWAYS))
        run.save(100, state(100))
        s3.faults.clear()
        # The next save finds the store back: 20 comes after 100 all the same.
        run.save(20, state(20))
        assert run.steps() == [10, 20, 100]
        assert run.latest() == 20


def test_a_fallback_does_not_fill_up(s3: FaultyS3, down: Fault, tmp_path: Path):
    with on(s3, fallback_url=tmp_path / "local", keep_last=2) as run:
        for step in range(5):
            run.save(step, state(step))
    found = sorted(p.parent.name for p in (tmp_path / "local").rglob("manifest.json"))
    assert found == ["step-00000003", "step-00000004"]
    assert len(list((tmp_path / "local").rglob("*.zip"))) == 2


def test_a_damaged_step_in_the_fallback_stays_there(
    s3: FaultyS3, down: Fault, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with on(s3, fallback_url=tmp_path / "local") as run:
        run.save(1, state(1))
        run.save(2, state(2))
        pack = next((tmp_path / "local/step-00000001").rglob("*.zip"))
        pack.unlink()
        s3.faults.clear()
        run.save(3, state(3))
        assert run.steps() == [2, 3]
    assert "cannot be brought to" in caplog.text
    assert (tmp_path / "local/step-00000001/manifest.json").exists()


def test_two_steps_of_one_number_are_not_mixed(
    s3: FaultyS3, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with on(s3, fallback_url=tmp_path / "local") as run:
        s3.faults.append(Fault("reset", times=ALWAYS))
        run.save(1, state(1))
        s3.faults.clear()
        monkeypatch.setattr(_fallback, "_waiting", lambda *_: [])
        run.save(1, state(100))
        monkeypatch.undo()
        assert loaded(run) == (1, 100.0)
    assert "has another checkpoint of that step" in caplog.text
    assert (tmp_path / "local/step-00000001/manifest.json").exists()


def test_where_both_fail_the_first_failure_is_raised(s3: FaultyS3, down: Fault, tmp_path: Path):
    (tmp_path / "local").write_text("no folder")
    with on(s3, fallback_url=tmp_path / "local") as run, pytest.raises(StoreError) as caught:
        run.save(1, state(1))
    assert "bkt" in str(caught.value)
    assert any("the fallback failed, too" in note for note in caught.value.__notes__)


def test_retention_that_fails_is_told_and_tried_again(s3: FaultyS3):
    with on(s3, keep_last=1) as run:
        s3.faults.append(Fault("status", "DELETE", "manifest.json", times=ALWAYS, status=403, code="AccessDenied"))
        run.save(1, state(1))
        run.save(2, state(2))
        run._upkeep.wait()
        with pytest.warns(UserWarning, match=r"step-00000001/manifest\.json could not be deleted.*AccessDenied"):
            run.save(3, state(3))
        run._upkeep.wait()
        s3.faults.clear()
        with pytest.warns(UserWarning, match="could not be deleted"):
            run.save(4, state(4))
    assert run.steps() == [4]


def test_orphans_go_at_the_first_sweep(tmp_path: Path):
    left = tmp_path / "step-00000001/0123456789ab/r00000-000.zarr.zip"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"12")
    time.sleep(0.1)
    with Checkpointer(tmp_path, orphan_age_s=0.05) as run:
        run.save(2, state(2))
    assert not left.exists()


def test_a_signal_makes_a_save_due(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(tmp_path, save_on_signal=True) as run:
        assert not run.save_due(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not run.preempted
        assert run.save_due(2)
        assert run.preempted
        assert not run.save_due(3)
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_are_the_main_threads(tmp_path: Path):
    caught: list[BaseException] = []

    def make() -> None:
        try:
            Checkpointer(tmp_path, save_on_signal=[signal.SIGUSR1, signal.SIGTERM])
        except InvalidStateError as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def script(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_process_that_ends_finishes_saves_and_retention(tmp_path: Path):
    ended = script(
        """
        import sys, torch, cloudckpt
        run = cloudckpt.Checkpointer(sys.argv[1], keep_last=1)
        run.save(1, {"w": torch.zeros(1000)})
        run.async_save(2, {"w": torch.ones(1000)})
        """,
        tmp_path,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert Checkpointer(tmp_path).steps() == [2]


@pytest.mark.parametrize(("on_error", "status"), [("raise", 1), ("warn", 0)])
def test_how_a_process_ends_whose_last_save_failed(tmp_path: Path, on_error: str, status: int):
    (tmp_path / "run").write_text("no folder")
    ended = script(
        """
        import sys, torch, cloudckpt
        run = cloudckpt.Checkpointer(sys.argv[1], on_error=sys.argv[2])
        run.async_save(2, {"w": torch.ones(1000)})
        """,
        tmp_path / "run",
        on_error,
    )
    assert ended.returncode == status
    assert "step-00000002" in ended.stderr or "step 2" in ended.stderr


def test_two_runs_of_one_process_hear_of_a_signal(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    one, two = (Checkpointer(tmp_path / name, save_on_signal=True) for name in ("one", "two"))
    signal.raise_signal(signal.SIGTERM)
    assert (one.save_due(1), two.save_due(1)) == (True, True)
    one.close()
    signal.raise_signal(signal.SIGTERM)
    assert two.save_due(2)
    two.close()
    assert signal.getsignal(signal.SIGTERM) == before
