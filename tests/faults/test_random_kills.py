"""Jobs that are killed at any moment while they save: no step is ever half there, and none that was committed lost."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cloudckpt import catalog
from cloudckpt.format.keys import step_dir
from tests.faults.toil import (
    KEEP_LAST,
    NUM_STEPS,
    Ledger,
    Toil,
    await_one_more,
    await_start,
    copy_of,
    value_at,
    wait_until,
    work,
)
from tests.recipes.kills import Zygote
from tests.servers.process import S3Server

SAVES = ["save", "zarr", "thread", "incremental"]

KILLS_PER_RUN = 15
"""What dead jobs leave behind stays in the run; so many of them work on the same one."""


def killer(toil: Toil, seconds: float, victims: Sequence[int] | None) -> Callable[[Sequence[int]], None]:
    def kill(pids: Sequence[int]) -> None:
        await_start(toil, len(pids))
        time.sleep(seconds)
        for rank, pid in enumerate(pids):
            if victims is None or rank in victims:
                os.kill(pid, signal.SIGKILL)

    return kill


def kill_again_and_again(
    zygote: Zygote,
    tmp_path: Path,
    count: int,
    ways: list[str],
    *,
    server: S3Server | None = None,
    size: int = 1,
    longest_s: float = 0.3,
) -> list[str]:
    """Kill jobs of ``size`` ranks, all of a job or some; returns what each was at."""
    dice = random.Random(count)
    done: list[str] = []
    for number in range(count):
        if number % KILLS_PER_RUN == 0:
            run, options = str(tmp_path / f"run-{number}"), None
            if server is not None:
                bucket = server.make_bucket(f"random-kills-{secrets.token_hex(4)}")
                run, options = f"s3://{bucket}/run", server.storage_options
            ledgers = {
                run: Ledger(ways, keep_last=KEEP_LAST if ways == ["run"] else None),
                copy_of(run): Ledger(["copy"]),
            }
        toil = Toil(run, options, str(tmp_path / f"log-{number}"), dice.randrange(10**6), 1000 * number, ways)
        victims = None if dice.random() < 0.5 else [dice.randrange(size)]
        ended = zygote.run([(work, toil)] * size, killer(toil, dice.uniform(0, longest_s), victims))
        killed = [rank for rank, end in enumerate(ended) if end.signal == signal.SIGKILL]
        assert killed == [*range(size)] if victims is None else killed == victims, ended
        for end in ended:
            assert end.signal or (end.raised or "").startswith("RankError"), end
        before = len(ledgers[run].cut_off)
        for place, ledger in ledgers.items():
            ledger.take(toil.logs(size))
            for step in range(NUM_STEPS):
                ledger.settle(step, value_at(f"{place}/{step_dir(step)}", options))
        done += ledgers[run].cut_off[before:] or ["nothing"]
    return done


@pytest.fixture(autouse=True)
def no_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "WEAK_SETTLE_S", 0.001)


def counts(short: int, long: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("count", [short, pytest.param(long, marks=pytest.mark.long)])


@counts(16, 120)
@pytest.mark.timeout(900)
def test_saves(zygote: Zygote, tmp_path: Path, count: int):
    done = kill_again_and_again(zygote, tmp_path, count, SAVES)
    assert count < 100 or set(SAVES) <= set(done)


@counts(8, 60)
@pytest.mark.timeout(900)
def test_retention(zygote: Zygote, tmp_path: Path, count: int):
    kill_again_and_again(zygote, tmp_path, count, ["run"])


@counts(6, 40)
@pytest.mark.timeout(900)
def test_copies(zygote: Zygote, tmp_path: Path, count: int):
    kill_again_and_again(zygote, tmp_path, count, ["copy"])


@counts(3, 30)
@pytest.mark.timeout(900)
def test_ranks(zygote: Zygote, tmp_path: Path, count: int):
    kill_again_and_again(zygote, tmp_path, count, SAVES, size=2, longest_s=0.5)


@counts(6, 50)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "ways", [["save", "zarr", "thread", "incremental", "copy"], ["run"]], ids=["saves", "retention"]
)
def test_on_a_server(zygote: Zygote, juicefs_s3: S3Server, tmp_path: Path, ways: list[str], count: int):
    kill_again_and_again(zygote, tmp_path, count, ways, server=juicefs_s3, longest_s=0.5)


def helpers_of(pid: int) -> list[int]:
    """The children of a process."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in found for child in children]


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@counts(1, 20)
@pytest.mark.timeout(900)
def test_helpers(zygote: Zygote, tmp_path: Path, count: int):
    """Helpers are killed at any moment, in the end the process that they help, which its last helper may outlive."""
    dice = random.Random(count)
    toil = Toil(str(tmp_path / "run"), None, str(tmp_path / "log"), count, 0, ["process"])

    def kill(pids: Sequence[int]) -> None:
        await_start(toil, 1)
        for number in range(count + 1):
            await_one_more(toil, "end")
            time.sleep(dice.uniform(0, 0.1))
            (helper,) = helpers_of(pids[0])
            os.kill(helper if number < count else pids[0], signal.SIGKILL)
        wait_until(lambda: not is_alive(helper), "the end of what a helper has begun")

    (ended,) = zygote.run([(work, toil)], kill)
    assert ended.signal == signal.SIGKILL, ended
    ledger = Ledger(["process"])
    ledger.take(toil.logs(1))
    assert len(ledger.cut_off) <= count + 1
    for step in range(NUM_STEPS):
        ledger.settle(step, value_at(f"{toil.run}/{step_dir(step)}", None))
