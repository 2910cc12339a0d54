"""pytorch/pytorch#143972: a number and a 0-dim tensor are two kinds; loading one into the other is a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.errors import MismatchError

CASES = [
    pytest.param(5, torch.tensor(0.0), ("int", "tensor"), id="int-into-tensor"),
    pytest.param(torch.tensor(5.0), 0, ("tensor", "int"), id="tensor-into-int"),
    pytest.param(5.0, torch.tensor(0.0), ("float", "tensor"), id="float-into-tensor"),
    pytest.param(torch.tensor(5.0), None, ("tensor", "NoneType"), id="tensor-into-none"),
    pytest.param(np.array(5.0), torch.tensor(0.0), ("ndarray", "tensor"), id="ndarray-into-tensor"),
    pytest.param(torch.tensor(5.0), np.array(0.0), ("tensor", "ndarray"), id="tensor-into-ndarray"),
    pytest.param([torch.tensor(5.0)], torch.tensor(0.0), ("list", "tensor"), id="list-into-tensor"),
    pytest.param({"a": torch.tensor(5.0)}, torch.tensor(0.0), ("dict", "tensor"), id="dict-into-tensor"),
    pytest.param({"a": 5}, 3, ("dict", "int"), id="dict-into-int"),
    pytest.param(5, {"a": 0}, ("int", "dict"), id="int-into-dict"),
    pytest.param(torch.tensor(5.0), {"a": 0}, ("tensor", "dict"), id="tensor-into-dict"),
    pytest.param(5, cloudckpt.PerRank(), ("int", "PerRank"), id="int-into-per-rank"),
]


@pytest.mark.parametrize(("stored", "target", "kinds"), CASES)
def test_the_error_names_the_key_and_both_kinds(tmp_path: Path, stored: Any, target: Any, kinds: tuple[str, str]):
    cloudckpt.save({"state": {"step": stored}, "other": torch.ones(1)}, tmp_path / "c")
    state = {"state": {"step": target}, "other": torch.zeros(1)}
    for strict in (True, False):
        with pytest.raises(MismatchError) as caught:
            cloudckpt.load(state, tmp_path / "c", strict=strict)
        assert caught.value.kinds == {"state.step": kinds}
        assert all(text in str(caught.value) for text in ("state.step", *kinds))
    assert state["state"]["step"] is target
    assert state["other"].item() == 0.0


def test_plain_numbers_take_the_stored_type(tmp_path: Path):
    cloudckpt.save({"step": 5, "lr": 0.5}, tmp_path / "c")
    state = {"step": 0.0, "lr": None}
    cloudckpt.load(state, tmp_path / "c")
    assert state == {"step": 5, "lr": 0.5}
    assert type(state["step"]) is int
