"""Plain DDP: train, stop, resume, and end where an uninterrupted run does.

torchrun --standalone --nproc-per-node 2 examples/ddp.py /tmp/ddp
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cloudckpt


def train(url: str, last_step: int) -> dict[int, float]:
    """What a job does: it goes on from the latest step of the run. Returns the losses of this rank by step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    torch.manual_seed(dist.get_rank())  # from here on every rank draws its own numbers

    # Parameters are stored under the names of the bare model, and once, not once a rank; random numbers per rank.
    state = {"train": cloudckpt.TrainingState(model, optimizer, scheduler)}
    losses = {}
    with cloudckpt.Checkpointer(url, keep_last=2) as run:
        try:
            step = run.load(state)
        except cloudckpt.errors.NotFoundError:
            step = 0
        while step < last_step:
            step += 1
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if step % 5 == 0:
                run.async_save(step, state)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="a folder or URL without checkpoints")
    url = parser.parse_args().run
    dist.init_process_group("gloo")

    whole = train(f"{url}/whole", 20)
    train(f"{url}/parts", 10)  # and then the job is gone
    rest = train(f"{url}/parts", 20)

    assert rest == {step: loss for step, loss in whole.items() if step > 10}
    if dist.get_rank() == 0:
        print(f"resumed at step 11; losses equal to the uninterrupted run's up to step 20 ({rest[20]:.6f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
