"""One rank fails while the others go on: all raise its text in seconds, nothing is committed, the next save works."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt.errors import CloudckptError, NotFoundError, RankError
from tests.ranks import RankPool
from tests.servers.faults import ALWAYS, Answer, Fault, FaultyS3, Request
from tests.sharding import error_of, make_mesh, shard

MIB = 1024 * 1024
MOST_SECONDS = 8.0
URL = "s3://bkt/run/step-00000001"


class SlowS3(FaultyS3):
    """Sending or giving data of a key that contains one of ``slow`` takes ``seconds``."""

    slow: tuple[str, ...] = ()
    seconds = 2.5

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def answer(self, request: Request) -> Answer:
        if request.method in ("GET", "PUT") and any(part in request.target for part in self.slow):
            self.released.wait(self.seconds)
        return super().answer(request)


@pytest.fixture
def server() -> Iterator[SlowS3]:
    running = SlowS3()
    running.start()
    yield running
    running.released.set()
    running.stop()


@pytest.fixture
def healthy() -> Iterator[FaultyS3]:
    running = FaultyS3()
    running.start()
    yield running
    running.stop()


def large_state() -> dict[str, Any]:
    """8 MiB on each of 4 ranks."""
    full = torch.arange(8 * MIB, dtype=torch.float32)
    return {"w": shard(full, make_mesh((4,)), [Shard(0)]), "step": 1}


def config(engine: str) -> cloudckpt.Config:
    return cloudckpt.Config(engine=engine, num_threads=2, chunk_bytes=MIB // 2, part_bytes=5 * MIB, read_bytes=MIB)


def save_twice(options: dict[str, Any], good: dict[str, Any], engine: str, layout: Any) -> tuple[Any, float]:
    state = large_state()
    dist.barrier()
    start = time.monotonic()
    error = error_of(lambda: cloudckpt.save(state, URL, storage_options=options, layout=layout, config=config(engine)))
    seconds = time.monotonic() - start
    cloudckpt.save(state, URL, storage_options=good, layout=layout, config=config(engine))
    return error, seconds


def check(outcomes: list[tuple[Any, float]], rank: int, *texts: str) -> None:
    for error, seconds in outcomes:
        assert isinstance(error, RankError)
        assert list(error.causes) == [rank]
        assert all(text in error.causes[rank] for text in texts)
        assert seconds < MOST_SECONDS


# "slow": the others' transfers would take far longer than they have; "stalled": they do not move at all.
CASES = [("auto", "slow"), ("auto", "stalled"), ("fsspec", "stalled")]


@pytest.mark.parametrize(("engine", "others"), CASES)
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_an_upload_fails_while_others_transfer(
    ranks: RankPool, server: SlowS3, healthy: FaultyS3, engine: str, layout: str, others: str
):
    server.slow = ("r00000", "r00001", "r00003") if layout == "packed" else ("/c/",)
    server.seconds = 2.5 if others == "slow" else 60.0
    # In the plain layout the chunks of rank 2 are 32 to 47.
    refused = "r00002" if layout == "packed" else "/c/32"
    server.faults = [Fault("status", "PUT", refused, ALWAYS, 403, "AccessDenied")]
    outcomes = ranks.run(4, save_twice, server.storage_options, healthy.storage_options, engine, layout)
    server.released.set()
    check(outcomes, 2, "AccessDenied")
    assert not any("manifest" in key for key in server.objects)
    assert cloudckpt.read(URL, "step", storage_options=healthy.storage_options) == {"step": 1}


def save_once(options: dict[str, Any]) -> None:
    cloudckpt.save(large_state(), URL, storage_options=options, config=config("auto"))


def load_twice(options: dict[str, Any], good: dict[str, Any], engine: str) -> tuple[Any, float]:
    target, expected = large_state(), large_state()["w"].to_local()
    target["w"].to_local().zero_()
    target["step"] = 0
    dist.barrier()
    start = time.monotonic()
    error = error_of(lambda: cloudckpt.load(target, URL, storage_options=options, config=config(engine)))
    seconds = time.monotonic() - start
    assert target["step"] == 0
    cloudckpt.load(target, URL, storage_options=good, config=config(engine))
    assert torch.equal(target["w"].to_local(), expected)
    return error, seconds


@pytest.mark.parametrize(("engine", "others"), CASES)
def test_a_read_fails_while_others_transfer(
    ranks: RankPool, server: SlowS3, healthy: FaultyS3, engine: str, others: str
):
    ranks.run(4, save_once, healthy.storage_options)
    server.objects, server.modified = dict(healthy.objects), dict(healthy.modified)
    server.slow = ("r0000",)
    server.seconds = 2.5 if others == "slow" else 60.0
    # The first read of rank 2 is as slow as everybody's, and still under way when the second fails.
    server.faults = [Fault("status", "GET", "r00002", ALWAYS, 403, "AccessDenied", after=1)]
    outcomes = ranks.run(4, load_twice, server.storage_options, healthy.storage_options, engine)
    server.released.set()
    check(outcomes, 2, "AccessDenied", "'w'")


class Unsaveable:
    """On one rank only."""


class FailingState:
    """An object whose state cannot be had, or cannot be taken, on rank 1."""

    def __init__(self, fails_in: str) -> None:
        self.fails_in = fails_in
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        if self.fails_in == "state_dict" and dist.get_rank() == 1:
            raise OSError("the device is gone")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails_in == "load_state_dict" and dist.get_rank() == 1:
            raise OSError("the device is gone")
        self.value = state["value"]


def fail_then_save(url: str, fault: str) -> tuple[CloudckptError | None, CloudckptError | None]:
    rank, config = dist.get_rank(), cloudckpt.Config(rank_timeout_s=30.0)
    state: dict[str, Any] = {"w": torch.ones(3), "x": {"y": 1}}
    arguments: dict[str, Any] = {}
    if rank == 1 and fault == "object":
        state["x"]["y"] = Unsaveable()
    elif rank == 1 and fault == "progress":

        def progress(done: int, total: int) -> None:
            raise KeyError("from the caller's own code")

        arguments["progress"] = progress
        state["big"] = torch.zeros(100)
    elif fault == "state_dict":
        state["x"]["z"] = FailingState("state_dict")
    elif rank == 1 and fault == "interrupt":
        state["x"]["z"] = Interrupting()
    first = error_of(lambda: cloudckpt.save(state, url, config=config, **arguments))
    second = error_of(lambda: cloudckpt.save({"w": torch.ones(3)}, url, config=config))
    return first, second


class Interrupting:
    def state_dict(self) -> dict[str, int]:
        raise KeyboardInterrupt

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("object", ("x.y", "Unsaveable")),
        ("progress", ("from the caller's own code",)),
        ("state_dict", ("the device is gone",)),
        ("interrupt", ("KeyboardInterrupt",)),
    ],
)
def test_a_fault_of_one_rank_and_the_next_save(ranks: RankPool, tmp_path: Path, fault: str, texts: tuple[str, ...]):
    start = time.monotonic()
    for first, second in ranks.run(3, fail_then_save, str(tmp_path / "c"), fault):
        assert isinstance(first, RankError)
        assert list(first.causes) == [1]
        assert all(text in first.causes[1] for text in texts)
        assert second is None
    assert time.monotonic() - start < 3 * MOST_SECONDS
    assert cloudckpt.read(tmp_path / "c")["w"].tolist() == [1.0] * 3
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2  # the second save's only


def load_into_failing(url: str) -> CloudckptError | None:
    target = {"x": FailingState("load_state_dict"), "w": torch.zeros(3)}
    return error_of(lambda: cloudckpt.load(target, url))


def test_a_rank_that_cannot_take_its_state(ranks: RankPool, tmp_path: Path):
    cloudckpt.save({"x": {"value": 7}, "w": torch.ones(3)}, tmp_path / "c")
    for error in ranks.run(3, load_into_failing, str(tmp_path / "c")):
        assert isinstance(error, RankError)
        assert "the device is gone" in error.causes[1]


def load_into_unusable(url: str) -> CloudckptError | None:
    target: Any = 5 if dist.get_rank() == 1 else {"w": torch.zeros(3)}
    return error_of(lambda: cloudckpt.load(target, url, config=cloudckpt.Config(rank_timeout_s=30.0)))


def test_a_rank_with_an_unusable_target(ranks: RankPool, tmp_path: Path):
    cloudckpt.save({"w": torch.ones(3)}, tmp_path / "c")
    start = time.monotonic()
    for error in ranks.run(2, load_into_unusable, str(tmp_path / "c")):
        assert "int" in str(error)
        assert "in place" in str(error)
    assert time.monotonic() - start < 25


def save_late(url: str, late: int) -> CloudckptError | None:
    """One rank does not come to the save at all."""
    if dist.get_rank() == late:
        time.sleep(6.0 if late == 0 else 0.0)  # torch's store lives in the process of rank 0
        return None
    config = cloudckpt.Config(rank_timeout_s=2.0)
    return error_of(lambda: cloudckpt.save({"w": torch.ones(3)}, url, config=config))


@pytest.mark.parametrize("late", [2, 0])
def test_a_rank_that_never_comes_is_named(ranks: RankPool, tmp_path: Path, late: int):
    for rank, error in enumerate(ranks.run(3, save_late, str(tmp_path / "c"), late)):
        if rank != late:
            assert isinstance(error, RankError)
            assert list(error.causes) == [late]
            assert f"rank {late}" in str(error)
    with pytest.raises(NotFoundError):
        cloudckpt.read(tmp_path / "c")


def save_slowly(url: str) -> int | None:
    """Rank 1 needs longer than the time limit, but lives."""

    def progress(done: int, total: int) -> None:
        if dist.get_rank() == 1:
            time.sleep(5.0)

    full = torch.arange(4.0)
    held = shard(full, make_mesh((2,)), [Shard(0)])
    return cloudckpt.save({"w": held}, url, step=3, progress=progress, config=cloudckpt.Config(rank_timeout_s=2.0)).step


def test_a_rank_that_takes_long_but_lives_is_waited_for(ranks: RankPool, tmp_path: Path):
    assert ranks.run(2, save_slowly, str(tmp_path / "c")) == [3, 3]
