"""What DCP saves as bytes: decoded to plain values, with the tensors and arrays inside as arrays of the checkpoint."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.array_names import hashed_name
from cloudckpt.format.dtypes import numpy_name
from cloudckpt.format.tree import Node
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.tree import LeafSpec
from cloudckpt.plan.writes import plan_save
from cloudckpt.pytorch.shards import LocalShard, ndarray_shard, tensor_shard
from cloudckpt.transfer.job import ArrayPlan


class PlainItems:
    """The values of one rank. ``nodes``: by DCP's key.

    ``raw``: keys of bytes in a planner's own form; ``streams``: of BytesIO. ``shards``: what stands in the values of
    tensors and numpy arrays, which no plan of all ranks knows of.
    """

    def __init__(self, planner: SavePlanner, allow_pickle: bool) -> None:
        self.nodes: dict[str, Node] = {}
        self.raw: set[str] = set()
        self.streams: set[str] = set()
        self.shards: list[LocalShard] = []
        self._leaves: list[LeafSpec] = []
        self._planner = planner
        self._allow_pickle = allow_pickle

    def add(self, item: WriteItem) -> None:
        """Raises InvalidStateError, naming the key, for what is not plain."""
        key = item.index.fqn
        value, is_raw = self._value(item)
        if type(value) is io.BytesIO:  # many keep something there that they have pickled by themselves
            value = value.getvalue()
            self.streams.add(key)
        self.nodes[key] = values.encode(value, leaf=self._leaf, allow_pickle=self._allow_pickle, path=(key,))
        if is_raw:
            self.raw.add(key)

    def _value(self, item: WriteItem) -> tuple[Any, bool]:
        planner = self._planner
        kind: Any = type(planner)
        if (
            isinstance(planner, DefaultSavePlanner)
            and kind.resolve_data is DefaultSavePlanner.resolve_data
            and kind.transform_object is DefaultSavePlanner.transform_object
        ):
            return planner.lookup_object(item.index), False  # it would be pickled, just to be unpickled here
        data = planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise InvalidStateError(
                f"{item.index.fqn!r}: the planner announced bytes, and gave a {type(data).__name__}, not a BytesIO"
            )
        return self._loaded(data.getvalue(), item.index.fqn)

    def _loaded(self, data: bytes, key: str) -> tuple[Any, bool]:
        """The value whose ``torch.save`` the planner made; or the bytes, and that they are something else."""
        if not zipfile.is_zipfile(io.BytesIO(data)):
            return data, True
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), False
        except pickle.UnpicklingError as error:
            if self._allow_pickle:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False), False
            raise InvalidStateError(
                f"{key!r}: what the planner saved is not plain data, and can only be looked into by executing it. "
                f"Convert it to plain values, or pass allow_pickle=True to StorageWriter and StorageReader: {error}"
            ) from error
        except RuntimeError:
            return data, True  # a ZIP file of another kind

    def _leaf(self, path: values.Path, obj: Any) -> Node:
        text = values.dotted(path)
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            return {"$": "tensor", "array": self._add(path, tensor_shard(obj, text))}
        if type(obj) is np.ndarray and numpy_name(obj.dtype) is not None:
            shard, name = ndarray_shard(obj, text)
            return {"$": "ndarray", "array": self._add(path, shard), "numpy": name, "shape": list(obj.shape)}
        return None

    def _add(self, path: values.Path, shard: LocalShard) -> str:
        name = hashed_name(path)
        self._leaves.append(LeafSpec(id=name, path=path, dtype=shard.dtype, shape=shard.shape))
        self.shards.append(shard)
        return name

    def arrays(self, *, chunk_bytes: int, compression: str | None) -> ArrayPlan:
        """A plan for the ``shards``, all of it for rank 0: who writes them is who has them."""
        leaves = self._leaves
        specs = [TensorSpec(leaf.id, s.shape, s.itemsize) for leaf, s in zip(leaves, self.shards, strict=True)]
        table = PieceTable.build((i, p.box) for i, shard in enumerate(self.shards) for p in shard.pieces)
        chunks = plan_save(specs, [table], chunk_bytes=chunk_bytes)
        return ArrayPlan(tuple(leaves), tuple(leaf.id for leaf in leaves), chunks, compression)


def saved_bytes(value: Any) -> bytes:
    """As a planner takes it that was saved by DCP."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def dotted_keys(keys: Sequence[str]) -> str:
    """For messages."""
    shown = ", ".join(map(repr, keys[:5]))
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"
