"""pytorch/pytorch#144657: an async save of CPU tensors stores what they were when it was called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.field.places import Place


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_values_of_the_call(place: Place, executor: str):
    w, array = torch.ones(4), np.ones(3)
    nested: dict[str, Any] = {"list": [1, {"a": 2}], "set": {1}, "array": array, "view": w[1:3], "t": w.view(2, 2).t()}
    state = {"w": w, "nested": nested}
    pending = place.async_save(state, executor=executor)
    w.fill_(2)
    array[:] = 2
    nested["list"][1]["a"] = 3
    nested["list"].append(4)
    nested["set"].add(2)
    nested["new"] = 5
    state["w"] = torch.zeros(7)
    pending.result(60)
    found = place.read()
    assert torch.equal(found["w"], torch.ones(4))
    assert np.array_equal(found["nested"].pop("array"), np.ones(3))
    assert torch.equal(found["nested"].pop("view"), torch.ones(2))
    assert torch.equal(found["nested"].pop("t"), torch.ones(2, 2))
    assert found["nested"] == {"list": [1, {"a": 2}], "set": {1}}
