"""Lightning: checkpoints at any URL, sharded ones included.

``Trainer(plugins=[CheckpointIO()])`` for one device and DDP; ``strategy=ModelParallelStrategy(...)`` beside it where
the model is sharded. Everything else stays as it is: `ModelCheckpoint`, ``fit(ckpt_path="s3://...")``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO as LightningCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy as LightningModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from cloudckpt._async import async_save
from cloudckpt._load import load
from cloudckpt._read import read
from cloudckpt._save import save
from cloudckpt.background.pending import PendingSave
from cloudckpt.checkpoint import open_checkpoint
from cloudckpt.config import Config
from cloudckpt.errors import InvalidStateError, MismatchError
from cloudckpt.retention import remove_checkpoint, remove_replaced
from cloudckpt.store.base import Store
from cloudckpt.store.paths import parent
from cloudckpt.store.resolve import resolve, url_text

_Removal = tuple[str | os.PathLike[str], Callable[[Store, str], None], Mapping[str, Any]]

_SHARDED = ("state_dict", "optimizer_states")
"""What of Lightning's dict is sharded. All else is the first rank's, as far as it is no DTensor."""


class CheckpointIO(LightningCheckpointIO):
    """Saves Lightning's checkpoints as cloudckpt checkpoints. A path of Lightning's is the URL of one.

    A path that is saved to again is replaced, as a file would be, once the new one is committed. ``background``: a save
    returns once there is a copy in host memory; what is to be removed stays until the save before it is durable, and
    errors are raised by the next save, or at the end of the fit.

    ``allow_pickle``: for hyperparameters and callback states that are no plain values. Without it nothing executes on
    a load, whatever ``weights_only`` says.
    """

    def __init__(
        self,
        *,
        storage_options: Mapping[str, Any] | None = None,
        background: bool = False,
        compression: Any = None,
        allow_pickle: bool = False,
        config: Config | None = None,
    ) -> None:
        self._storage_options = dict(storage_options or {})
        self._background = background
        self._compression = compression
        self._allow_pickle = allow_pickle
        self._config = config or Config()
        self._pending: PendingSave | None = None
        self._removals: list[_Removal] = []
        """Put off until the pending save is durable."""
        self._alone: dist.ProcessGroup | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Called by one rank, which saves alone. Raises what `cloudckpt.save` raises."""
        self.save(checkpoint, path, storage_options=storage_options, group=self._own_group())

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Everything, in CPU memory, or where ``map_location``, a device, says. Every rank that calls it reads all."""
        if callable(map_location) or isinstance(map_location, Mapping):
            raise InvalidStateError(f"map_location must be a device, not {map_location!r:.100}")
        self.settle()
        checkpoint = self._read(path)
        if map_location is not None:
            checkpoint = tree_map_only(torch.Tensor, lambda tensor: tensor.to(map_location), checkpoint)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Called by one rank. What is no checkpoint of this library is left alone."""
        self._removals.append((path, remove_checkpoint, self._storage_options))
        if self._pending is None:
            self.settle()

    def teardown(self) -> None:
        """Waits for the background save, and raises what it has failed with."""
        self.settle()

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Collective over ``group`` (None: all ranks), whose first rank tidies up."""
        self.settle()
        options = {**self._storage_options, **(storage_options or {})}
        arguments: dict[str, Any] = {
            "storage_options": options,
            "group": group,
            "compression": self._compression,
            "overwrite": True,
            "step": checkpoint.get("global_step"),
            "allow_pickle": self._allow_pickle,
            "config": self._config,
        }
        if self._background:
            self._pending = async_save(checkpoint, path, **arguments)
        else:
            save(checkpoint, path, **arguments)
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            self._removals.append((path, remove_replaced, options))
        if not self._background:
            self.settle()

    def load_into(
        self, target: dict[str, Any], path: str | os.PathLike[str], tree: Mapping[str, Any], *, strict: bool
    ) -> dict[str, Any]:
        """Fill the sharded parts that ``target`` holds, and add all that was saved beside them. Collective."""
        state = {**self._read(path, [key for key in tree if key not in _SHARDED]), **target}
        is_whole = all(key in state for key in tree)
        report = load(
            state,
            path,
            strict=strict and is_whole,
            storage_options=self._storage_options,
            allow_pickle=self._allow_pickle,
            config=self._config,
        )
        if strict and report.missing:
            raise MismatchError(f"{path} lacks {', '.join(report.missing[:10])}", missing=report.missing)
        return state

    def tree(self, path: str | os.PathLike[str]) -> Mapping[str, Any]:
        """What was saved, without tensors."""
        self.settle()
        with open_checkpoint(path, storage_options=self._storage_options, config=self._config) as opened:
            tree: Mapping[str, Any] = opened.tree
            return tree

    def settle(self) -> None:
        """Wait for the background save, and do what was put off until then. Raises what it has failed with."""
        pending, self._pending = self._pending, None
        removals, self._removals = self._removals, []
        if pending is not None:
            pending.result()
        for path, remove, storage_options in removals:
            folder, name = parent(url_text(path))
            with closing(resolve(folder, storage_options, self._config)) as store:
                remove(store, name)

    def _read(self, path: str | os.PathLike[str], names: list[str] | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = read(
            path, names, storage_options=self._storage_options, allow_pickle=self._allow_pickle, config=self._config
        )
        return checkpoint

    def _own_group(self) -> dist.ProcessGroup | None:
        """Of this rank alone: the others do not call."""
        if not dist.is_initialized():
            return None
        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return self._alone


class ModelParallelStrategy(LightningModelParallelStrategy):
    """Lightning's, but that its checkpoints are saved and loaded through a `CheckpointIO`: each rank its own shards.

    A checkpoint of any number of ranks and any mesh is loaded on any other; so is one that a single device or DDP has
    saved through a `CheckpointIO`, and the reverse.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoint_io: LightningCheckpointIO | None = None
        if not self._save_distributed_checkpoint:
            raise InvalidStateError("save_distributed_checkpoint=False would gather the model on rank 0: leave it out")

    @property
    def checkpoint_io(self) -> CheckpointIO:
        io = self._checkpoint_io = self._checkpoint_io or CheckpointIO()
        if not isinstance(io, CheckpointIO):
            raise InvalidStateError(f"this strategy saves through cloudckpt's CheckpointIO, not {type(io).__name__}")
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: LightningCheckpointIO) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The shards as they lie: they are copied once, when they are saved."""
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        assert self.model is not None
        return get_optimizer_state_dict(self.model, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Collective."""
        path = self.broadcast(os.fspath(filepath))
        if not self.is_global_zero:
            checkpoint = _shards(checkpoint)
        self.checkpoint_io.save(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self,
        checkpoint_path: str | os.PathLike[str],
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Collective. Model and optimizers are in place afterwards; returns all else."""
        path = self.broadcast(os.fspath(checkpoint_path))
        model, optimizers = self.model, [getattr(item, "optimizer", item) for item in self.optimizers]
        assert model is not None
        assert self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        tree = self.checkpoint_io.tree(path)
        target: dict[str, Any] = {"state_dict": get_model_state_dict(model)}
        if optimizers:
            states = [get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]  # makes their state
            if _is_by_index(tree):
                states = [optimizer.state_dict() for optimizer in optimizers]
            target["optimizer_states"] = states
        checkpoint = self.checkpoint_io.load_into(target, path, tree, strict=strict)
        set_model_state_dict(model, checkpoint.pop("state_dict"), options=StateDictOptions(strict=strict))
        for optimizer, state in zip(optimizers, checkpoint.pop("optimizer_states", ()), strict=False):
            if _is_by_index(tree):
                optimizer.load_state_dict(state)
            else:
                set_optimizer_state_dict(model, optimizer, state)
        return checkpoint


def _shards(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What another rank than the first saves: states of callbacks differ where a metric is not reduced."""
    kept = {name: checkpoint[name] for name in (*_SHARDED, "global_step") if name in checkpoint}
    return {**_dtensors({name: value for name, value in checkpoint.items() if name not in kept}), **kept}


def _dtensors(values: Mapping[Any, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            if inner := _dtensors(value):
                found[key] = inner
        elif any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            found[key] = value
    return found


def _is_by_index(tree: Mapping[str, Any]) -> bool:
    """Whether optimizer states are keyed by index, as an optimizer's own are, and not by the parameters' names."""
    return any(isinstance(key, int) for state in tree.get("optimizer_states", ()) for key in state["state"])
