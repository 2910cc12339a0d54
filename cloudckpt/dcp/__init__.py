"""Storage for torch.distributed.checkpoint that writes and reads cloudckpt checkpoints."""

from __future__ import annotations

from cloudckpt.dcp.reader import StorageReader
from cloudckpt.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
