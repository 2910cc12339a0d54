"""pytorch/pytorch#192225: empty containers must neither vanish nor appear."""

import msgspec
import torch

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
