"""What every rank of the multi-node test does; torchrun starts it with a JSON text of ``Job``'s fields."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import cloudckpt
from tests.sharding import blank, noise, same_bits, shard

SHAPE = (2048, 1024)
"""Of both float32 tensors: 8 MiB."""

NBYTES = 2 * 4 * SHAPE[0] * SHAPE[1]
CHUNK_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True)
class Job:
    """``loads``: by name of the phase, options of ``load``."""

    folder: str
    url: str
    storage_options: dict[str, Any]
    loads: dict[str, dict[str, Any]]


def run(job: Job) -> None:
    num_nodes, per_node = dist.get_world_size() // 2, 2
    flat = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    by_node = DeviceMesh("cpu", torch.arange(dist.get_world_size()).reshape(num_nodes, per_node))
    whole, cut = noise(SHAPE, seed=1), noise(SHAPE, seed=2)
    options = {"storage_options": job.storage_options, "config": cloudckpt.Config(chunk_bytes=CHUNK_BYTES)}

    meet(job, "start")
    state = {"whole": shard(whole, flat, [Replicate()]), "cut": shard(cut, flat, [Shard(0)])}
    cloudckpt.save(state, job.url, **options)
    meet(job, "save")
    # Every node needs everything: one tensor on each of its ranks, the columns of the other divided among them.
    wanted = {"whole": (whole, flat, [Replicate()]), "cut": (cut, by_node, [Replicate(), Shard(1)])}
    for name, chosen in job.loads.items():
        target = {key: blank(*layout) for key, layout in wanted.items()}
        report = cloudckpt.load(target, job.url, **options, **chosen)
        for key, layout in wanted.items():
            assert same_bits(target[key].to_local(), shard(*layout).to_local()), f"{name}: {key}"
        meet(job, name, dataclasses.asdict(report))


def meet(job: Job, phase: str, said: object = None) -> None:
    """The test reads its counters while all ranks wait here."""
    dist.barrier()
    if dist.get_rank() == 0:
        reached = Path(job.folder) / f"{phase}.reached"
        reached.with_suffix(".part").write_text(json.dumps(said))
        reached.with_suffix(".part").rename(reached)
        while not (Path(job.folder) / f"{phase}.go").exists():
            time.sleep(0.02)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run(Job(**json.loads(sys.argv[1])))
    finally:
        dist.destroy_process_group()
