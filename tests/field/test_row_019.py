"""google/flax#5554: flattening with a separator must not lose, merge or retype entries."""

import msgspec
import pytest
import torch

import cloudckpt
from cloudckpt.errors import MismatchError
from cloudckpt.format import values
from cloudckpt.format.array_names import array_names
from tests.format.exact import same

STATES = [
    {"a": {"b": 1}, "a.b": 2},
    {1: 10, "1": 20},
    {"k": {"": 5}},
    {"": {"": {"": 1}}, ".": 2, "..": 3, "a/b": {"c": 4}, "a": {"b/c": 5}},
    {(1, 2): 1, ("1", 2): 2, True: 3, "True": 4, None: 5, "None": 6, "(1, 2)": 7},
    {"$": "tuple", "items": [1]},
    {True: 1},
    {1: 1},
]


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_structure_and_key_types_come_back(state):
    node = msgspec.json.decode(msgspec.json.encode(values.encode(state)))
    assert same(values.decode(node), state)


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_tensors_at_these_paths_have_names_of_their_own(state):
    paths = []

    def leaf(path, value):
        if type(value) is int:
            paths.append(path)

    values.encode(state, leaf=leaf)
    names = array_names(paths)
    assert len({name.lower() for name in names}) == len(paths)


def with_tensors(state):
    """Every int as a tensor of its own."""
    if type(state) is dict:
        return {key: with_tensors(value) for key, value in state.items()}
    return torch.tensor([float(state)]) if type(state) is int else state


def without_values(state):
    if type(state) is dict:
        return {key: without_values(value) for key, value in state.items()}
    return state - 100 if isinstance(state, (int, torch.Tensor)) else state


def plain(state):
    if type(state) is dict:
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("make", [dict, with_tensors], ids=["values", "tensors"])
@pytest.mark.parametrize("state", STATES, ids=repr)
def test_saved_and_loaded(tmp_path, state, make, layout):
    state = make(state)
    cloudckpt.save(state, tmp_path / "c", layout=layout)
    assert same(plain(cloudckpt.read(tmp_path / "c")), plain(state))
    target = without_values(state)
    cloudckpt.load(target, tmp_path / "c")
    assert same(plain(target), plain(state))


def test_a_key_of_another_type_is_another_key(tmp_path):
    cloudckpt.save({1: torch.zeros(1)}, tmp_path / "c")
    for key in ("1", True):
        with pytest.raises(MismatchError) as caught:
            cloudckpt.load({key: torch.zeros(1)}, tmp_path / "c")
        assert caught.value.missing == [str(key)]
        assert caught.value.unexpected == ["1"]
