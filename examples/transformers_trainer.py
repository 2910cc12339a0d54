"""Transformers' Trainer: checkpoints in a run, saved in the background, and resumed with a URL.

    python examples/transformers_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py /tmp/trainer

The lines that matter are the two with ``callback``.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from cloudckpt import Checkpointer
from cloudckpt.integrations.transformers import CheckpointCallback


def train(url: str, *, stop_at: int | None = None) -> Trainer:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **size))
    rows = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        save_strategy="no",  # the callback saves
        num_train_epochs=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    with Checkpointer(url, keep_last=2) as run:
        callback = CheckpointCallback(trainer, run, every=5)
        if stop_at is not None:
            stop(trainer, stop_at)
        trainer.train(resume_from_checkpoint=callback.resume())
    return trainer


def stop(trainer: Trainer, step: int) -> None:
    """What a lost job is like: nothing after this step is seen again."""
    take_step = trainer.training_step

    def training_step(*args: object) -> torch.Tensor:
        trainer.control.should_training_stop = trainer.state.global_step + 1 == step
        return take_step(*args)

    trainer.training_step = training_step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default=tempfile.mkdtemp(), help="a folder or URL without checkpoints")
    url = parser.parse_args().run

    whole = train(f"{url}/whole")
    train(f"{url}/parts", stop_at=7)  # in the middle of an epoch
    rest = train(f"{url}/parts")

    pairs = zip(whole.model.parameters(), rest.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    if rest.is_world_process_zero():
        print(f"resumed after step 7; weights equal to the uninterrupted run's after step {rest.state.global_step}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
