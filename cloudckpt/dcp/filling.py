"""One rank's part of a load: the items of its plan as wants on stored arrays, and as values."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from cloudckpt._read import Made
from cloudckpt.dcp.keys import KeyPath, Notes
from cloudckpt.dcp.plain import saved_bytes
from cloudckpt.errors import FormatError, InvalidStateError, MismatchError
from cloudckpt.format import values
from cloudckpt.format.box import Box
from cloudckpt.format.tree import Node, holds_arrays
from cloudckpt.plan.shard import PieceBox
from cloudckpt.plan.view import View
from cloudckpt.pytorch.shards import LocalShard, check_writable, torch_dtype
from cloudckpt.pytorch.targets import Want
from cloudckpt.pytorch.views import stored_wants


class Filling:
    """``wants``: once they are filled, ``finish`` gives the planner what it has asked for.

    ``keys``: what is stored under DCP's keys.
    Raises MismatchError and InvalidStateError, naming the key, for items that do not fit what is stored.
    """

    def __init__(
        self,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
        view: View,
        keys: Mapping[str, tuple[KeyPath, Node]],
        *,
        notes: Notes,
        allow_pickle: bool,
        cast: bool,
        where: str,
    ) -> None:
        self._planner = planner
        self._view = view
        self._notes = notes
        self._allow_pickle = allow_pickle
        self._cast = cast
        self._where = where
        self._made = Made(view, allow_pickle)
        self._tensors: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        self._values: list[tuple[ReadItem, Any, bytes | None]] = []
        self._known: dict[str, bytes] = {}
        self.wants: list[Want] = []
        for item in items:
            key = item.storage_index.fqn
            if key not in keys:
                raise MismatchError(f"{where} has no {key!r}, which the planner asks for", missing=[key])
            path, node = keys[key]
            if item.type is LoadItemType.BYTE_IO:
                self._add_value(item, path, node)
            else:
                self._add_tensor(item, node)
        self.wants += self._made.wants

    def _add_tensor(self, item: ReadItem, node: Node) -> None:
        key, where = item.storage_index.fqn, self._where
        if not isinstance(node, dict) or node.get("$") != "tensor":
            kinds = {key: ("value", "tensor")}
            raise MismatchError(f"{where}: {key!r} is a value, and the planner asks for a tensor", kinds=kinds)
        array = self._view.array(node)
        box = _stored_box(item, array.shape)
        with torch.no_grad():
            target = self._planner.resolve_tensor(item).detach()
        if tuple(target.shape) != box.shape:
            raise InvalidStateError(f"{key!r}: {box} was asked for, into a tensor of {tuple(target.shape)}")
        stored = torch_dtype(array.dtype, key)
        if target.dtype != stored:
            self._check_cast(key, stored, target.dtype)
        memory = target if _is_plain(target) else torch.empty(box.shape, dtype=stored)
        piece = PieceBox((0,) * len(box.shape), box.offset, box.shape)
        shard = LocalShard(key, array.dtype, array.shape, (piece,), memory, placed=True)
        check_writable(shard, memory)
        self.wants += stored_wants(array, shard)
        self._tensors.append((item, target, memory))

    def _check_cast(self, key: str, stored: torch.dtype, dtype: torch.dtype) -> None:
        if not self._cast:
            dtypes = {key: (str(stored), str(dtype))}
            raise MismatchError(f"{self._where}: {key!r} is {stored}, the target {dtype}", dtypes=dtypes)
        try:
            torch.zeros(1, dtype=stored).to(dtype)
        except (RuntimeError, NotImplementedError) as error:
            raise InvalidStateError(f"{key!r}: {stored} does not become {dtype}: {error}") from error

    def _add_value(self, item: ReadItem, path: KeyPath, node: Node) -> None:
        key = item.storage_index.fqn
        if holds_arrays(node):
            self._values.append((item, self._decoded(key, node), None))
            return
        token = json.dumps(node, allow_nan=False)
        if path in self._notes.raw:
            data = self._bytes(key, node)
        elif path in self._notes.streams:
            data = saved_bytes(io.BytesIO(self._bytes(key, node)))
        elif token in self._known:
            data = self._known[token]
        else:
            data = self._known[token] = saved_bytes(self._decoded(key, node))
        self._values.append((item, None, data))

    def _bytes(self, key: str, node: Node) -> bytes:
        value = self._decoded(key, node)
        if not isinstance(value, bytes):
            raise FormatError(f"{self._where}: {key!r} is noted as the bytes of a planner or a BytesIO, and is none")
        return value

    def _decoded(self, key: str, node: Node) -> Any:
        try:
            return values.decode(node, leaf=self._made.leaf, allow_pickle=self._allow_pickle)
        except FormatError as error:
            raise FormatError(f"{self._where}: {key!r}: {error}") from error

    def finish(self) -> None:
        for item, target, memory in self._tensors:
            if memory is not target:
                target.copy_(memory)
            self._planner.commit_tensor(item, target)
        for item, value, data in self._values:
            self._planner.load_bytes(item, io.BytesIO(saved_bytes(value) if data is None else data))


def _stored_box(item: ReadItem, shape: tuple[int, ...]) -> Box:
    """The stored tensor is one chunk to DCP, but a planner may count from any offset in it."""
    start = item.storage_index.offset
    offset = tuple(item.storage_offsets)
    if start is not None and len(start) == len(offset):
        offset = tuple(a + b for a, b in zip(start, offset, strict=True))
    box = Box(offset, tuple(item.lengths))
    if not len(box.offset) == len(box.shape) == len(shape) or any(
        a < 0 or n < 0 or a + n > extent for a, n, extent in zip(box.offset, box.shape, shape, strict=True)
    ):
        raise InvalidStateError(f"{item.storage_index.fqn!r}: the planner asks for {box}, the tensor is {shape}")
    return box


def _is_plain(target: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are its elements, one by one. Others are filled from such a one, by copy_()."""
    return (
        type(target) is torch.Tensor
        and target.layout is torch.strided
        and not (target.is_meta or target.is_conj() or target.is_neg())
    )
