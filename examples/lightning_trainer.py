"""Lightning: its own ModelCheckpoint and ckpt_path, with checkpoints at any URL.

    python examples/lightning_trainer.py                   # into a temporary folder
    python examples/lightning_trainer.py s3://bucket/run   # credentials from the environment

The one line is ``plugins=[CheckpointIO(background=True)]``.
"""

from __future__ import annotations

import argparse
import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from cloudckpt.integrations.lightning import CheckpointIO


class Net(pl.LightningModule):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 4))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


def fit(url: str, epochs: int, ckpt_path: str | None = None) -> tuple[Net, ModelCheckpoint]:
    data = TensorDataset(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
    keep = ModelCheckpoint(dirpath=url, filename="{epoch}", monitor="loss", save_top_k=2, save_last=True)
    trainer = pl.Trainer(
        plugins=[CheckpointIO(background=True)],
        callbacks=[keep],
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    return module, keep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default=tempfile.mkdtemp(), help="a folder or URL without checkpoints")
    url = parser.parse_args().run

    whole, _ = fit(f"{url}/whole", 6)
    fit(f"{url}/parts", 3)  # and then the job is gone
    rest, keep = fit(f"{url}/parts", 6, ckpt_path=f"{url}/parts/last.ckpt")

    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))
    print("resumed after epoch 3; weights equal to the uninterrupted run's after epoch 6")
    print("kept:", *sorted(keep.best_k_models), keep.last_model_path, sep="\n  ")


if __name__ == "__main__":
    main()
