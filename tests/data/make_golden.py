"""Makes the golden checkpoints of a format version: run once for each version, never again.

    torchrun --nproc-per-node 4 tests/data/make_golden.py tests/data/format-1.2

Version 1.0 has packed, plain and zstd; 1.1 has layouts, 1.2 two runs of incremental saves: what was new in each.

What must be in them is written down on its own in tests/test_golden.py.
"""

from __future__ import annotations

import shutil
import sys
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt.format.dtypes import DTYPES
from cloudckpt.format.manifest import Manifest, decode_manifest


def pattern(name: str) -> torch.Tensor:
    """Five elements whose bytes are 3, 10, 17, ...; zeros and ones for bool."""
    kind = DTYPES[name]
    if name == "bool":
        return torch.tensor([True, False, True, True, False])
    data = torch.tensor([(7 * i + 3) % 256 for i in range(5 * kind.itemsize)], dtype=torch.uint8)
    dtype: torch.dtype = getattr(torch, name)
    return data.view(dtype)


def make_state(rank: int) -> dict[Any, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    uneven = torch.arange(60, dtype=torch.float32).reshape(10, 6)
    grid = torch.arange(96, dtype=torch.bfloat16).reshape(8, 12)
    w = distribute_tensor(uneven, mesh, [Shard(0), Shard(0)])
    return {
        "model": {
            "uneven": w,
            "tied": w,
            "grid": distribute_tensor(grid, mesh, [Shard(0), Shard(1)]),
            "rows": distribute_tensor(grid.float(), mesh, [Replicate(), Shard(0)]),
            "padded": torch.arange(35, dtype=torch.int16).reshape(7, 5),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.zeros(0, 3),
        },
        ("block", 3): {1: torch.tensor([1]), "1": torch.tensor([2]), False: "no", "größe/ä": torch.tensor([3])},
        "numpy": {
            "text": np.array(["a", "bcd"]),
            "big": np.array([1, 2, 256], dtype=">i4"),
            "time": np.array(["2026-01-02"], dtype="M8[D]"),
            "plain": np.arange(3, dtype="<f8"),
        },
        "values": [
            None,
            -0.0,
            float("nan"),
            float("-inf"),
            2**80,
            b"\x00\xff",
            (1, "x", {2.5: {"y", "z"}}),
            OrderedDict(b=1, a=2),
            datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            torch.Size([2, 3]),
            torch.bfloat16,
            np.float32(0.1),
        ],
        "rng": cloudckpt.PerRank({"seed": 100 + rank, "state": torch.tensor([rank, 255], dtype=torch.uint8)}),
    }


class Scaled(torch.Tensor):
    """Codes and one scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of a Scaled")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"bits": 8}

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:  # torch's form
        return Scaled(parts["codes"], parts["scale"])


def make_layouts(rank: int) -> tuple[dict[str, Any], cloudckpt.ShardingRules]:
    """A packed q, k, v of 4, 2 and 2 rows cut by tp=2, a flat buffer cut over 4 ranks, and a tensor subclass."""
    qkv = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    rows = ([0, 1, 4, 6], [2, 3, 5, 7])[rank % 2]
    flat = cloudckpt.FlatLayout.of({"w": (3, 4), "b": (3,)}, align=2)
    state = {
        "qkv": qkv[rows],
        "flat": cloudckpt.FlatShards(torch.arange(16, dtype=torch.float32)[rank * 4 : rank * 4 + 4], flat, rank * 4),
        "quantised": Scaled(torch.arange(6, dtype=torch.uint8), torch.tensor([0.5])),
    }
    parallel = cloudckpt.ParallelConfig(dp_shard=2, tp=2)
    return state, cloudckpt.ShardingRules([("qkv", {"tp": 0}, {0: [4, 2, 2]})], parallel)


def make_step(step: int) -> dict[str, Any]:
    """Two thirds are frozen. The trained third differs in its last row."""
    mesh = init_device_mesh("cpu", (4,))
    frozen = torch.arange(64, dtype=torch.float32).reshape(16, 4)
    trained = torch.arange(32, dtype=torch.bfloat16).reshape(8, 4)
    trained[-1] = step - 1200
    return {
        "frozen": distribute_tensor(frozen, mesh, [Shard(0)]),
        "trained": distribute_tensor(trained, mesh, [Shard(0)]),
        "step": step,
    }


def make_runs(folder: Path) -> None:
    config = cloudckpt.Config(chunk_bytes=32)
    for name, compression in (("packed", None), ("zstd", "zstd")):
        for step in (1200, 1201, 1202):
            url = folder / name / f"step-{step:08d}"
            cloudckpt.save(make_step(step), url, step=step, incremental=True, compression=compression, config=config)
    if dist.get_rank() != 0:
        return
    # What this program sets only for a run that went back, and at a caller's wish.
    manifest = folder / "packed" / "step-00001202" / "manifest.json"
    document = decode_manifest(manifest.read_bytes(), str(manifest)).document
    changed = msgspec.structs.replace(document, branch=2, model_version="v3")
    manifest.write_bytes(Manifest(changed).encode())
    for name in ("packed", "zstd"):
        # The last step refers to the first, and needs none between.
        shutil.rmtree(folder / name / "step-00001201")


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    if folder.name == "format-1.1":
        layouts, rules = make_layouts(dist.get_rank())
        cloudckpt.save(layouts, folder / "layouts", rules=rules, step=1100)
    elif folder.name == "format-1.2":
        make_runs(folder)
    else:
        make_first(folder)
    dist.destroy_process_group()


def make_first(folder: Path) -> None:
    state = make_state(dist.get_rank())
    types = {"types": {name: pattern(name) for name in DTYPES}}
    small, large = cloudckpt.Config(chunk_bytes=96), cloudckpt.Config(chunk_bytes=512)
    about: dict[str, Any] = {"step": 1000, "metadata": {"note": "golden", "loss": 0.25}}
    cloudckpt.save(state | types, folder / "packed", config=small, **about)
    cloudckpt.save(state, folder / "plain", layout="zarr", config=large, **about)
    cloudckpt.save(state, folder / "zstd", compression="zstd", config=large, **about)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
