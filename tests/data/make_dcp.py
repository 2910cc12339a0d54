"""Write ``tests/data/dcp-<release>``: a small DCP checkpoint by whichever torch runs this, on 2 ranks.

    python tests/data/make_dcp.py tests/data

Releases 1.13 (sharded tensors, flat keys), 2.4 (DTensors, nesting in ``planner_data``) and newer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RELEASE = ".".join(torch.__version__.split(".")[:2])


def numbers(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    count = int(torch.tensor(shape).prod()) if shape else 1
    return torch.arange(start, start + count).reshape(shape).to(dtype)


def sharded(value: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    if RELEASE.startswith("1."):
        from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

        size = -(-value.shape[dim] // 2)
        local = value.narrow(dim, rank * size, min(size, value.shape[dim] - rank * size)).contiguous()
        offsets = [rank * size if d == dim else 0 for d in range(value.dim())]
        return init_from_local_shards([Shard.from_tensor_and_offsets(local, offsets, rank)], value.shape)
    from torch.distributed._tensor import Shard as Along
    from torch.distributed._tensor import distribute_tensor
    from torch.distributed.device_mesh import init_device_mesh

    return distribute_tensor(value, init_device_mesh("cpu", (2,)), [Along(dim)])


def state(rank: int) -> dict[str, object]:
    model = {
        "embed.weight": sharded(numbers((5, 4), torch.bfloat16, 1), 0, rank),
        "layer.0.weight": sharded(numbers((4, 6), torch.float32, 100), 1, rank),
        "layer.0.bias": numbers((4,), torch.float32, 200),
        "turned": numbers((3, 4), torch.float32, 300).t(),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }
    flat = {
        "model": model,
        "optimizer": {
            "state": {
                "embed.weight": {
                    "step": torch.tensor(7.0),
                    "exp_avg": sharded(numbers((5, 4), torch.float32, 400), 0, rank),
                }
            },
            "param_groups": [{"lr": 0.125, "betas": (0.9, 0.95), "params": ["embed.weight"], "fused": None}],
        },
        "extra": {"epoch": 3, "name": "run", "seen": [1, 2, 3], "flags": {"on": True}},
    }
    if not RELEASE.startswith("1."):
        return flat
    # This release flattens nothing.
    found = {f"model.{key}": value for key, value in model.items()}
    found["optimizer.exp_avg"] = flat["optimizer"]["state"]["embed.weight"]["exp_avg"]
    found["extra"] = flat["extra"]
    return found


def write(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if RELEASE.startswith("1."):
        from torch.distributed._shard.checkpoint import FileSystemWriter, save_state_dict

        Path(folder).mkdir(parents=True, exist_ok=True)
        save_state_dict(state(rank), FileSystemWriter(folder))
    else:
        import torch.distributed.checkpoint as dcp

        dcp.save(state(rank), checkpoint_id=folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(write, args=(str(Path(sys.argv[1]) / f"dcp-{RELEASE}"),), nprocs=2)
