"""Shards and pools for tests of staging."""

from __future__ import annotations

import numpy as np
import torch

from cloudckpt.pytorch.shards import LocalShard, ndarray_shard, tensor_shard
from cloudckpt.pytorch.staging import StagingPool


def shards_of(**held: torch.Tensor | np.ndarray) -> dict[str, LocalShard]:
    return {
        name: tensor_shard(obj, name) if isinstance(obj, torch.Tensor) else ndarray_shard(obj, name)[0]
        for name, obj in held.items()
    }


def pool_of(max_bytes: int | None = None, *, shared: bool = False) -> StagingPool:
    return StagingPool(shared=shared, max_bytes=max_bytes)
