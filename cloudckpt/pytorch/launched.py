"""Commands that torchrun starts several times act as one job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def launched_job() -> Iterator[int]:
    """The rank of this process, with a gloo process group of all of them; 0 for one that was started by itself."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
