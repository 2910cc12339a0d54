"""Small tensors inside of state that differs per rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.errors import InvalidStateError


def is_equal(found: object, value: torch.Tensor | np.ndarray) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == value.dtype and torch.equal(found, value)
    return isinstance(found, np.ndarray) and found.dtype == value.dtype and np.array_equal(found, value)


@pytest.mark.parametrize(
    "value",
    [torch.empty(0), torch.empty(3, 0), np.empty(0), torch.tensor(2.5), np.array(3), torch.arange(6).reshape(2, 3).t()],
    ids=["empty", "no-columns", "empty-array", "0-dim", "0-dim-array", "transposed"],
)
def test_comes_back(value: torch.Tensor | np.ndarray, tmp_path: Path):
    cloudckpt.save({"loader": cloudckpt.PerRank({"buffer": value})}, tmp_path)
    assert is_equal(cloudckpt.read(tmp_path)["loader"][0]["buffer"], value)
    target = cloudckpt.PerRank()
    cloudckpt.load({"loader": target}, tmp_path)
    assert is_equal(target.value["buffer"], value)


def test_a_large_tensor_is_refused_and_has_a_way_out(tmp_path: Path):
    large = torch.zeros(5 * 2**20, dtype=torch.uint8)
    with pytest.raises(InvalidStateError, match=r"'buffer': .* 5242880 bytes .* ShardedTensor"):
        cloudckpt.save({"buffer": cloudckpt.PerRank(large)}, tmp_path)
    piece = cloudckpt.Piece((0, 0), (0, 0), (1, *large.shape))
    cloudckpt.save({"buffer": cloudckpt.ShardedTensor(large[None], (1, *large.shape), [piece])}, tmp_path)
    assert cloudckpt.read(tmp_path)["buffer"].shape == (1, *large.shape)
