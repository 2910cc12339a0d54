"""Which steps go, and in which order they came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.keys import MAX_STEP
from cloudckpt.plan.history import SavedStep, newest_first, next_branch
from cloudckpt.plan.retention import KeepEvery, KeepLast, make_policies, removable


def saved(step, branch=0, name=None):
    return SavedStep(step, branch, name or f"step-{step:08d}", f"{branch}-{step}")


def steps(*pairs):
    return newest_first(saved(step, branch) for branch, step in pairs)


def test_order_by_branch_and_step():
    assert [(s.branch, s.step) for s in steps((0, 100), (1, 20), (0, 9), (1, 15))] == [
        (1, 20),
        (1, 15),
        (0, 100),
        (0, 9),
    ]
    twice = newest_first([saved(9, name="step-9"), saved(9, name="step-00000009")])
    assert [s.name for s in twice] == ["step-00000009", "step-9"]


def test_branches():
    assert next_branch(0, []) == 0
    assert next_branch(10, [(0, 9)]) == 0
    assert next_branch(9, [(0, 9)]) == 1
    assert next_branch(9, [(MAX_STEP, 9)]) == MAX_STEP  # another could not be read
    assert next_branch(20, [(0, 9), (0, 100)]) == 1
    assert next_branch(30, [(0, 100), (1, 20)]) == 1
    assert next_branch(150, [(0, 100), (1, 20)]) == 1


@given(st.lists(st.integers(0, 8), max_size=30))
def test_what_is_saved_last_is_the_newest(numbers):
    history = []
    for step in numbers:
        branch = next_branch(step, history)
        assert (branch, step) > max(history, default=(-1, -1))
        history.append((branch, step))


def test_keep_last():
    run = steps((0, 1), (0, 2), (0, 3), (0, 4))
    assert [s.step for s in removable(run, [KeepLast(2)])] == [1, 2]
    assert removable(run, [KeepLast(9)]) == []
    assert removable([], [KeepLast(1)]) == []
    assert removable(run, []) == []


def test_the_newest_stays_whatever_the_policies_say():
    run = steps((0, 7), (0, 11), (0, 13))
    assert [s.step for s in removable(run, [KeepEvery(10)])] == [7, 11]
    # A rollback: what was just written is newer than what was abandoned.
    run = steps((0, 9), (0, 10), (0, 100), (1, 20))
    assert [s.step for s in removable(run, [KeepLast(1)])] == [9, 10, 100]

    class Nothing:
        def keep(self, steps):
            return ()

    assert [s.step for s in removable(run, [Nothing()])] == [9, 10, 100]


def test_a_step_stays_if_any_policy_keeps_it():
    run = steps(*((0, step) for step in range(10, 100, 10)))
    assert [s.step for s in removable(run, [KeepLast(2), KeepEvery(30)])] == [10, 20, 40, 50, 70]


def test_directories_in_use_stay():
    run = steps((0, 1), (0, 2), (0, 3))
    assert [s.step for s in removable(run, [KeepLast(1)], busy=["step-00000001"])] == [2]


@pytest.mark.parametrize("settings", [(0, None), (-1, None), (None, 0), (True, None), (1.0, None), ("3", None)])
def test_settings_that_would_remove_everything_are_refused(settings):
    with pytest.raises(InvalidStateError, match=r"keep_(last|every) must be an int of at least 1"):
        make_policies(*settings)


def test_what_is_no_policy_is_refused():
    with pytest.raises(InvalidStateError, match=r"keep\(steps\)"):
        make_policies(None, None, ["last"])
    assert make_policies(None, None) == ()
    assert make_policies(1, 2, [KeepLast(5)]) == (KeepLast(1), KeepEvery(2), KeepLast(5))
