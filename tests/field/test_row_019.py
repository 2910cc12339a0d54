"""google/flax#5554: flattening with a separator must not lose, merge or retype entries."""

import msgspec
import pytest

from cloudckpt.format import keys, values
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
    names = keys.array_names(paths)
    assert len({name.lower() for name in names}) == len(paths)
