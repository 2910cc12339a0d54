"""pytorch/pytorch#175884: replicas are passed on whatever their dtype, also one that the backend does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from tests.ranks import RankPool
from tests.sharding import noise, other_bits, same_bits

NAMES = [
    *("int16", "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "bfloat16", "float16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]
"""gloo refuses broadcasts of most of them. Some are unknown to older versions of torch."""

SHAPES: list[tuple[int, ...]] = [(5, 7), (0, 3), ()]


def values() -> dict[str, torch.Tensor]:
    dtypes = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}
    return {f"{name} {shape}": noise(shape, dtype) for name, dtype in dtypes.items() for shape in SHAPES}


def save_and_load(folder: str, exchange: Any, compression: Any) -> tuple[str, list[str]]:
    """How chunks were passed on, and what has other bits than it should."""
    right = values()
    config = cloudckpt.Config(chunk_bytes=16)
    cloudckpt.save(right, folder, compression=compression, config=config)
    target = {name: other_bits(tensor) for name, tensor in right.items()}
    report = cloudckpt.load(target, folder, exchange=exchange, config=config)
    assert report.bytes_sent == sum(tensor.nbytes for tensor in right.values())
    return report.exchange, [name for name, tensor in target.items() if not same_bits(tensor, right[name])]


@pytest.mark.parametrize("exchange", ["broadcast", "alltoall"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_dtype_empty_and_0_dim_too(ranks: RankPool, tmp_path: Path, exchange: str, compression: str | None):
    found = ranks.run(2, save_and_load, str(tmp_path / "c"), exchange, compression)
    assert found == [(exchange, [])] * 2
