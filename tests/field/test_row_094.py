"""pytorch/pytorch#1995: a view is stored without the memory around it, shared tensors once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard

import cloudckpt
from tests.ranks import RankPool
from tests.sharding import make_mesh, noise, shard

LARGE = 200_000


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Holder:
    """Not plain: only a pickle can hold it."""

    def __init__(self, w: torch.Tensor, tied: torch.Tensor | None = None) -> None:
        self.w = w
        self.inner = {"list": [w], "tied": tied}


def test_a_small_view_takes_a_few_bytes(tmp_path: Path):
    view = torch.zeros(1_000_000)[:2]
    commit = cloudckpt.save({"w": view, "nested": [view[1:]]}, tmp_path / "c")
    assert commit.nbytes == 2 * 4 + 4 + 4 + 4
    assert size_of(tmp_path) < 10_000
    assert cloudckpt.read(tmp_path / "c")["w"].tolist() == [0.0, 0.0]


def test_a_small_view_in_a_pickled_object_takes_a_few_bytes(tmp_path: Path):
    view = torch.arange(1_000_000.0)[5:7]
    cloudckpt.save({"holder": Holder(view)}, tmp_path / "c", allow_pickle=True)
    assert size_of(tmp_path) < 10_000
    target: dict[str, Any] = {"holder": None}
    cloudckpt.load(target, tmp_path / "c", allow_pickle=True)
    found = target["holder"]
    assert found.w.tolist() == [5.0, 6.0]
    assert found.inner["list"][0] is found.w


def test_a_small_view_per_rank_takes_a_few_bytes(tmp_path: Path):
    cloudckpt.save({"w": cloudckpt.PerRank(torch.zeros(1_000_000)[:2])}, tmp_path / "c")
    assert size_of(tmp_path) < 10_000


def test_one_tensor_under_two_names_is_stored_once(tmp_path: Path):
    x = noise((LARGE,))
    commit = cloudckpt.save({"x": x, "y": x, "again": {"z": x.view(-1)}}, tmp_path / "c")
    assert LARGE * 4 < commit.nbytes < LARGE * 4 + 100
    found = cloudckpt.read(tmp_path / "c")
    assert found["x"] is found["y"]
    target = {"x": torch.zeros(LARGE), "y": torch.zeros(LARGE), "again": {"z": torch.zeros(LARGE)}}
    cloudckpt.load(target, tmp_path / "c")
    assert all(torch.equal(t.view(torch.int32), x.view(torch.int32)) for t in (target["x"], target["y"]))
    tied = torch.zeros(LARGE)
    cloudckpt.load({"x": tied, "y": tied, "again": {"z": tied}}, tmp_path / "c")
    assert torch.equal(tied.view(torch.int32), x.view(torch.int32))


def test_overlapping_views_have_the_right_values(tmp_path: Path):
    a = torch.arange(5.0)
    state = {"head": a[:3], "tail": a[2:], "whole": a, "twice": a[::2], "square": a[:4].view(2, 2)}
    cloudckpt.save(state, tmp_path / "c")
    found = cloudckpt.read(tmp_path / "c")
    for name, view in state.items():
        assert torch.equal(found[name], view), name
    other = torch.zeros(5)
    cloudckpt.load({"head": other[:3], "tail": other[2:]}, tmp_path / "c", strict=False)
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def save_tied(url: str, tied_on: int | None) -> int:
    mesh = make_mesh((2,))
    held = shard(noise((6, 4)), mesh, [Shard(0)])
    tied = tied_on is None or mesh.get_local_rank() == tied_on
    other = held if tied else shard(noise((6, 4)), mesh, [Shard(0)])
    return cloudckpt.save({"emb": held, "head": other}, url).nbytes


def test_tied_shards_are_stored_once_where_all_ranks_tie_them(ranks: RankPool, tmp_path: Path):
    once = 6 * 4 * 4
    assert all(once <= n < 2 * once for n in ranks.run(2, save_tied, str(tmp_path / "tied"), None))
    assert all(n >= 2 * once for n in ranks.run(2, save_tied, str(tmp_path / "half"), 0))
    for name in ("tied", "half"):
        found = cloudckpt.read(tmp_path / name)
        for key in ("emb", "head"):
            assert torch.equal(found[key].view(torch.int32), noise((6, 4)).view(torch.int32))
