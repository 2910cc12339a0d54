"""How often ranks ask, and when they give one another up: with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

from cloudckpt.pytorch import pace
from cloudckpt.pytorch.pace import Pace, Signs

TIMEOUT_S = 8.0


@pytest.mark.parametrize("size", [2, 8, 512, 4096, 100_000])
@pytest.mark.parametrize("timeout_s", [1.0, 30.0, 600.0])
def test_questions_come_less_and_less_often_up_to_a_bound(size: int, timeout_s: float):
    found = Pace.of(size, timeout_s)
    pauses = list(islice(found.pauses(), 100))
    assert pauses == sorted(pauses)
    assert pauses[0] == found.first_s
    assert pauses[-1] == found.longest_s <= timeout_s / 6
    assert found.beat_s <= timeout_s / 6
    if timeout_s == 600.0 and size <= 4096:
        assert size / found.longest_s <= 512


def test_few_ranks_hear_of_a_failure_in_seconds():
    assert Pace.of(64, 600.0).longest_s < 1.2


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.beats: dict[int, int] = {}
        self.num_reads = 0

    def read(self, ranks: Sequence[int]) -> list[int]:
        self.num_reads += 1
        return [self.beats.get(rank, 0) for rank in ranks]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pace.time, "monotonic", lambda: made.now_s)
    return made


def named_at(clock: Clock, signs: Signs, ranks: Sequence[int], last_beat_s: float = 0.0) -> tuple[float, list[int]]:
    """When somebody is named, and who. Rank 2 beats twice a second until ``last_beat_s``, rank 3 for ever."""
    start_s = clock.now_s
    for tick in range(400):
        clock.now_s = start_s + tick / 10
        clock.beats[3] = tick // 5
        if clock.now_s - start_s <= last_beat_s:
            clock.beats[2] = 7 + tick // 5
        if late := signs.silent(ranks):
            return clock.now_s - start_s, late
    return 40.0, []


def test_who_never_gives_a_sign_is_named_in_time(clock: Clock):
    assert named_at(clock, Signs(clock.read, TIMEOUT_S), [1, 2, 3]) == (TIMEOUT_S, [1])
    assert clock.num_reads == 4


def test_who_stops_is_named_within_one_and_a_half(clock: Clock):
    for last_beat_s in (0.0, 1.0, 5.0, 20.0):
        at_s, late = named_at(clock, Signs(clock.read, TIMEOUT_S), [2, 3], last_beat_s)
        assert late == [2]
        assert last_beat_s + TIMEOUT_S <= at_s + 0.01 <= last_beat_s + 1.5 * TIMEOUT_S + 0.11


def test_who_lives_is_waited_for(clock: Clock):
    assert named_at(clock, Signs(clock.read, TIMEOUT_S), [3]) == (40.0, [])
