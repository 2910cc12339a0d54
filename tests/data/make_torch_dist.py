"""Write ``tests/data/torch-dist``: a small checkpoint by Megatron's own writer, on 2 ranks.

pip install --no-deps megatron-core==0.16.1 packaging
python tests/data/make_torch_dist.py tests/data/torch-dist
"""

from __future__ import annotations

import argparse
import enum
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Backend(enum.Enum):
    """What is in the arguments of every run, and no plain value."""

    FLASH = 1


def state(rank: int) -> dict[str, object]:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    weight = torch.arange(24.0).reshape(4, 6).to(torch.bfloat16)
    layers = torch.arange(100.0, 124.0).reshape(2, 3, 4)
    rows = weight[rank * 2 : rank * 2 + 2].contiguous()
    moments = torch.arange(200.0, 224.0).reshape(4, 6)[rank * 2 : rank * 2 + 2].contiguous()
    return {
        "args": argparse.Namespace(hidden_size=6, bf16=True, backend=Backend.FLASH, dtype=torch.bfloat16),
        "checkpoint_version": 3.0,
        "iteration": 1200,
        "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 9600},
        "model": {
            "embedding.weight": ShardedTensor.from_rank_offsets("embedding.weight", rows, (0, rank, 2)),
            f"layers.{rank}.weight": ShardedTensor.from_rank_offsets(
                "decoder.layers.weight", layers[rank].clone(), (0, rank, 2), prepend_axis_num=1
            ),
        },
        "optimizer": {
            "exp_avg": ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.embedding.weight", moments, (0, rank, 2)
            ),
        },
        "rng_state": ShardedObject("rng_state", [{"torch": torch.full((4,), rank)}], (2,), (rank,)),
    }


def write(rank: int, folder: str) -> None:
    from megatron.core import dist_checkpointing

    # It waits for GPUs, and sends flags by them, where there are none.
    torch.cuda.synchronize = lambda: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist_checkpointing.save(state(rank), folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True)
    mp.spawn(write, args=(sys.argv[1],), nprocs=2)
