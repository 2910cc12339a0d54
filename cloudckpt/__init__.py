"""Checkpoints of distributed PyTorch training, straight to object storage."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cloudckpt import (
    _exit_status,  # noqa: F401  # its hook has to be among the first
    _forks,  # noqa: F401  # registers a hook
)

if TYPE_CHECKING:
    from cloudckpt import dcp, errors
    from cloudckpt._async import async_save
    from cloudckpt._copy import CopyReport, copy
    from cloudckpt._export_dcp import DcpReport, export_dcp
    from cloudckpt._export_hf import ExportReport, export_hf
    from cloudckpt._flights import RunStatus, SaveInFlight
    from cloudckpt._import import import_from
    from cloudckpt._load import LoadReport, load
    from cloudckpt._load_hf import load_hf
    from cloudckpt._migrate import migrate
    from cloudckpt._read import read
    from cloudckpt._save import save
    from cloudckpt._write import Commit
    from cloudckpt.background.pending import PendingSave
    from cloudckpt.checkpoint import Checkpoint, open_checkpoint
    from cloudckpt.checkpointer import Checkpointer
    from cloudckpt.config import Config
    from cloudckpt.format.containers import TensorParts
    from cloudckpt.interop.zarr_references import references
    from cloudckpt.interop.zarr_view import open_zarr
    from cloudckpt.plan.changes import Resize
    from cloudckpt.plan.flat import FlatLayout, FlatParam
    from cloudckpt.plan.history import SavedStep
    from cloudckpt.plan.migrations import migration
    from cloudckpt.plan.names import GlobalNames, global_expert_names, global_layer_names, merge_parts
    from cloudckpt.plan.parallel import ParallelConfig
    from cloudckpt.plan.rename import Concatenate, Split, Stack, Transpose, Unstack
    from cloudckpt.plan.retention import KeepEvery, KeepLast, RetentionPolicy
    from cloudckpt.plan.rules import ShardingRules
    from cloudckpt.pytorch.deferred import register_staging
    from cloudckpt.pytorch.flat import FlatShards
    from cloudckpt.pytorch.per_rank import PerRank
    from cloudckpt.pytorch.sharded import Piece, ShardedTensor
    from cloudckpt.pytorch.training import TrainingState

# Names are imported when they are first used: the command line and the format layer work without torch.
_HOMES = {
    "Checkpoint": "cloudckpt.checkpoint",
    "Checkpointer": "cloudckpt.checkpointer",
    "Commit": "cloudckpt._write",
    "Concatenate": "cloudckpt.plan.rename",
    "Config": "cloudckpt.config",
    "CopyReport": "cloudckpt._copy",
    "DcpReport": "cloudckpt._export_dcp",
    "ExportReport": "cloudckpt._export_hf",
    "FlatLayout": "cloudckpt.plan.flat",
    "FlatParam": "cloudckpt.plan.flat",
    "FlatShards": "cloudckpt.pytorch.flat",
    "GlobalNames": "cloudckpt.plan.names",
    "KeepEvery": "cloudckpt.plan.retention",
    "KeepLast": "cloudckpt.plan.retention",
    "LoadReport": "cloudckpt._load",
    "ParallelConfig": "cloudckpt.plan.parallel",
    "PerRank": "cloudckpt.pytorch.per_rank",
    "PendingSave": "cloudckpt.background.pending",
    "Piece": "cloudckpt.pytorch.sharded",
    "RetentionPolicy": "cloudckpt.plan.retention",
    "RunStatus": "cloudckpt._flights",
    "SaveInFlight": "cloudckpt._flights",
    "SavedStep": "cloudckpt.plan.history",
    "ShardedTensor": "cloudckpt.pytorch.sharded",
    "ShardingRules": "cloudckpt.plan.rules",
    "Resize": "cloudckpt.plan.changes",
    "Split": "cloudckpt.plan.rename",
    "Stack": "cloudckpt.plan.rename",
    "TensorParts": "cloudckpt.format.containers",
    "TrainingState": "cloudckpt.pytorch.training",
    "Transpose": "cloudckpt.plan.rename",
    "Unstack": "cloudckpt.plan.rename",
    "async_save": "cloudckpt._async",
    "copy": "cloudckpt._copy",
    "dcp": "cloudckpt.dcp",
    "errors": "cloudckpt.errors",
    "export_dcp": "cloudckpt._export_dcp",
    "export_hf": "cloudckpt._export_hf",
    "global_expert_names": "cloudckpt.plan.names",
    "global_layer_names": "cloudckpt.plan.names",
    "import_from": "cloudckpt._import",
    "load": "cloudckpt._load",
    "load_hf": "cloudckpt._load_hf",
    "merge_parts": "cloudckpt.plan.names",
    "migrate": "cloudckpt._migrate",
    "migration": "cloudckpt.plan.migrations",
    "open_checkpoint": "cloudckpt.checkpoint",
    "open_zarr": "cloudckpt.interop.zarr_view",
    "read": "cloudckpt._read",
    "references": "cloudckpt.interop.zarr_references",
    "register_staging": "cloudckpt.pytorch.deferred",
    "save": "cloudckpt._save",
}

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Commit",
    "Concatenate",
    "Config",
    "CopyReport",
    "DcpReport",
    "ExportReport",
    "FlatLayout",
    "FlatParam",
    "FlatShards",
    "GlobalNames",
    "KeepEvery",
    "KeepLast",
    "LoadReport",
    "ParallelConfig",
    "PendingSave",
    "PerRank",
    "Piece",
    "Resize",
    "RetentionPolicy",
    "RunStatus",
    "SaveInFlight",
    "SavedStep",
    "ShardedTensor",
    "ShardingRules",
    "Split",
    "Stack",
    "TensorParts",
    "TrainingState",
    "Transpose",
    "Unstack",
    "async_save",
    "copy",
    "dcp",
    "errors",
    "export_dcp",
    "export_hf",
    "global_expert_names",
    "global_layer_names",
    "import_from",
    "load",
    "load_hf",
    "merge_parts",
    "migrate",
    "migration",
    "open_checkpoint",
    "open_zarr",
    "read",
    "references",
    "register_staging",
    "save",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cloudckpt' has no attribute {name!r}")
    module = import_module(home)
    value = module if name in ("dcp", "errors") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
