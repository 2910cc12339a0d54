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


# 4 experts over ep=2, described: by rules for stacked ones, or by global names.

EP2 = cloudckpt.ParallelConfig(dp_shard=2, ep=2)
EP_RULES = cloudckpt.ShardingRules([("experts.w", {"ep": 0})], EP2)


def stacked_experts(first: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"experts": {"w": torch.stack([torch.full((3,), float(first + i)) for i in range(2)])}}


def save_described(folder: str) -> None:
    first = 2 * dist.get_rank()
    cloudckpt.save(stacked_experts(first), f"{folder}/stacked", rules=EP_RULES)
    cloudckpt.save(
        {"experts": {str(first + int(i)): w for i, w in own_experts()["experts"].items()}}, f"{folder}/named"
    )


def load_described(folder: str) -> list[list[float]]:
    first = 2 * dist.get_rank()
    stacked = stacked_experts(90)
    cloudckpt.load(stacked, f"{folder}/stacked", rules=EP_RULES)
    named = {"experts": {str(first + i): torch.zeros(3) for i in range(2)}}
    cloudckpt.load(named, f"{folder}/named")
    return [stacked["experts"]["w"][:, 0].tolist(), [float(w[0]) for w in named["experts"].values()]]


def test_with_rules_or_global_names_every_rank_keeps_its_experts(ranks: RankPool, tmp_path: Path):
    ranks.run(2, save_described, str(tmp_path))
    assert ranks.run(2, load_described, str(tmp_path)) == [[[0.0, 1.0]] * 2, [[2.0, 3.0]] * 2]
    assert cloudckpt.read(tmp_path / "stacked")["experts"]["w"][:, 0].tolist() == [0, 1, 2, 3]
    named = cloudckpt.read(tmp_path / "named")["experts"]
    assert {name: w.tolist() for name, w in named.items()} == {str(i): [float(i)] * 3 for i in range(4)}
