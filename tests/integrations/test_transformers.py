"""Transformers' Trainer, saved to a run and resumed from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.errors import InvalidStateError, NotFoundError, StoreError
from tests.examples.within import run_here
from tests.field.places import Place

pytest.importorskip("transformers")

from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from cloudckpt.integrations.transformers import CheckpointCallback

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*")


def make_trainer(folder: Path, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, attention_dropout=0.1, tie_word_embeddings=True, **size))
    rows = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = {
        "output_dir": str(folder),
        "save_strategy": "no",
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return Trainer(model, TrainingArguments(**settings | arguments), train_dataset=data, eval_dataset=data[:4])


class Stop(TrainerCallback):
    def __init__(self, step: int, number: signal.Signals | None = None) -> None:
        self._step, self._signal = step, number

    def on_step_begin(self, args, state, control, **held):
        if self._signal is not None and state.global_step == self._step:
            os.kill(os.getpid(), self._signal)

    def on_step_end(self, args, state, control, **held):
        if self._signal is None and state.global_step == self._step:
            control.should_training_stop = True


def history(trainer: Trainer) -> dict[tuple[int, str], float]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {(log["step"], name): log[name] for log in trainer.state.log_history for name in names if name in log}


def same_weights(one: Trainer, other: Trainer) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize(("stop", "accumulation"), [(6, 1), (8, 1), (3, 2)], ids=["mid-epoch", "epoch", "accumulated"])
def test_resumes_as_if_it_had_not_stopped(tmp_path: Path, stop: int, accumulation: int):
    whole = make_trainer(tmp_path, gradient_accumulation_steps=accumulation)
    whole.train()
    with cloudckpt.Checkpointer(tmp_path / "run") as run:
        first = make_trainer(tmp_path, gradient_accumulation_steps=accumulation)
        first.add_callback(Stop(stop))
        callback = CheckpointCallback(first, run, every=3)
        assert callback.resume() is None
        first.train()
        assert run.latest() == stop

        rest = make_trainer(tmp_path, gradient_accumulation_steps=accumulation)
        rest.train(resume_from_checkpoint=CheckpointCallback(rest, run, every=3).resume())
        assert run.latest() == rest.state.global_step == whole.state.global_step
    assert same_weights(rest, whole)
    assert history(rest) == history(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is saved locally"


@pytest.mark.parametrize("place", ["local", "juicefs"], indirect=True)
def test_saves_beside_the_trainers_own_and_restores_other_callbacks(place: Place, tmp_path: Path):
    settings = {"save_strategy": "steps", "save_steps": 3, "metric_for_best_model": "loss", "max_steps": 7}
    settings |= {"load_best_model_at_end": True, "restore_callback_states_from_checkpoint": True}
    with cloudckpt.Checkpointer(place.root, storage_options=place.options, config=place.config(), keep_last=2) as run:
        trainer = make_trainer(tmp_path, **settings)
        stopping = EarlyStoppingCallback(early_stopping_patience=5)
        stopping.early_stopping_patience_counter = 2
        trainer.add_callback(stopping)
        CheckpointCallback(trainer, run)
        trainer.train()
        run.prune()
        assert run.steps() == [6, 7]

        again = make_trainer(tmp_path, **settings | {"max_steps": 9})
        again.add_callback(EarlyStoppingCallback(early_stopping_patience=5))
        callback = CheckpointCallback(again, run)
        again.train(resume_from_checkpoint=callback.resume(6))
        assert again.state.global_step == 9
        assert (6, "loss") in history(again)
        assert (6, "eval_loss") in history(again)
        assert again.state.best_metric == min(log.get("eval_loss", 9.0) for log in again.state.log_history)


class Weights(TrainerCallback):
    """After the last step."""

    def on_step_end(self, args, state, control, model=None, **held):
        self.seen = {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("every", [None, 5])
def test_the_last_step_is_saved_as_it_was_and_not_as_the_best(tmp_path: Path, every: int | None):
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1, "max_steps": 4, "learning_rate": 3.0}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = make_trainer(tmp_path, **settings)
    last = Weights()
    trainer.add_callback(last)
    with cloudckpt.Checkpointer(tmp_path / "run") as run:
        CheckpointCallback(trainer, run, every=every)
        trainer.train()
        assert run.latest() == 4
    assert trainer.state.best_model_checkpoint != str(tmp_path / "checkpoint-4")
    saved = cloudckpt.read(tmp_path / "run" / "step-00000004")["train"]["model"]
    assert all(torch.equal(saved[name], weight) for name, weight in last.seen.items())


def test_saves_and_ends_when_it_is_told_to(tmp_path: Path):
    with cloudckpt.Checkpointer(tmp_path / "run", save_on_signal=True) as run:
        trainer = make_trainer(tmp_path)
        trainer.add_callback(Stop(4, signal.SIGTERM))
        CheckpointCallback(trainer, run, every=100)
        trainer.train()
        assert run.preempted
        assert run.steps() == [5]


def test_what_goes_wrong_is_told(tmp_path: Path):
    with cloudckpt.Checkpointer(tmp_path / "run") as run:
        trainer = make_trainer(tmp_path)
        with pytest.raises(InvalidStateError, match="number of steps"):
            CheckpointCallback(trainer, run, every=0)
        callback = CheckpointCallback(trainer, run, every=4)
        with pytest.raises(NotFoundError, match="step 3"):
            callback.resume(3)
        run.save(1, {"w": torch.ones(2)})
        with pytest.raises(InvalidStateError, match="CheckpointCallback"):
            callback.resume()
        trainer.train()
        assert callback.resume() is not None
        with pytest.raises(InvalidStateError, match="resume_from_checkpoint"):
            trainer.train()


def test_a_save_that_fails_is_raised_by_the_run(tmp_path: Path):
    (tmp_path / "run").write_text("in the way")
    run = cloudckpt.Checkpointer(tmp_path / "run" / "below")
    trainer = make_trainer(tmp_path / "out")
    CheckpointCallback(trainer, run, every=100)
    trainer.train()
    with pytest.raises(StoreError, match="run"):
        run.close()


@pytest.mark.parametrize("name", ["transformers_trainer.py", "accelerate_loop.py"])
def test_the_examples(tmp_path: Path, name: str):
    assert "equal to the uninterrupted run's" in run_here(name, str(tmp_path))
