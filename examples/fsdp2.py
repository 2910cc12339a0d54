"""FSDP2: every rank saves and loads its own shards. Resumes on any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py /tmp/fsdp2
torchrun --standalone --nproc-per-node 4 examples/fsdp2.py /tmp/fsdp2 --last-step 30   # goes on, on 4
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import cloudckpt


def train(url: str, last_step: int) -> dict[int, float]:
    """What a job does: it goes on from the latest step of the run. Returns the losses by step."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # rng=False: this loop draws its batches by step, and random streams belong to one number of ranks.
    state = {"train": cloudckpt.TrainingState(model, optimizer, rng=False)}
    losses = {}
    with cloudckpt.Checkpointer(url) as run:
        try:
            step = run.load(state)
        except cloudckpt.errors.NotFoundError:
            step = 0
        while step < last_step:
            step += 1
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))  # the same on all ranks
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if step % 5 == 0:
                run.async_save(step, state)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="a folder or URL")
    parser.add_argument("--last-step", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")

    whole = train(f"{args.run}/whole-{dist.get_world_size()}", args.last_step)
    train(f"{args.run}/parts", 10)  # and then the job is gone
    rest = train(f"{args.run}/parts", args.last_step)

    # On another number of ranks sums are added up in another order.
    gap = max(abs(loss - whole[step]) for step, loss in rest.items())
    assert gap < 1e-6, gap
    if dist.get_rank() == 0:
        print(f"resumed at step {min(rest)}; losses within {gap:.0e} of the uninterrupted run's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
