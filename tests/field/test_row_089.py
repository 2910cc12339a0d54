"""pytorch/pytorch#149640: replicas of many tensors are passed on through a window of memory, not piled up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from tests.ranks import RankPool
from tests.recipes.test_memory import MIB, extra_memory, fresh

__all__ = ["fresh"]

NUM_TENSORS = 40
BUDGET = 32 * MIB
ALLOWANCE = 32 * MIB
"""For threads' stacks and what malloc keeps."""


def load_replicas(url: str, exchange: Any, nbytes: int) -> tuple[int, str]:
    """Peak of memory beyond the targets, and how chunks were passed on."""
    config = cloudckpt.Config(memory_bytes=BUDGET, num_threads=4)
    small = {"w": torch.zeros(1000)}  # imports and connections
    cloudckpt.load(small, f"{url}-small", exchange=exchange, config=config)
    target = {f"w{i}": torch.full((nbytes // 4,), -1.0) for i in range(NUM_TENSORS)}
    kinds = []
    extra = extra_memory(lambda: kinds.append(cloudckpt.load(target, url, exchange=exchange, config=config).exchange))
    assert all((target[f"w{i}"] == i).all() for i in range(NUM_TENSORS))
    return extra, kinds[0]


def check(fresh: RankPool, url: str, exchange: str, nbytes: int) -> None:
    config = cloudckpt.Config(chunk_bytes=MIB)
    cloudckpt.save({"w": torch.ones(1000)}, f"{url}-small", config=config)
    cloudckpt.save({f"w{i}": torch.full((nbytes // 4,), float(i)) for i in range(NUM_TENSORS)}, url, config=config)
    for extra, kind in fresh.run(4, load_replicas, url, exchange, nbytes):
        assert kind == exchange
        assert extra <= 1.1 * BUDGET + ALLOWANCE


@pytest.mark.parametrize("exchange", ["broadcast", "alltoall"])
def test_peak_memory_is_a_window(fresh: RankPool, tmp_path: Path, exchange: str):
    """Piled up they would be 160 MiB."""
    check(fresh, str(tmp_path / "c"), exchange, 4 * MIB)


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["broadcast", "alltoall"])
def test_peak_memory_is_the_same_window_for_640_mib(fresh: RankPool, tmp_path: Path, exchange: str):
    check(fresh, str(tmp_path / "c"), exchange, 16 * MIB)
