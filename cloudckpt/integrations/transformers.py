"""Transformers: the checkpoints of a ``Trainer`` in a run, saved in the background, and resumed from it."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from cloudckpt.background.pending import PendingSave
from cloudckpt.checkpointer import Checkpointer
from cloudckpt.errors import InvalidStateError, NoBucketError, NotFoundError
from cloudckpt.pytorch.rng import rng_state, set_rng_state
from cloudckpt.pytorch.training import TrainingState


class CheckpointCallback(TrainerCallback):
    """Saves model, optimizer, scheduler, random numbers and the Trainer's own progress to ``run``. Adds itself.

    ::

        callback = CheckpointCallback(trainer, Checkpointer("s3://bucket/run", keep_last=3), every=500)
        trainer.train(resume_from_checkpoint=callback.resume())

    ``every``: how many steps lie between two saves; the last step is saved, too. The Trainer's own checkpoints are then
    not needed: ``save_strategy="no"``. Without ``every`` it saves whenever the Trainer has saved one of its own. A
    save begins once all that belongs to its step, such as an evaluation, is done, and goes on in the background.

    A run with ``save_on_signal`` saves when the job is told to stop, and ends the training. All ranks make the
    callback alike, after the Trainer, and may be others when it is resumed. Whoever made the run closes it.
    """

    def __init__(self, trainer: Trainer, run: Checkpointer, *, every: int | None = None) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise InvalidStateError(f"every must be a number of steps, not {every!r}")
        self._trainer = trainer
        self._run = run
        self._every = every
        self._is_due = False
        self._saved: int | None = None
        self._pending: PendingSave | None = None
        self._found: tuple[int, tempfile.TemporaryDirectory[str]] | None = None
        self._rng: dict[str, Any] | None = None
        trainer.add_callback(self)
        self._come_before_best_model()

    def resume(self, step: int | None = None) -> str | None:
        """What ``Trainer.train(resume_from_checkpoint=...)`` takes, to go on from ``step``, by default the latest.

        A folder with the Trainer's progress; all else is loaded when the training begins. None where nothing was saved
        yet. Collective. Raises what `Checkpointer.load` raises, but for an empty run.
        """
        state = {_PROGRESS: ""}
        try:
            step = self._run.load(state, step, strict=False)
        except NoBucketError:
            raise
        except NotFoundError:
            if step is not None:
                raise
            return None
        if not state[_PROGRESS]:
            raise InvalidStateError(f"step {step} of {self._run} was not saved by a CheckpointCallback")
        folder = tempfile.TemporaryDirectory(prefix="cloudckpt-")
        (Path(folder.name) / TRAINER_STATE_NAME).write_text(state[_PROGRESS])
        self._found = step, folder
        self._pass_over(folder.name)
        return folder.name

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **held: Any
    ) -> None:
        found, self._found = self._found, None
        self._is_due, self._saved, self._rng = False, None, None
        if found is None:
            return
        step, folder = found
        folder.cleanup()
        if state.global_step != step:
            raise InvalidStateError("what resume() returned was not passed on: train(resume_from_checkpoint=...)")
        self._run.load({"train": self._training(held)}, step, strict=False)
        self._saved, self._rng = step, rng_state()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **held: Any
    ) -> None:
        self._save_if_due(state, control, held)
        if self._rng is not None:
            set_rng_state(self._rng)
            if float(state.epoch).is_integer():
                self._rng = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **held: Any) -> None:
        self._save_if_due(state, control, held)
        if self._rng is not None:  # the batches that were passed over have drawn some
            set_rng_state(self._rng)
            self._rng = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **held: Any) -> None:
        if self._run.save_due(state.global_step):
            self._is_due = control.should_training_stop = True
        if self._every is not None and state.global_step % self._every == 0:
            self._is_due = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **held: Any) -> None:
        if self._every is None:
            self._is_due = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **held: Any) -> None:
        self._save_last(state, control, held)
        if self._pending is not None:
            self._pending.wait()

    def _save_last(self, state: TrainerState, control: TrainerControl, held: dict[str, Any]) -> None:
        if self._every is not None:
            self._is_due = True
        self._save_if_due(state, control, held)

    def _save_if_due(self, state: TrainerState, control: TrainerControl, held: dict[str, Any]) -> None:
        is_due, self._is_due = self._is_due, False
        if not is_due or state.global_step == self._saved:
            return
        saved: dict[str, Any] = {"train": self._training(held)}
        if state.is_world_process_zero:  # what others have logged differs, in run times
            saved[_PROGRESS] = self._progress(state, control)
        self._pending = self._run.async_save(state.global_step, saved)
        self._saved = state.global_step

    def _training(self, held: dict[str, Any]) -> TrainingState:
        optimizer = held["optimizer"]
        scaler = self._trainer.accelerator.scaler
        extra = {} if scaler is None else {"scaler": scaler}
        return TrainingState(
            held["model"], getattr(optimizer, "optimizer", optimizer), held["lr_scheduler"], rng=True, **extra
        )

    def _progress(self, state: TrainerState, control: TrainerControl) -> str:
        """The text of the Trainer's own file, with the states of other callbacks as they are now."""
        stateful: dict[str, Any] = {}
        for callback in (*self._trainer.callback_handler.callbacks, control):
            if isinstance(callback, ExportableState):
                stateful.setdefault(type(callback).__name__, []).append(callback.state())
        fields = dataclasses.asdict(state)
        fields["stateful_callbacks"] = {k: found[0] if len(found) == 1 else found for k, found in stateful.items()}
        return json.dumps(fields, sort_keys=True)

    def _come_before_best_model(self) -> None:
        """With ``load_best_model_at_end`` the weights are those of another step when the training ends.

        There is no hook before: the Trainer's method is replaced, on this one.
        """
        trainer, load = self._trainer, self._trainer._load_best_model

        def load_best_model() -> None:
            handler = trainer.callback_handler
            held = {"model": handler.model, "optimizer": handler.optimizer, "lr_scheduler": handler.lr_scheduler}
            self._save_last(trainer.state, trainer.control, held)
            load()

        trainer._load_best_model = load_best_model

    def _pass_over(self, folder: str) -> None:
        """The Trainer would look for weights in the folder. There is no hook: its method is replaced, on this one."""
        trainer, load = self._trainer, self._trainer._load_from_checkpoint

        def load_from_checkpoint(resume_from_checkpoint: str, model: Any = None) -> None:
            if resume_from_checkpoint != folder:
                load(resume_from_checkpoint, model)

        trainer._load_from_checkpoint = load_from_checkpoint


_PROGRESS = "trainer_state"
"""The key under which the text of the Trainer's ``trainer_state.json`` is saved."""
