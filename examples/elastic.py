"""torchrun's elastic restart: a worker dies and all restart; later the job goes on with fewer.

    python examples/elastic.py             # 4 workers, of which one is killed; then 2
    python examples/elastic.py s3://bucket/run --workers 2 1

`work` is the training script. `main` starts it with torchrun, and compares its losses with an uninterrupted run's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cloudckpt

BATCH = 8  # samples a step, whatever the number of workers


def sample(number: int) -> torch.Tensor:
    return torch.randn(16, generator=torch.Generator().manual_seed(number))


def work(url: str, last_step: int, die_at: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The position in the data is one number for the whole job, so that it means the same to any number of workers.
    state = {"train": cloudckpt.TrainingState(model, optimizer, rng=False), "samples_seen": 0}
    with cloudckpt.Checkpointer(url, on_error="warn") as run:
        try:
            step = run.load(state)
        except cloudckpt.errors.NotFoundError:
            step = 0
        while step < last_step:
            step += 1
            first = state["samples_seen"]
            mine = range(first + rank, first + BATCH, size)
            loss = model(torch.stack([sample(number) for number in mine])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["samples_seen"] = first + BATCH
            if die_at == step and rank == size - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            mean = loss.detach() / size
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} from sample {first} on {size}: {mean.item():.8f}", flush=True)
            if step % 5 == 0:
                run.save(step, state)
    dist.destroy_process_group()


def launch(workers: int, url: str, last_step: int, *, die_at: int = 0) -> dict[int, tuple[int, int, float]]:
    """Run `work` under torchrun. Returns sample, number of workers and loss by step; of repeated steps the last."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), "--max-restarts", "1"]
    command += [__file__, url, "--last-step", str(last_step), "--die-at", str(die_at)]
    # Else torchrun keeps one store for all restarts, and workers can find what the dead ones have left in it.
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run([sys.executable, "-m", *command], env=env, stdout=subprocess.PIPE, text=True, check=True)
    told = {}
    for line in done.stdout.splitlines():
        print(line)
        words = line.replace(":", "").split()
        told[int(words[1])] = int(words[4]), int(words[6]), float(words[7])
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", help="a folder or URL without checkpoints")
    parser.add_argument("--workers", type=int, nargs=2, default=(4, 2), help="before and after (default: 4 2)")
    parser.add_argument("--last-step", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--die-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(args.run, args.last_step, args.die_at)
        return

    url = args.run or tempfile.mkdtemp()
    before, after = args.workers
    whole = launch(after, f"{url}/whole", 20)
    told = launch(before, f"{url}/elastic", 10, die_at=8)  # restarts from step 5
    told |= launch(after, f"{url}/elastic", 20)

    assert [told[step][1] for step in (10, 11)] == [before, after]
    assert all(told[step][0] == whole[step][0] == (step - 1) * BATCH for step in range(1, 21))
    gap = max(abs(told[step][2] - whole[step][2]) for step in whole)
    assert gap < 1e-6, gap
    print(f"one worker killed, {before} -> {after} workers: every sample in its turn, losses within {gap:.0e}")


if __name__ == "__main__":
    main()
