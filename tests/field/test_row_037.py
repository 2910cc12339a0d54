"""KempnerInstitute/KempnerForge#104: saves in the background and collectives of the training do not lock up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cloudckpt
from tests.ranks import RankPool
from tests.sharding import make_mesh, noise, same_bits, shard

NUM_ROUNDS = 200
SAVE_EVERY = 20


def train(root: str, executor: str, coordination: str) -> bool:
    mesh = make_mesh((dist.get_world_size(),))
    full = noise((16, 8))
    right = True
    pending = []
    config = cloudckpt.Config(max_pending_saves=2)
    for step in range(NUM_ROUNDS):
        total = torch.tensor([float(step + dist.get_rank())])
        dist.all_reduce(total)
        right &= total.item() == sum(step + rank for rank in range(dist.get_world_size()))
        dist.barrier()
        if step % SAVE_EVERY == 0:
            state = {"w": shard(full, mesh, [Shard(0)]), "step": step, "plain": total}
            pending.append(
                cloudckpt.async_save(
                    state, f"{root}/{step}", executor=executor, coordination=coordination, config=config
                )
            )
    return right and all(one.result(90).url.endswith(str(i * SAVE_EVERY)) for i, one in enumerate(pending))


@pytest.mark.parametrize(
    ("executor", "coordination"), [("thread", "store"), ("thread", "collectives"), ("process", "store")]
)
def test_saves_beside_collectives(ranks: RankPool, tmp_path: Path, executor: str, coordination: str):
    assert ranks.run(4, train, str(tmp_path), executor, coordination) == [True] * 4
    for step in range(0, NUM_ROUNDS, SAVE_EVERY):
        found = cloudckpt.read(tmp_path / f"{step}")
        assert found["step"] == step
        assert same_bits(found["w"], noise((16, 8)))
        assert found["plain"].item() == 4 * step + 6
    left = [str(p) for p in tmp_path.rglob("*") if ".sync" in str(p) and p.is_file()]
    assert left == []
