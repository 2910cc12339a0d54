"""Comparing tensors and arrays of a target with what is stored: what each asks for, and how it is filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from cloudckpt.errors import FormatError
from cloudckpt.format import values
from cloudckpt.format.tree import Node, TreePath, is_array, path_text
from cloudckpt.plan.changes import fits
from cloudckpt.plan.view import View
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.flat import FlatShard
from cloudckpt.pytorch.match import Finish, Match
from cloudckpt.pytorch.resize import resized
from cloudckpt.pytorch.sharded import ShardedTensor, fill_padding
from cloudckpt.pytorch.shards import LocalShard, check_writable, ndarray_shard
from cloudckpt.pytorch.training import Within
from cloudckpt.pytorch.views import stored_wants


class LeafMatcher:
    """Notes in ``match`` what the leaves ask for. ``fills``: of what no stored tensor has, once all is read.

    ``found``: the tensors that something is stored for.
    """

    def __init__(self, view: View, describer: Describer, match: Match) -> None:
        self._view = view
        self._describer = describer
        self._match = match
        self.fills: list[Callable[[], None]] = []
        self.found: list[torch.Tensor | ShardedTensor] = []

    def tensor(
        self,
        target: torch.Tensor | ShardedTensor,
        node: Node,
        path: TreePath,
        keys: values.Path,
        around: Within | None,
    ) -> Finish:
        """``around``: the training state that it is in."""
        text = path_text(path)
        if isinstance(target, DTensor):
            self._match.meshes.add(target.device_mesh)
        array = self._stored(node, path, "tensor")
        if array is None:
            self._describer.note(keys)
            return lambda: target
        if around is not None and not self._describer.has_rule(keys):
            keys = around.cut_like(keys, target)
        # Where the extents may differ, a rule must follow those of the target.
        global_shape = array.shape if self._view.changes.resize(text) is None else None
        self.found.append(target)
        shard = self._describer.shard(target, keys, text, global_shape=global_shape, recorded=node.get("layout"))
        check_writable(shard, target.local if isinstance(target, ShardedTensor) else target)
        self._fill(text, array, [shard], shard.shape)

        def finish() -> Any:
            fill_padding(shard)
            return target

        return finish

    def flat(self, target: FlatShard, node: Node, path: TreePath) -> Finish:
        text = path_text(path)
        array = self._stored(node, path, "tensor")
        if array is None:
            return lambda: target
        if array.shape == target.shape and self._dtypes_fit(text, array.dtype, target.stored(text).dtype):
            self._match.wants += target.wants(array, text)
        else:
            self._fill(text, array, target.boxes(text), target.shape)
        return lambda: target

    def ndarray(self, target: npt.NDArray[Any], node: Node, path: TreePath) -> Finish:
        text = path_text(path)
        shard = ndarray_shard(target, text)[0]
        array = self._stored(node, path, "ndarray")
        if array is None:
            return lambda: target
        check_writable(shard, target)
        stored_dtype, dtype = node.get("numpy"), target.dtype.name if target.dtype.isbuiltin == 2 else target.dtype.str
        if stored_dtype != dtype:
            self._match.problems.dtypes[text] = (stored_dtype, dtype)
        elif array.dtype != shard.dtype:
            raise FormatError(f"{text!r}: a numpy array of {stored_dtype} does not fit its stored {array.dtype} array")
        elif array.shape != shard.shape and shard.shape != target.shape:  # raw bytes, which cannot be resized
            self._match.problems.shapes[text] = (tuple(node["shape"]), tuple(target.shape))
        else:
            self._fill(text, array, [shard], shard.shape)
        return lambda: target

    def _stored(self, node: Node, path: TreePath, kind: str) -> VirtualArray | None:
        """What a target asks for; None where something else is stored there."""
        self._match.ask(node, path)
        if not is_array(node) or node["$"] != kind:
            self._match.refuse(node, path, kind)
            return None
        return self._view.array(node)

    def _fill(self, text: str, array: VirtualArray, shards: Sequence[LocalShard], shape: tuple[int, ...]) -> None:
        """``shards``: what this rank has of a target of ``shape``, each with a memory of its own."""
        fitting = not shards or self._dtypes_fit(text, array.dtype, shards[0].dtype)
        found = self._view.changes.resize(text)
        if found is not None:
            self._match.patterns.add(found[0])
        if array.shape != shape and (found is None or not fits(array.shape, shape, found[1])):
            self._match.problems.shapes[text] = (array.shape, shape)
            return
        if not fitting:
            return
        if array.shape != shape and found is not None:
            self._match.resized[text] = (array.shape, shape)
            parts = [resized(shard, array.shape, found[1]) for shard in shards]
            self.fills += [fill for _, fill in parts]
            shards = [shard for shard, _ in parts]
        self._match.wants += [want for shard in shards for want in stored_wants(array, shard)]

    def _dtypes_fit(self, text: str, stored: str, target: str) -> bool:
        if stored == target:
            return True
        fitting = self._view.changes.casts(stored, target)
        (self._match.cast if fitting else self._match.problems.dtypes)[text] = (stored, target)
        return fitting
