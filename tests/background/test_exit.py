"""What becomes of background saves when their process ends, in whatever way. The scripts have no __main__ guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.errors import NotFoundError

EXECUTORS = ["thread", "process"]

PREAMBLE = """
import os, signal, sys, threading, time
import torch
import cloudckpt
url, executor = sys.argv[1:]

def save(value, to=url, **options):
    state = {"w": torch.full((1 << 20,), value), "value": value}
    return cloudckpt.async_save(state, to, executor=executor, **options)
"""


def run(script: str, url: Path, executor: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + script, str(url), executor]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)  # type: ignore[call-overload]


def assert_is(url: Path, value: float) -> None:
    found = cloudckpt.read(str(url))
    assert found["value"] == value
    assert torch.equal(found["w"], torch.full((1 << 20,), value))


@pytest.mark.parametrize(
    ("executor", "end", "status"),
    [
        ("thread", "", 0),
        ("thread", "sys.exit(3)", 3),
        ("process", "raise ValueError('training failed')", 1),
    ],
    ids=["end", "exit", "exception"],
)
def test_a_script_that_ends_waits_for_its_save(tmp_path: Path, executor: str, end: str, status: int):
    done = run(f"save(1.0)\n{end}\n", tmp_path / "a", executor)
    assert done.returncode == status, done.stderr
    assert_is(tmp_path / "a", 1.0)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failed_save_that_nobody_awaited(tmp_path: Path, executor: str):
    script = """
import atexit
atexit.register(lambda: print("other handlers run"))
print("all is well")
save(1.0)
cloudckpt.async_save({"w": torch.ones(3)}, url, executor=executor)
"""
    # The second finds the first one's checkpoint, or both race for one name: either way one of them fails.
    done = run(script, tmp_path / "a", executor)
    assert done.returncode == 1, done.stderr
    assert "cloudckpt: the background save to" in done.stderr
    assert "AlreadyCommittedError" in done.stderr
    assert done.stdout.splitlines() == ["all is well", "other handlers run"]
    assert_is(tmp_path / "a", 1.0)


@pytest.mark.parametrize("executor", ["thread"])
def test_a_failed_save_whose_error_was_seen(tmp_path: Path, executor: str):
    script = """
save(1.0)
try:
    save(2.0).result()
except cloudckpt.errors.AlreadyCommittedError:
    print("seen")
"""
    done = run(script, tmp_path / "a", executor)
    assert (done.returncode, done.stdout) == (0, "seen\n"), done.stderr


def test_the_helper_finishes_for_a_parent_that_was_killed(tmp_path: Path):
    script = """
save(1.0, to=url + "-first").result()   # the helper is up
save(2.0)
time.sleep(float(os.environ["WAIT_S"]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(script, tmp_path / "a", "process", env=os.environ | {"WAIT_S": "0.3"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            assert_is(tmp_path / "a", 2.0)
            return
        except NotFoundError:
            time.sleep(0.05)
    pytest.fail("the save was never committed")


def test_a_killed_helper_is_named_and_replaced(tmp_path: Path):
    script = """
from cloudckpt import _async
save(1.0, to=url + "-1").result()
helper = _async._LANES["process"].executor._helper._process
os.kill(helper.pid, signal.SIGSTOP)
pending = save(2.0, to=url + "-2")
time.sleep(0.2)
os.kill(helper.pid, signal.SIGKILL)
try:
    pending.result()
except cloudckpt.errors.HelperError as error:
    print(error)
save(3.0, to=url + "-3").result()
"""
    done = run(script, tmp_path / "a", "process")
    assert done.returncode == 0, done.stderr
    assert "was killed by signal 9" in done.stdout
    assert_is(tmp_path / "a-1", 1.0)
    assert_is(tmp_path / "a-3", 3.0)
    with pytest.raises(NotFoundError):
        cloudckpt.read(str(tmp_path / "a-2"))


@pytest.mark.parametrize("executor", ["process"])
def test_interrupts_do_not_reach_the_save(tmp_path: Path, executor: str):
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
pending = save(1.0)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = run(script, tmp_path / "a", executor)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
    assert_is(tmp_path / "a", 1.0)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_saves_that_begin_while_the_script_is_ending(tmp_path: Path, executor: str):
    script = """
several = cloudckpt.Config(max_pending_saves=2)
def again(commit):
    if not commit.url.endswith("aaa"):
        save(1.0, commit.url + "a", on_commit=again, config=several)
save(1.0, on_commit=again, config=several)
"""
    done = run(script, tmp_path / "a", executor)
    assert done.returncode == 0, done.stderr
    assert_is(tmp_path / "aaa", 1.0)


def test_a_stopped_helper_is_given_up(tmp_path: Path):
    script = """
from cloudckpt import _async
impatient = cloudckpt.Config(rank_timeout_s=2)
save(1.0).result()
helper = _async._LANES["process"].executor._helper._process.pid
os.kill(helper, signal.SIGSTOP)
try:
    save(2.0, url + "b", config=impatient).result(60)
except cloudckpt.errors.HelperError as error:
    print(error)
save(3.0, url + "c").result(60)
"""
    done = run(script, tmp_path / "a", "process")
    assert (done.returncode, "gave no sign of life" in done.stdout) == (0, True), done.stderr
    assert_is(tmp_path / "ac", 3.0)


def test_a_save_that_begins_when_the_interpreter_ends(tmp_path: Path):
    script = """
import atexit

def late():
    for save in (cloudckpt.async_save, cloudckpt.save):
        try:
            save({"w": torch.ones(3)}, url)
        except cloudckpt.errors.CloudckptError as error:
            print(error)

atexit.register(late)
"""
    done = run(script, tmp_path / "a", "thread")
    assert done.stdout.count(" before that") == 2, done.stderr
    assert done.returncode == 0
