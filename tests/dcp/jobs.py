"""Saving and loading with torch.distributed.checkpoint through this library's storage, as the tests here do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from cloudckpt.config import Config
from cloudckpt.dcp import StorageReader, StorageWriter

SMALL = Config(chunk_bytes=256, rank_timeout_s=20.0, retry_deadline_s=10.0)
"""So that small tensors have several chunks."""


def save(state: dict[str, Any], url: str, options: Mapping[str, Any] | None = None, **more: Any) -> StorageWriter:
    """``more``: what `StorageWriter` takes, and ``planner``, ``process_group``, ``no_dist`` of torch's function."""
    torchs = {name: more.pop(name) for name in ("planner", "process_group", "no_dist") if name in more}
    writer = StorageWriter(url, **{"storage_options": options, "config": SMALL, **more})
    with quiet():
        dcp.save(state, storage_writer=writer, **torchs)
    return writer


def load(state: dict[str, Any], url: str, options: Mapping[str, Any] | None = None, **more: Any) -> StorageReader:
    torchs = {name: more.pop(name) for name in ("planner", "process_group", "no_dist") if name in more}
    reader = StorageReader(url, **{"storage_options": options, "config": SMALL, **more})
    with quiet():
        dcp.load(state, storage_reader=reader, **torchs)
    return reader


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns whenever it works without a process group, and of functions that it may drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def cut(tensor: torch.Tensor, device_mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(tensor, device_mesh, placements)


def blank(state: Any) -> Any:
    """The same with zeros and nothing."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None
