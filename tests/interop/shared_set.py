"""Checkpoints of all kinds and what is in them, for `stock_reader`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from cloudckpt import Piece, ShardedTensor
from cloudckpt.format.dtypes import dtype
from tests.interop import saved
from tests.ranks import RankPool

NATIVE = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
OTHERS = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64", "complex128", "complex32")
ROWS = torch.arange(40.0).reshape(10, 4)
CHUNKY = cloudckpt.Config(chunk_bytes=96, pack_bytes=4096)


def state() -> dict[str, Any]:
    """Every data type, an empty and a 0-dim tensor, a tied one, names of every kind, chunks with padding."""
    made: dict[str, Any] = {name: _values(name) for name in (*NATIVE, *FLOATS, *OTHERS)}
    weight = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    nested = {"a/b": {"c": torch.arange(3)}, "..": torch.ones(2), "é": [torch.zeros(1), torch.full((), 3.5)]}
    return {
        "types": made,
        "model": {"embed": weight, "head": weight},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "names": nested,
        ("t", 1): np.arange(4, dtype=">i4"),
        "cube": torch.arange(4 * 5 * 6, dtype=torch.int16).reshape(4, 5, 6),
    }


def _values(name: str) -> torch.Tensor:
    kind = getattr(torch, name)
    bits = torch.arange(24 * dtype(name).itemsize, dtype=torch.uint8) % 64
    return (bits.reshape(6, -1) % 2).view(kind) if name == "bool" else bits.reshape(6, -1).view(kind)


def bits_by_path(held: Any, path: str = "") -> dict[str, str]:
    """The bytes of every tensor and array in a state, by dotted path."""
    if isinstance(held, torch.Tensor):
        return {path: held.contiguous().flatten().view(torch.uint8).numpy().tobytes().hex()}
    if isinstance(held, np.ndarray):
        return {path: held.tobytes().hex()}
    items = held.items() if isinstance(held, dict) else enumerate(held)
    found: dict[str, str] = {}
    for key, value in items:
        found |= bits_by_path(value, f"{path}.{key}" if path else str(key))
    return found


def save_shared(url: str, layout: str, compression: str | None, options: Mapping[str, Any] | None) -> None:
    """On one rank as it is; on several, each has some rows of one more tensor."""
    held = state()
    if torch.distributed.is_initialized():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        held = {"rows": distribute_tensor(ROWS.clone(), mesh, [Shard(0)]), **held}
    chosen = {"layout": layout, "compression": compression, "storage_options": options, "config": CHUNKY}
    cloudckpt.save(held, url, **chosen)


def irregular_state() -> dict[str, Any]:
    """Rows in parts of 3, 2, 3 and 2; no zarr name for the second tensor's type."""
    edges = [0, 3, 5, 8, 10]
    rows = torch.from_numpy(saved.IRREGULAR.copy())
    raw = torch.from_numpy(saved.IRREGULAR_RAW.copy()).view(torch.complex32)
    held = {}
    for name, whole in (("w", rows), ("raw", raw)):
        zero, rest = (0,) * (whole.dim() - 1), tuple(whole.shape[1:])
        pieces = [Piece((a, *zero), (a, *zero), (b - a, *rest)) for a, b in itertools.pairwise(edges)]
        held[name] = ShardedTensor(whole, whole.shape, pieces=pieces)
    return held


def save_irregular(url: str, layout: str, compression: str | None, options: Mapping[str, Any] | None) -> None:
    cloudckpt.save(irregular_state(), url, layout=layout, compression=compression, storage_options=options)


def write_shared_set(folder: Path, ranks: RankPool, remote: str, options: Mapping[str, Any]) -> None:
    """Checkpoints below ``folder`` and, one of them, below the URL ``remote``; and ``set.json`` about them all."""
    shared = bits_by_path({"rows": ROWS, **state()})
    irregular = bits_by_path({"w": saved.IRREGULAR, "raw": saved.IRREGULAR_RAW})
    told = []
    for name, num_ranks, save, *how in (
        ("packed", 1, save_shared, "packed", None),
        ("packed-zstd", 2, save_shared, "packed", "zstd"),
        ("zarr", 2, save_shared, "zarr", None),
        ("zarr-zstd", 1, save_shared, "zarr", "zstd"),
        ("irregular", 1, save_irregular, "packed", None),
        ("irregular-zarr", 1, save_irregular, "zarr", "zstd"),
    ):
        if num_ranks == 1:
            save(str(folder / name), *how, None)
        else:
            ranks.run(num_ranks, save, str(folder / name), *how, None)
        told.append(describe(folder, name, folder / name, shared if save is save_shared else irregular))
    ranks.run(2, save_shared, f"{remote}/step-00000001", "packed", None, options)
    told.append(describe(folder, "remote", f"{remote}/step-00000001", shared, options))
    second = {**state(), "floats": torch.ones(2)}
    with cloudckpt.Checkpointer(folder / "run", incremental=True) as run:
        run.save(1, {**second, "floats": torch.zeros(2)})
        run.save(2, second)
    told.append(describe(folder, "run/step-00000002", folder / "run/step-00000002", bits_by_path(second)))
    (folder / "set.json").write_text(json.dumps(told))


def describe(
    folder: Path, name: str, url: str | Path, bits: Mapping[str, str], options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    label = name.replace("/", "-")
    for kind, chosen in (("references", {"template": True}), ("plain", {"plain_types": True})):
        made = cloudckpt.references(url, storage_options=options, **chosen)
        (folder / f"{label}.{kind}.json").write_text(json.dumps(made))
    with cloudckpt.open_checkpoint(url, storage_options=options) as checkpoint:
        layout = checkpoint.manifest.document.layout
        arrays = {array.name: _described(array, bits) for array in checkpoint.arrays.values()}
    local = [path.relative_to(folder).as_posix() for path in sorted((folder / name).glob("*/*.zarr.zip"))]
    roots = [path.relative_to(folder).as_posix() for path in (folder / name).glob("*.zarr")]
    return {
        "layout": layout,
        "packs": [] if "run/" in name else local,
        "root": roots[0] if roots else None,
        "remote": options is not None,
        "remote_options": dict(options or {}),
        "reference_options": {},
        "references": f"{label}.references.json",
        "plain_references": f"{label}.plain.json",
        "arrays": arrays,
    }


def _described(array: cloudckpt.checkpoint.ArrayInfo, bits: Mapping[str, str]) -> dict[str, Any]:
    kind = dtype(array.dtype)
    return {
        "bits": bits[array.path],
        "stored_shape": [*array.shape, *kind.trailing],
        "dtype": array.dtype,
        "regular": array.grid.is_regular,
        "extended": kind.numpy is not None and kind.numpy.isbuiltin == 2,
    }
