"""Accelerate: a training loop of one's own. Nothing of cloudckpt's is special to it.

python examples/accelerate_loop.py
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py /tmp/accelerate
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

import cloudckpt


def train(url: str, last_step: int) -> dict[int, float]:
    """What a job does: it goes on from the latest step of the run. Returns the losses of this rank by step."""
    # The order of the samples is then a function of the epoch.
    by_epoch = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=by_epoch)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    data = TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    # As they come from prepare(), whatever it has made of them. The position in the data is two plain numbers.
    state = {"train": cloudckpt.TrainingState(model, optimizer, scheduler), "step": 0, "epoch": 0, "batch": 0}
    losses = {}
    with cloudckpt.Checkpointer(url, keep_last=2) as run:
        if run.latest() is not None:
            run.load(state)
        while state["step"] < last_step:
            loader.set_epoch(state["epoch"])
            for batch in accelerator.skip_first_batches(loader, state["batch"]):
                loss = model(batch[0]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                state["step"] += 1
                state["batch"] += 1
                losses[state["step"]] = loss.item()
                if state["step"] % 5 == 0:
                    run.async_save(state["step"], state)
                if state["step"] == last_step:
                    break
            else:
                state["epoch"] += 1
                state["batch"] = 0
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default=tempfile.mkdtemp(), help="a folder or URL without checkpoints")
    url = parser.parse_args().run

    whole = train(f"{url}/whole", 40)
    train(f"{url}/parts", 20)  # and then the job is gone, in the middle of an epoch
    rest = train(f"{url}/parts", 40)

    assert rest == {step: loss for step, loss in whole.items() if step > 20}
    print(f"resumed at step 21; losses equal to the uninterrupted run's up to step 40 ({rest[40]:.6f})")


if __name__ == "__main__":
    main()
