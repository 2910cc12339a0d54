"""torchtitan's CheckpointManager, saving to a run at any URL.

    torchrun --standalone --nproc-per-node 2 examples/titan.py /tmp/titan

A job of torchtitan's own needs one line before its Trainer is made,

    torchtitan.train.CheckpointManager = cloudckpt.integrations.torchtitan.CheckpointManager

and --checkpoint.folder s3://bucket/run. Here a loop of a few lines stands in for the Trainer, which needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

try:
    import triton  # noqa: F401
except ImportError:  # not with torch for CPUs; torchtitan imports it for kernels that are not used here
    kernels = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules[kernels.__name__] = kernels

from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Checkpoint

from cloudckpt.integrations.torchtitan import CheckpointManager


class Trainer:
    """What torchtitan's has, as far as checkpoints go."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 1e-2})
        self.lr_schedulers = LRSchedulersContainer(self.optimizers, lambda step: 0.95**step)
        self.step = 0
        self.checkpointer = CheckpointManager(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            checkpoint_config=Checkpoint(
                enable=True, folder=folder, interval=5, async_mode="async", last_save_model_only=False, keep_latest_k=2
            ),
            sd_adapter=None,
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def train(self, last_step: int) -> dict[int, float]:
        """The losses by step."""
        losses = {}
        self.checkpointer.load()
        while self.step < last_step:
            self.step += 1
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.step))
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.optimizers.zero_grad()
            losses[self.step] = loss.item()
            self.checkpointer.save(self.step, last_step=self.step == last_step)
        self.checkpointer.close()
        return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="a folder or URL without checkpoints")
    url = parser.parse_args().run
    dist.init_process_group("gloo")

    whole = Trainer(f"{url}/whole").train(20)
    Trainer(f"{url}/parts").train(10)  # and then the job is gone
    rest = Trainer(f"{url}/parts").train(20)

    assert list(rest) == list(range(11, 21))
    assert all(loss == whole[step] for step, loss in rest.items())
    if dist.get_rank() == 0:
        print(f"resumed at step 11; losses equal to the uninterrupted run's up to step 20 ({rest[20]:.6f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
