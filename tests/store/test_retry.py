from __future__ import annotations

import pytest

from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.store.counts import Counter
from cloudckpt.store.retry import FIRST_BOUND_S, LARGEST_BOUND_S, Backoff, call


class FakeClock:
    """Time passes only by sleeping; the random part is always the whole bound."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []
        self.bounds: list[tuple[float, float]] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def uniform(self, low: float, high: float) -> float:
        self.bounds.append((low, high))
        return high

    def backoff(self, deadline_s: float, counter: Counter | None = None) -> Backoff:
        return Backoff(deadline_s, counter, clock=self.clock, sleep=self.sleep, uniform=self.uniform)


PASSING = StoreError("503", key="k", retryable=True)


def fail_until_the_end(backoff: Backoff) -> StoreError:
    for _ in range(10_000):
        try:
            backoff.pause(PASSING)
        except StoreError as error:
            return error
    raise AssertionError("never gave up")


def test_waits_double_up_to_a_bound_and_end_at_the_deadline():
    fake, counter = FakeClock(), Counter()
    error = fail_until_the_end(fake.backoff(60.0, counter))
    assert fake.slept_s[:5] == pytest.approx([FIRST_BOUND_S * 2**n for n in range(5)])
    assert max(fake.slept_s) == LARGEST_BOUND_S
    assert all(low == 0.0 for low, _ in fake.bounds)
    assert sum(fake.slept_s) <= 60.0
    assert counter.snapshot().retries == len(fake.slept_s)
    assert (error.key, error.retryable) == ("k", True)
    assert f"gave up after {len(fake.slept_s) + 1} tries" in str(error)
    assert error.__cause__ is PASSING


def test_progress_starts_the_deadline_anew():
    fake = FakeClock()
    backoff = fake.backoff(1.0)
    for _ in range(100):
        backoff.pause(PASSING)
        backoff.progressed()
    assert fake.slept_s == [FIRST_BOUND_S] * 100


def test_slow_tries_count_against_the_deadline():
    fake = FakeClock()
    backoff = fake.backoff(10.0)
    fake.now_s += 9.95
    with pytest.raises(StoreError, match=r"gave up after 1 tries in 9\.9|in 10\.0"):
        backoff.pause(PASSING)
    assert fake.slept_s == []


def test_what_stays_is_raised_as_it_is():
    fake = FakeClock()
    lasting = StoreError("403", key="k")
    with pytest.raises(StoreError) as caught:
        fake.backoff(60.0).pause(lasting)
    assert caught.value is lasting
    assert fake.slept_s == []


def test_very_many_failures_do_not_overflow():
    fake = FakeClock()
    fail_until_the_end(fake.backoff(50_000.0))
    assert len(fake.slept_s) > 1100


def test_call_returns_the_first_success_and_lets_other_errors_through():
    counter, answers = Counter(), [PASSING, PASSING, "value"]

    def operation() -> str:
        answer = answers.pop(0)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    assert call(operation, 30.0, counter) == "value"
    assert counter.snapshot().retries == 2

    def absent() -> str:
        raise NotFoundError("k")

    with pytest.raises(NotFoundError):
        call(absent, 30.0, counter)
    assert counter.snapshot().retries == 2
