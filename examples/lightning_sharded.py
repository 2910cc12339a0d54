"""Lightning with FSDP2: every rank saves and loads its own shards, at any URL, on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/lightning_sharded.py /tmp/sharded

Two lines: ``strategy=ModelParallelStrategy(...)`` from cloudckpt.integrations, and ``plugins=[CheckpointIO()]``.
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from cloudckpt.integrations.lightning import CheckpointIO, ModelParallelStrategy


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(url: str, epochs: int, ckpt_path: str | None = None) -> Net:
    data = TensorDataset(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
    size = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1),
        plugins=[CheckpointIO()],
        callbacks=[ModelCheckpoint(dirpath=url, save_last=True)],
        max_epochs=epochs,
        accelerator="cpu",
        devices=size,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="a folder or URL without checkpoints")
    url = parser.parse_args().run

    whole = fit(f"{url}/whole", 4)
    fit(f"{url}/parts", 2)  # and then the job is gone
    rest = fit(f"{url}/parts", 4, ckpt_path=f"{url}/parts/last.ckpt")

    pairs = zip(whole.parameters(), rest.parameters(), strict=True)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    if dist.get_rank() == 0:
        print("resumed after epoch 2; shards equal to the uninterrupted run's after epoch 4")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
