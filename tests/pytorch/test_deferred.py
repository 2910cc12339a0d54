"""Objects that are pickled in the background, after a copy was taken."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import cloudckpt
from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.pytorch import deferred
from cloudckpt.pytorch.deferred import finish
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.state import RankState, encode_state


class Sampler:
    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


class Special(Sampler):
    pass


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_COPIES", {})
    monkeypatch.setattr(deferred, "_WARNED", set())


def encoded(state: Any) -> RankState:
    return encode_state(state, allow_pickle=True, describer=Describer(None, 0, 1), defer_pickles=True)


def decoded(state: RankState) -> Any:
    return values.decode(state.tree.node, allow_pickle=True)


def test_a_registered_copy_is_pickled_later():
    cloudckpt.register_staging(Sampler, copy.deepcopy)
    sampler = Sampler([1, 2])
    state = encoded({"data": [sampler, {"again": sampler}], "step": 3})
    assert [values.dotted(item.path) for item in state.deferred] == ["data.0", "data.1.again"]
    sampler.seen.append(3)
    finish(state.deferred)
    assert decoded(state) == {"data": [Sampler([1, 2]), {"again": Sampler([1, 2])}], "step": 3}


def test_without_one_it_is_pickled_at_once_with_one_warning_for_each_type():
    samplers = [Sampler([1]), Sampler([2]), Special([3])]
    with pytest.warns(UserWarning, match="is pickled") as warned:
        state = encoded({"data": samplers})
    encoded({"data": samplers})
    assert [str(warning.message).split(";")[0] for warning in warned] == [
        "'data.0': training waits while this tests.pytorch.test_deferred.Sampler is pickled",
        "'data.2': training waits while this tests.pytorch.test_deferred.Special is pickled",
    ]
    assert "cloudckpt.register_staging(Sampler, copy.deepcopy)" in str(warned[0].message)
    assert state.deferred == ()
    samplers[0].seen.append(9)
    assert decoded(state) == {"data": [Sampler([1]), Sampler([2]), Special([3])]}


def test_subclasses_are_other_kinds():
    cloudckpt.register_staging(Sampler, copy.deepcopy)
    with pytest.warns(UserWarning, match="Special is pickled"):
        state = encoded({"data": Special([1])})
    assert state.deferred == ()


def test_within_state_per_rank():
    cloudckpt.register_staging(Sampler, copy.deepcopy)
    sampler = Sampler([1])
    state = encoded({"data": cloudckpt.PerRank({"sampler": sampler})})
    sampler.seen.append(2)
    finish(state.deferred)
    node: Any = state.tree.node
    assert values.decode(node["data"]["value"], allow_pickle=True) == {"sampler": Sampler([1])}


class Frozen:
    def __init__(self, number: int) -> None:
        self.number = number


def test_members_of_sets_are_pickled_at_once():
    """Their nodes are sorted."""
    cloudckpt.register_staging(Frozen, copy.deepcopy)
    state = encoded({"data": {Frozen(1)}})
    assert state.deferred == ()
    assert [member.number for member in decoded(state)["data"]] == [1]


def test_a_save_in_the_foreground_pickles_without_a_word(tmp_path: Path):
    cloudckpt.save({"data": Sampler([1])}, str(tmp_path), allow_pickle=True)
    assert cloudckpt.read(str(tmp_path), allow_pickle=True) == {"data": Sampler([1])}


def test_faults_name_the_path():
    cloudckpt.register_staging(Sampler, lambda sampler: sampler.seen.gone)
    with pytest.raises(InvalidStateError, match=r"'data.0': the copy registered for Sampler failed: AttributeError"):
        encoded({"data": [Sampler([1])]})
    cloudckpt.register_staging(Sampler, vars)  # type: ignore[arg-type]
    with pytest.raises(InvalidStateError, match=r"'data.0': the copy registered for Sampler returned a dict"):
        encoded({"data": [Sampler([1])]})
    cloudckpt.register_staging(Sampler, copy.copy)
    state = encoded({"data": [Sampler(lambda: 0)]})
    with pytest.raises(InvalidStateError, match=r"data.0: Sampler cannot be pickled"):
        finish(state.deferred)


def test_only_kinds_and_functions_are_registered():
    with pytest.raises(InvalidStateError, match="takes a class"):
        cloudckpt.register_staging(Sampler([]), copy.copy)  # type: ignore[type-var]
    with pytest.raises(InvalidStateError, match="must be a function, not 3"):
        cloudckpt.register_staging(Sampler, 3)  # type: ignore[arg-type]
