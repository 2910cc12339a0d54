"""A background save of one process: what is copied when, and what becomes of its errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.background.pending import wait_for_all
from cloudckpt.errors import AlreadyCommittedError, BusyError, CloudckptError, InvalidStateError
from cloudckpt.verify import verify
from tests.background.gate import Gate, gated_uploads

EXECUTORS = ["thread", "process"]


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gated_uploads() as gate:
        yield gate


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    wait_for_all()


def state(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((300, 70), value),
        "t": torch.full((7, 5), value).t(),
        "h": torch.full((9,), value, dtype=torch.bfloat16),
        "n": np.full((4, 4), value),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(value),
        "nested": {"list": [1, {"x": value}], "text": f"{value}"},
    }


def overwrite(held: dict[str, Any], value: float) -> None:
    for key in ("w", "t", "h", "scalar", "n"):
        held[key][...] = value
    held["nested"]["list"][1]["x"] = value
    held["nested"]["list"].append("more")


def assert_is(url: str, value: float) -> None:
    found, wanted = cloudckpt.read(url), state(value)
    assert found.keys() == wanted.keys()
    for key in ("w", "t", "h", "empty", "scalar"):
        assert torch.equal(found[key], wanted[key])
        assert found[key].dtype == wanted[key].dtype
    assert np.array_equal(found["n"], wanted["n"])
    assert found["nested"] == wanted["nested"]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_values_are_those_of_the_call(tmp_path: Path, executor: str, layout: str):
    held = state(1.0)
    url = str(tmp_path / "step-00000001")
    pending = cloudckpt.async_save(held, url, step=1, executor=executor, layout=layout)
    overwrite(held, 2.0)
    pending.wait_staged()
    commit = pending.result(60)
    assert pending.done()
    assert pending.failure is None
    assert (commit.url, commit.step) == (url, 1)
    assert_is(url, 1.0)
    assert verify(url).ok


def test_the_call_returns_while_nothing_is_written(tmp_path: Path, gate: Gate):
    held = state(1.0)
    pending = cloudckpt.async_save(held, tmp_path / "a")
    assert gate.reached.acquire(timeout=30)
    overwrite(held, 2.0)
    assert not pending.done()
    with pytest.raises(TimeoutError, match="not done within"):
        pending.result(0.01)
    assert not (tmp_path / "a" / "manifest.json").exists()
    gate.open()
    pending.result(60)
    assert_is(str(tmp_path / "a"), 1.0)


def test_a_second_save_waits_for_the_first_one(tmp_path: Path, gate: Gate):
    held = state(1.0)
    first = cloudckpt.async_save(held, tmp_path / "1")
    assert gate.reached.acquire(timeout=30)
    held = state(2.0)
    started = threading.Event()
    second: list[cloudckpt.PendingSave] = []

    def save() -> None:
        started.set()
        second.append(cloudckpt.async_save(held, tmp_path / "2"))

    thread = threading.Thread(target=save)
    thread.start()
    assert started.wait(30)
    thread.join(0.3)
    assert thread.is_alive()
    gate.open()
    thread.join(60)
    first.result(60)
    second[0].result(60)
    assert_is(str(tmp_path / "1"), 1.0)
    assert_is(str(tmp_path / "2"), 2.0)


def test_a_second_save_is_refused_on_request(tmp_path: Path, gate: Gate):
    config = cloudckpt.Config(when_busy="raise")
    first = cloudckpt.async_save(state(1.0), tmp_path / "1", config=config)
    with pytest.raises(BusyError, match="max_pending_saves"):
        cloudckpt.async_save(state(2.0), tmp_path / "2", config=config)
    gate.open()
    first.result(60)
    cloudckpt.async_save(state(3.0), tmp_path / "3", config=config).result(60)
    assert_is(str(tmp_path / "3"), 3.0)


def test_several_at_a_time_have_buffers_of_their_own(tmp_path: Path, gate: Gate):
    config = cloudckpt.Config(max_pending_saves=3)
    held = state(0.0)
    pending = []
    for value in (1.0, 2.0, 3.0):
        overwrite(held, value)
        held["nested"] = {"list": [1, {"x": value}], "text": f"{value}"}
        pending.append(cloudckpt.async_save(held, tmp_path / f"{value}", config=config))
    assert not any(one.done() for one in pending)
    gate.open()
    for value, one in zip((1.0, 2.0, 3.0), pending, strict=True):
        one.result(60)
        assert_is(str(tmp_path / f"{value}"), value)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_errors_of_the_background_come_out_of_the_result(tmp_path: Path, executor: str, caplog):
    url = str(tmp_path / "a")
    cloudckpt.save(state(1.0), url)
    with caplog.at_level(logging.ERROR, logger="cloudckpt"):
        pending = cloudckpt.async_save(state(2.0), url, executor=executor)
        with pytest.raises(AlreadyCommittedError, match="already holds"):
            pending.result(60)
    assert isinstance(pending.failure, AlreadyCommittedError)
    assert "already holds" in caplog.text
    assert_is(url, 1.0)
    cloudckpt.async_save(state(3.0), url, executor=executor, overwrite=True).result(60)
    assert_is(url, 3.0)


def test_errors_of_the_state_are_raised_at_once(tmp_path: Path):
    with pytest.raises(InvalidStateError, match=r"a\.b: a value of type"):
        cloudckpt.async_save({"a": {"b": object()}}, tmp_path / "a")
    cloudckpt.async_save(state(1.0), tmp_path / "a", config=cloudckpt.Config(when_busy="raise")).result(60)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"executor": "fork"}, "executor must be one of"),
        ({"coordination": "mpi"}, "coordination must be one of"),
        ({"layout": "flat"}, "layout must be one of"),
        ({"executor": "process", "coordination": "collectives"}, "needs executor='thread'"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], text: str):
    with pytest.raises(InvalidStateError, match=text):
        cloudckpt.async_save(state(1.0), tmp_path / "a", **options)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_on_commit_and_progress(tmp_path: Path, executor: str, caplog):
    commits: list[cloudckpt.Commit] = []
    seen: list[tuple[int, int]] = []
    pending = cloudckpt.async_save(
        state(1.0),
        tmp_path / "a",
        executor=executor,
        on_commit=commits.append,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert commits == [pending.result(60)]
    assert seen[-1][0] == seen[-1][1] > 0
    assert pending.progress == seen[-1]

    def fail(_: cloudckpt.Commit) -> None:
        raise ValueError("no such dashboard")

    with caplog.at_level(logging.ERROR, logger="cloudckpt"):
        cloudckpt.async_save(state(2.0), tmp_path / "b", executor=executor, on_commit=fail).result(60)
    assert "no such dashboard" in caplog.text
    assert_is(str(tmp_path / "b"), 2.0)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_states_that_grow_while_saves_are_under_way(tmp_path: Path, executor: str):
    config = cloudckpt.Config(max_pending_saves=2)
    pending = []
    for number in range(12):
        held = {"w": torch.full((1 << (12 + number % 7), 3 + number), float(number))}
        pending.append(cloudckpt.async_save(held, tmp_path / f"{number}", config=config, executor=executor))
        held["w"].fill_(-1)
    for number, one in enumerate(pending):
        one.result(60)
        wanted = torch.full((1 << (12 + number % 7), 3 + number), float(number))
        assert torch.equal(cloudckpt.read(tmp_path / f"{number}")["w"], wanted)


def test_memory_that_is_not_allowed(tmp_path: Path):
    config = cloudckpt.Config(staging_bytes=1000)
    with pytest.raises(InvalidStateError, match="staging_bytes"):
        cloudckpt.async_save(state(1.0), tmp_path / "a", config=config)
    cloudckpt.async_save(state(1.0), tmp_path / "a").result(60)


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and self.count == other.count

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_registered_objects_are_copied_now_and_pickled_later(tmp_path: Path, executor: str):
    cloudckpt.register_staging(Counter, lambda counter: Counter(counter.count))
    counter = Counter(1)
    state = {"c": counter, "nested": [{"c": counter}], "w": torch.ones(3)}
    for step in range(2):
        pending = cloudckpt.async_save(state, tmp_path / f"{step}", allow_pickle=True, executor=executor)
        counter.count += 1
        pending.result(60)
        target = {"c": None, "nested": [{"c": None}], "w": torch.zeros(3)}
        cloudckpt.load(target, tmp_path / f"{step}", allow_pickle=True)
        assert target["c"] == Counter(step + 1)
        assert target["nested"][0]["c"] == Counter(step + 1)


def leave(*_: object) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_functions_of_the_user_that_fail_keep_no_save_from_its_end(tmp_path: Path, executor: str, caplog):
    pending = cloudckpt.async_save(state(1.0), tmp_path / "a", executor=executor, progress=leave, on_commit=leave)
    pending.result(60)
    assert_is(str(tmp_path / "a"), 1.0)
    assert "its progress cannot be shown" in caplog.text
    assert "is committed, but on_commit failed" in caplog.text


@pytest.mark.filterwarnings("error")
def test_a_warning_of_the_helper_that_is_an_error_here(tmp_path: Path, caplog):
    run = tmp_path / "run"
    for step in (1, 2):
        held = {"w": torch.ones(100)}
        pending = cloudckpt.async_save(
            held, run / f"step-0000000{step}", step=step, incremental=True, executor="process"
        )
        assert pending.result(60).step == step
    assert "all floating-point tensors of step 2 equal those of step 1" in caplog.text


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_no_thread_to_be_had(tmp_path: Path, executor: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(CloudckptError, match=r"no thread can be started .* can't start new thread"):
                cloudckpt.async_save(state(1.0), tmp_path / "a", executor=executor)
    cloudckpt.async_save(state(2.0), tmp_path / "a", executor=executor).result(60)
    assert_is(str(tmp_path / "a"), 2.0)


def test_a_mesh_is_no_group(tmp_path: Path):
    class Mesh:
        def get_group(self) -> None: ...

    with pytest.raises(InvalidStateError, match=r"must be a torch.distributed.ProcessGroup, .*mesh.get_group\(\)"):
        cloudckpt.async_save(state(1.0), tmp_path / "a", group=Mesh())  # type: ignore[arg-type]
