"""ByteDance-Seed/VeOmni#1172: nothing is committed where a part failed after the coordinator's own was done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt.errors import CloudckptError, RankError
from cloudckpt.store.resolve import resolve
from tests.ranks import RankPool
from tests.servers.faults import ALWAYS, Fault, faulty_s3
from tests.sharding import error_of, make_mesh, shard

FULL = torch.arange(32.0).reshape(8, 4)


def save_step(run: str, step: int, options: dict[str, Any], wait_for_rank_0: bool) -> CloudckptError | None:
    url = f"{run}/step-{step:08d}"
    state = {"w": shard(FULL + step, make_mesh((4,)), [Shard(0)])}

    def until_rank_0_is_done(done: int, total: int) -> None:
        store = resolve(url, options)
        while dist.get_rank() == 3 and not any("r00000" in found.key for found in store.list("")):
            time.sleep(0.05)
        store.close()

    progress = until_rank_0_is_done if wait_for_rank_0 else None
    return error_of(lambda: cloudckpt.save(state, url, step=step, storage_options=options, progress=progress))


def test_the_previous_checkpoint_stays_the_latest(ranks: RankPool):
    with faulty_s3() as server:
        run, options = "s3://bkt/run", server.storage_options
        assert ranks.run(4, save_step, run, 1, options, False) == [None] * 4
        server.faults = [Fault("status", "PUT", "r00003", ALWAYS, 403, "AccessDenied")]
        for error in ranks.run(4, save_step, run, 2, options, True):
            assert isinstance(error, RankError)
            assert list(error.causes) == [3]
            assert "AccessDenied" in error.causes[3]
        assert [key for key in server.objects if "manifest" in key] == ["run/step-00000001/manifest.json"]
        assert not any("step-00000002" in key for key in server.objects)  # the others removed what they had written
        assert torch.equal(cloudckpt.read(f"{run}/step-00000001", storage_options=options)["w"], FULL + 1)


def save_on_two_nodes(url: str) -> tuple[CloudckptError | None, int]:
    """On "node 1" the folder is a file, so that only ranks 2 and 3 fail, each on its own disk."""
    node = dist.get_rank() // 2
    own = Path(url) / f"node-{node}"
    state = {"w": shard(FULL, make_mesh((4,)), [Shard(0)])}
    error = error_of(lambda: cloudckpt.save(state, own))
    return error, node


def test_ranks_that_write_elsewhere_are_told(ranks: RankPool, tmp_path: Path):
    for error, _ in ranks.run(4, save_on_two_nodes, str(tmp_path)):
        assert "save() was called with" in str(error)
        assert "rank 2" in str(error)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
