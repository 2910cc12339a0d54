"""pytorch/pytorch#96802: ranks outside of a tensor's mesh take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import cloudckpt
from tests.ranks import RankPool
from tests.sharding import make_mesh

FULL = torch.arange(12.0).reshape(4, 3)


def on_two_ranks(full: torch.Tensor, first: int) -> DTensor:
    """Rows over ranks ``first`` and ``first + 1``; the others hold the object with an empty local tensor."""
    mesh = DeviceMesh("cpu", torch.tensor([first, first + 1]))
    mine = mesh.get_coordinate()
    local = torch.empty(0) if mine is None else full[2 * mine[0] : 2 * mine[0] + 2].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def state_on(full: torch.Tensor, first: int, kept_outside: bool) -> dict[str, Any]:
    held = on_two_ranks(full, first)
    inside = dist.get_rank() in (first, first + 1)
    common = {"everywhere": torch.ones(2)}
    return common | ({"w": held} if inside or kept_outside else {})


def save_on(url: str, kept_outside: bool) -> int:
    return cloudckpt.save(state_on(FULL, 0, kept_outside), url).num_chunks


def load_on(url: str, first: int, kept_outside: bool) -> list[list[float]] | None:
    state = state_on(FULL * 0, first, kept_outside)
    report = cloudckpt.load(state, url)
    assert (report.missing, report.unexpected) == ([], [])
    return state["w"].to_local().tolist() if "w" in state else None


@pytest.mark.parametrize("kept_outside", [True, False], ids=["empty-local", "no-key"])
def test_a_mesh_of_two_of_four_ranks(ranks: RankPool, tmp_path: Path, kept_outside: bool):
    url = str(tmp_path / "c")
    ranks.run(4, save_on, url, kept_outside)
    assert torch.equal(cloudckpt.read(url)["w"], FULL)
    upper, lower = FULL[:2].tolist(), FULL[2:].tolist()
    none = [] if kept_outside else None
    assert ranks.run(4, load_on, url, 0, kept_outside) == [upper, lower, none, none]
    assert ranks.run(4, load_on, url, 2, kept_outside) == [none, none, upper, lower]


def save_two_stages(url: str) -> None:
    """Pipeline stages: layer 0 on a mesh of ranks 0 and 1, layer 1 on ranks 2 and 3."""
    layers = [on_two_ranks(FULL + 100 * stage, 2 * stage) for stage in range(2)]
    stage = dist.get_rank() // 2
    cloudckpt.save({"layers": {str(stage): layers[stage]}}, url)


def load_on_one_mesh(url: str) -> list[list[float]]:
    mesh = make_mesh((4,))
    target = {
        "layers": {
            str(stage): DTensor.from_local(torch.zeros(1, 3), mesh, [Shard(0)], run_check=False) for stage in range(2)
        }
    }
    cloudckpt.load(target, url)
    return [target["layers"][str(stage)].to_local().tolist()[0] for stage in range(2)]


def test_stages_on_meshes_of_their_own(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_two_stages, str(tmp_path / "c"))
    found = ranks.run(4, load_on_one_mesh, str(tmp_path / "c"))
    assert found == [[FULL[rank].tolist(), (FULL[rank] + 100).tolist()] for rank in range(4)]
