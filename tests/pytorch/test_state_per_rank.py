"""Small tensors inside of state that differs per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.errors import InvalidStateError
from cloudckpt.pytorch.per_rank import decode_rank_value


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


def test_a_merge_function_that_fails_is_named() -> None:
    def merge(states: list[Any], rank: int, world_size: int) -> Any:
        raise ValueError("boom")

    node = {"$": "per_rank", "values": {"0": 1}}
    with pytest.raises(InvalidStateError, match=r"the merge function of 'a\.b' failed: ValueError: boom") as caught:
        decode_rank_value(
            node,
            cloudckpt.PerRank(merge=merge),
            "a.b",
            rank=0,
            world_size=2,
            saved_world_size=1,
            allow_pickle=False,
        )
    assert isinstance(caught.value.__cause__, ValueError)


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": torch.arange(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = len(state["buffer"])


def test_an_object_gets_its_state(tmp_path: Path) -> None:
    cloudckpt.save({"loader": cloudckpt.PerRank(Loader(3))}, tmp_path)
    loader = Loader(0)
    target = {"loader": cloudckpt.PerRank(loader)}
    cloudckpt.load(target, tmp_path)
    assert target["loader"].value is loader
    assert loader.position == 3
    target = {"loader": cloudckpt.PerRank()}
    cloudckpt.load(target, tmp_path)
    assert target["loader"].value["position"] == 3


def test_an_object_within_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match=r"'loader.inner': an object within a PerRank value is not"):
        cloudckpt.save({"loader": cloudckpt.PerRank({"inner": Loader(3)})}, tmp_path)
