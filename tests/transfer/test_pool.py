"""Threads that stop together, within one budget."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from cloudckpt.errors import InterruptedTransferError
from cloudckpt.transfer.pool import ByteBudget, run_all


def test_all_tasks_run() -> None:
    done: list[int] = []
    run_all(
        (partial(done.append, i) for i in range(100)), num_threads=4, cancel=threading.Event(), stop=threading.Event()
    )
    assert sorted(done) == list(range(100))


def test_the_first_failure_is_raised_and_nothing_new_is_begun() -> None:
    begun: list[int] = []

    def task(i: int) -> None:
        begun.append(i)
        if i == 3:
            raise ValueError("three")
        time.sleep(0.01)

    with pytest.raises(ValueError, match="three"):
        run_all(
            (partial(task, i) for i in range(1000)), num_threads=2, cancel=threading.Event(), stop=threading.Event()
        )
    assert len(begun) < 50


def test_a_failure_lets_tasks_under_way_stop() -> None:
    stop = threading.Event()

    def wait() -> None:
        assert stop.wait(30)
        raise InterruptedTransferError("stopped")

    def fail() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        run_all(iter([wait, fail]), num_threads=2, stop=stop)


def test_a_task_that_stalls_is_left_behind() -> None:
    cancel, stop, end = threading.Event(), threading.Event(), threading.Event()
    ended: list[bool] = []

    def stall() -> None:
        cancel.set()
        ended.append(end.wait(60))

    with pytest.raises(InterruptedTransferError):
        run_all(iter([stall, stall, stall]), num_threads=2, cancel=cancel, stop=stop)
    assert ended == []
    assert stop.is_set()
    end.set()


def test_cancelled_from_outside() -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(InterruptedTransferError):
        run_all(iter([lambda: None]), num_threads=2, cancel=cancel)


def test_the_budget_is_never_exceeded() -> None:
    budget, lock = ByteBudget(100), threading.Lock()
    held = peak = 0

    def task(nbytes: int) -> None:
        nonlocal held, peak
        taken = budget.acquire(nbytes)
        with lock:
            held += taken
            peak = max(peak, held)
        time.sleep(0.001)
        with lock:
            held -= taken
        budget.release(taken)

    run_all(
        (partial(task, 10 + i % 60) for i in range(80)), num_threads=8, cancel=threading.Event(), stop=threading.Event()
    )
    assert held == 0
    assert 0 < peak <= 100


def test_more_than_the_budget_gets_all_of_it() -> None:
    budget = ByteBudget(10)
    assert budget.acquire(1000) == 10
