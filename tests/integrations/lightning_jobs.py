"""A tiny Lightning job, for one process or, with a strategy, for the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import cloudckpt
from cloudckpt.errors import CloudckptError
from cloudckpt.integrations.lightning import CheckpointIO, ModelParallelStrategy


class Net(pl.LightningModule):
    def __init__(self, hidden: Any = 16):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, index):
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(1))), batch_size=4)


def fit(
    run: str,
    epochs: int,
    *,
    io: Any = None,
    ckpt_path: str | None = None,
    module: Net | None = None,
    strategy: Any = "auto",
    plugins: list[Any] | None = None,
    devices: int = 1,
    monitor: str | None = "val",
    **settings: Any,
) -> tuple[Net, ModelCheckpoint, pl.Trainer]:
    module = module or Net()
    callback = ModelCheckpoint(
        dirpath=run, filename="{epoch}", monitor=monitor, save_last=True, **{"save_top_k": -1, **settings}
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=[io or CheckpointIO(), *(plugins or [])],
        max_epochs=epochs,
        logger=False,
        callbacks=[callback],
        use_distributed_sampler=False,  # every rank sees all batches: then losses do not depend on their number
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches(), batches() if monitor else None, ckpt_path=ckpt_path)
    return module, callback, trainer


def weights(module: Net) -> dict[str, torch.Tensor]:
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in module.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


class _Place(LightningEnvironment):
    """A rank of a pool, whose process group exists already."""

    def __init__(self) -> None:
        super().__init__()
        self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    creates_processes_externally = True

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._size

    def set_global_rank(self, rank: int) -> None:
        assert rank == self._rank

    def set_world_size(self, size: int) -> None:
        assert size == self._size


def fit_sharded(run: str, epochs: int, ckpt_path: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """What each rank of a pool does; all whole weights."""
    size = torch.distributed.get_world_size()
    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    io = CheckpointIO(**options)
    module, _, _ = fit(
        run, epochs, io=io, ckpt_path=ckpt_path, strategy=strategy, plugins=[_Place()], devices=size, monitor=None
    )
    return weights(module)


class Unreduced(Net):
    """As by Lightning's default, each rank's metric is its own."""

    def validation_step(self, batch, index):
        self.log("val", float(torch.distributed.get_rank()))


def fit_unreduced(run: str) -> None:
    size = torch.distributed.get_world_size()
    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    fit(run, 1, module=Unreduced(), strategy=strategy, plugins=[_Place()], devices=size)


def fit_ddp(run: str, epochs: int, ckpt_path: str | None = None) -> dict[str, torch.Tensor]:
    size = torch.distributed.get_world_size()
    module, _, _ = fit(run, epochs, ckpt_path=ckpt_path, strategy="ddp", plugins=[_Place()], devices=size)
    return weights(module)


def validate_sharded(ckpt_path: str) -> float:
    size = torch.distributed.get_world_size()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1),
        plugins=[_Place()],
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
    )
    (result,) = trainer.validate(Net(), batches(), ckpt_path=ckpt_path, verbose=False)
    return float(result["val"])


def error_of(name: str, *args: Any) -> tuple[str, str]:
    """Class and text of what a function of this module raises."""
    try:
        globals()[name](*args)
    except CloudckptError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def num_writers(path: Path) -> int:
    """How many ranks have written to a checkpoint."""
    with cloudckpt.open_checkpoint(path) as checkpoint:
        return len({Path(entry.key).name[:6] for entry in checkpoint.manifest.objects})
