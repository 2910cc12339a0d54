"""pytorch/pytorch#120356: plain tensors of one key that differ between ranks must not be taken for replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt.errors import InvalidStateError, NotFoundError
from tests.ranks import RankPool
from tests.sharding import error_of


def own_values() -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0]][dist.get_rank()])}


def own_experts() -> dict[str, dict[str, torch.Tensor]]:
    """4 experts over ep=2, whose local names start at 0 on each rank."""
    first = 2 * dist.get_rank()
    return {"experts": {str(i): torch.full((3,), float(first + i)) for i in range(2)}}


def save_plain(url: str, kind: str) -> Exception | None:
    return error_of(lambda: cloudckpt.save(own_values() if kind == "w" else own_experts(), url))


@pytest.mark.parametrize(("kind", "key"), [("w", "w"), ("experts", "experts.0")])
def test_save_fails_and_names_the_key_and_both_ranks(ranks: RankPool, tmp_path: Path, kind: str, key: str):
    errors = ranks.run(2, save_plain, str(tmp_path / "c"), kind)
    for error in errors:
        assert isinstance(error, InvalidStateError)
        assert repr(key) in str(error)
        assert "ranks 0 and 1" in str(error)
        assert "PerRank" in str(error)
    with pytest.raises(NotFoundError):
        cloudckpt.read(tmp_path / "c")


def save_per_rank(url: str) -> torch.Tensor:
    cloudckpt.save({"w": cloudckpt.PerRank(own_values()["w"])}, url)
    target = {"w": cloudckpt.PerRank()}
    cloudckpt.load(target, url)
    return target["w"].value


def test_marked_per_rank_each_gets_its_own_back(ranks: RankPool, tmp_path: Path):
    found = ranks.run(2, save_per_rank, str(tmp_path / "c"))
    assert [value.tolist() for value in found] == [[0.0, 1.0], [2.0, 3.0]]


def save_equal(url: str) -> int:
    return cloudckpt.save({"w": torch.tensor([0.0, 1.0])}, url).nbytes


def test_equal_ones_are_stored_once(ranks: RankPool, tmp_path: Path):
    assert ranks.run(2, save_equal, str(tmp_path / "c")) == [12, 12]  # 8 bytes and a checksum
    assert cloudckpt.read(tmp_path / "c")["w"].tolist() == [0.0, 1.0]
