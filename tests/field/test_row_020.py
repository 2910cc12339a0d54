"""pytorch/pytorch#192225: empty containers must neither vanish nor appear."""

import copy

import msgspec
import pytest
import torch

import cloudckpt
from cloudckpt.errors import MismatchError
from cloudckpt.format import values
from tests.format.exact import same


def round_trip(state):
    return values.decode(msgspec.json.decode(msgspec.json.encode(values.encode(state))))


def test_empty_containers_keep_their_types():
    state = {"x": [], "y": {}, "z": None, "t": (), "s": set(), "f": frozenset(), "n": [[], [()], {"a": {}}]}
    assert same(round_trip(state), state)


def test_the_state_of_sgd_without_momentum_stays_empty():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    found = round_trip(state)
    assert same(found, state)
    assert found["state"] == {}


STATE = {"x": [], "y": {}, "z": None, "t": (), "s": set()}


def test_saved_and_read(tmp_path):
    cloudckpt.save(STATE, tmp_path / "c")
    assert same(cloudckpt.read(tmp_path / "c"), STATE)


def test_loaded_into_a_target_that_holds_something_else(tmp_path):
    cloudckpt.save(STATE, tmp_path / "c")
    target = {"x": [1], "y": {}, "z": 5, "t": (1, 2), "s": {3}}
    cloudckpt.load(target, tmp_path / "c")
    assert same(target, STATE)


def test_an_empty_dict_is_not_filled_nor_overlooked(tmp_path):
    cloudckpt.save(STATE, tmp_path / "c")
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({**copy.deepcopy(STATE), "y": {"a": 1}}, tmp_path / "c")
    assert caught.value.missing == ["y.a"]
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({key: value for key, value in STATE.items() if key != "y"}, tmp_path / "c")
    assert caught.value.unexpected == ["y"]
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({**copy.deepcopy(STATE), "new": {}}, tmp_path / "c")
    assert caught.value.missing == ["new"]


def test_an_optimizer_without_state(tmp_path):
    def make():
        model = torch.nn.Linear(2, 2)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    cloudckpt.save({"optimizer": make()}, tmp_path / "c")
    optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.5
    cloudckpt.load({"optimizer": optimizer}, tmp_path / "c")
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert cloudckpt.read(tmp_path / "c")["optimizer"]["state"] == {}
