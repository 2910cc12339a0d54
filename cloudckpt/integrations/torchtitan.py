"""torchtitan: its ``CheckpointManager``, with the steps of a run in the place of DCP's files.

::

    torchtitan.train.CheckpointManager = cloudckpt.integrations.torchtitan.CheckpointManager  # before its Trainer

and ``--checkpoint.folder s3://bucket/run``. All other settings of ``checkpoint`` mean what they mean there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchtitan.components import checkpoint as titan

from cloudckpt._load import load
from cloudckpt.background.pending import PendingSave
from cloudckpt.checkpointer import Checkpointer
from cloudckpt.errors import InvalidStateError, MismatchError, NoBucketError, NotFoundError
from cloudckpt.format.keys import parse_step, step_dir


class CheckpointManager(titan.CheckpointManager):
    """Saves to and loads from ``checkpoint.folder``, which may be a URL: then ``dump_folder`` is not put before it.

    ``async_mode``: both kinds save in the background, from buffers that are pinned where there is a device.
    ``keep_latest_k`` is the run's ``keep_last``. ``options``: further ones of `Checkpointer`. What was saved on any
    mesh is loaded on any other; but torchtitan's data loader on as many data-parallel ranks only: leave it out
    otherwise, by ``exclude_from_loading``. ``initial_load_path`` is a cloudckpt checkpoint, DCP's, or Hugging Face's.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_config: Any,
        base_folder: str = "",
        options: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        is_url = "://" in checkpoint_config.folder
        if is_url and checkpoint_config.last_save_in_hf:
            raise InvalidStateError(
                "last_save_in_hf writes local files only: use `cloudckpt export hf` on the last step"
            )
        super().__init__(*args, checkpoint_config=checkpoint_config, base_folder="" if is_url else base_folder, **rest)
        if self.ft_manager:
            raise InvalidStateError("torchft's checkpoints of each replica are not supported")
        self._run: Checkpointer | None = None
        if not self.enable:
            return
        if checkpoint_config.async_mode != titan.AsyncMode.DISABLED:
            self.async_mode, self.enable_staging = titan.AsyncMode.ASYNC, False
        self._options = {"keep_last": self.keep_latest_k or None, **(options or {})}
        self._run = Checkpointer(self.folder, **self._options)

    def close(self) -> None:
        """Waits for what is still being saved."""
        super().close()
        if (run := getattr(self, "_run", None)) is not None:
            run.close()

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """The given step, or the latest. Collective. Returns whether anything was loaded."""
        if self._run is None:
            return False
        try:
            found = self._run.load({}, None if step == -1 else step, strict=False)  # rank 0 finds it for all
        except NoBucketError:
            raise
        except NotFoundError:
            if step != -1:
                raise
            return self._load_initial()
        self._load_from(self._create_checkpoint_id(found), model_only=found == 0)
        return True

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> PendingSave | None:
        if to_hf:
            super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
            return None
        assert self._run is not None
        step = parse_step(checkpoint_id.rpartition("/")[2])
        assert step is not None
        if async_mode != titan.AsyncMode.DISABLED:
            return self._run.async_save(step, state_dict, overwrite=True)
        self._run.save(step, state_dict, overwrite=True)
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_hf or Path(checkpoint_id, ".metadata").exists():
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        given = {name: self._options[name] for name in ("storage_options", "group", "config") if name in self._options}
        report = load(state_dict, checkpoint_id, strict=False, **given)
        if report.missing:  # what is there and not asked for does not matter, as with DCP
            raise MismatchError(f"{checkpoint_id} lacks {', '.join(report.missing[:10])}", missing=report.missing)
        self.states[titan.MODEL].load_state_dict(state_dict)

    def _load_initial(self) -> bool:
        if self.initial_load_path and "://" in self.initial_load_path and not self.initial_load_in_hf:
            self._load_from(self.initial_load_path, model_only=self.initial_load_model_only)
            return True
        return bool(super().load())

    def _load_from(self, url: str, *, model_only: bool) -> None:
        self.dcp_load(self._states_to_load(model_only), url, from_hf=False, from_quantized=False)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return f"{folder or self.folder}/{step_dir(step)}"

    def _find_load_step(self, folder: str = "") -> int:
        return -1  # by now there is none

    def _purge_stale_checkpoints(self) -> None:
        """The run does that."""
