"""Comparing a target state with what is stored, and filling it.

Nothing is changed while comparing: plain values are put in place by ``Match.finish``, once every
tensor has arrived.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import (
    Node,
    TreePath,
    children,
    holds_arrays,
    is_array,
    is_dict,
    is_mapping,
    key_token,
    leaves,
    path_text,
    tree_keys,
)
from cloudckpt.plan.changes import fits
from cloudckpt.plan.view import View, renamed
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.flat import FlatShard, FlatShards
from cloudckpt.pytorch.module_names import load_object, object_state
from cloudckpt.pytorch.optimizers import complete_state, convention_differences, group_differences
from cloudckpt.pytorch.per_rank import PerRank, decode_inline, decode_rank_value
from cloudckpt.pytorch.resize import resized
from cloudckpt.pytorch.sharded import ShardedTensor, fill_padding
from cloudckpt.pytorch.shards import LocalShard, check_writable, ndarray_shard
from cloudckpt.pytorch.stateful import is_stateful
from cloudckpt.pytorch.subclass import is_made_of_tensors, kind_text, stored_parts, tensor_parts
from cloudckpt.pytorch.training import TrainingState, Within
from cloudckpt.pytorch.views import stored_wants

Finish = Callable[[], Any]
"""Puts plain values in place below; returns what now stands here."""


@dataclass
class Problems:
    """Differences between target and checkpoint, by dotted path; ``(stored, target)`` for the last three."""

    missing: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def is_readable(self) -> bool:
        """Whether there is nothing that no option forgives."""
        return not (self.shapes or self.dtypes or self.kinds)


@dataclass(eq=False)
class Match:
    """``wants``: (number of a stored array, shard to fill); several where a target is made of several arrays or boxes.

    ``asked``: the leaves of the (renamed) stored tree that the target has a place for. ``cast`` and
    ``resized``: ``(stored, target)`` dtypes and shapes, by dotted path, where they differ and may;
    ``patterns``: those of ``resize`` that name something in the target. ``meshes``: of the DTensors in it.
    ``declared``: see `TrainingState.declared`.
    """

    wants: list[tuple[int, LocalShard]] = field(default_factory=list)
    asked: set[TreePath] = field(default_factory=set)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    patterns: set[str] = field(default_factory=set)
    declared: dict[str, bool] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    meshes: set[DeviceMesh] = field(default_factory=set)
    finish: Finish = lambda: None
    has_objects: bool = False
    """Whether ``finish`` calls code of the caller's (``load_state_dict``, containers), which may fail."""


def match_state(
    state: Any,
    manifest: Manifest,
    *,
    rank: int,
    world_size: int,
    allow_pickle: bool,
    describer: Describer,
    view: View | None = None,
) -> Match:
    """Walk both trees. Differences are collected, not raised; InvalidStateError is for unusable targets.

    ``view``: the stored state under the names that the target has (without it, its own), and what may be changed.
    """
    view = view or renamed(manifest, None)
    matcher = _Matcher(view, rank, world_size, allow_pickle, describer)
    finish = matcher.walk(state, view.tree, (), ())

    def fill_and_finish() -> Any:
        for fill in matcher.fills:
            fill()
        return finish()

    matcher.match.finish = fill_and_finish
    _check_shared_memory(manifest, matcher.match.wants)
    return matcher.match


def _check_shared_memory(manifest: Manifest, wants: list[tuple[int, LocalShard]]) -> None:
    """Tied targets can only be filled from tensors that are equal in the checkpoint, too."""
    seen: dict[Any, tuple[int, LocalShard]] = {}
    for number, shard in wants:
        first, other = seen.setdefault(shard.identity, (number, shard))
        if first != number and not manifest.same_bytes(first, number):
            raise InvalidStateError(
                f"{other.text!r} and {shard.text!r} are the same memory in the target, but are stored as two tensors "
                "that differ: untie them, or load one of them only"
            )


class _Matcher:
    def __init__(self, view: View, rank: int, world_size: int, allow_pickle: bool, describer: Describer) -> None:
        self.view = view
        self.rank = rank
        self.world_size = world_size
        self.allow_pickle = allow_pickle
        self.describer = describer
        self.match = Match()
        self.fills: list[Callable[[], None]] = []
        self.around: list[Within] = []

    def walk(self, target: Any, node: Node, path: TreePath, keys: values.Path) -> Finish:
        if isinstance(target, PerRank):
            return self.per_rank(target, node, path)
        if is_made_of_tensors(target):
            return self.subclass(target, node, path, keys)
        if isinstance(target, (torch.Tensor, ShardedTensor)):
            return self.tensor(target, node, path, keys)
        if isinstance(target, np.ndarray):
            return self.ndarray(target, node, path)
        if isinstance(target, FlatShard):
            return self.flat(target, node, path)
        if isinstance(target, FlatShards):
            finish = self.walk(dict(target), node, path, keys)
            return lambda: (finish(), target)[1]
        if isinstance(target, TrainingState):
            return self.training(target, node, path, keys)
        if is_stateful(target):
            self.match.has_objects = True
            state = object_state(target)
            if isinstance(target, torch.optim.Optimizer):
                differences = group_differences(state, node, path_text(path))
                self.match.problems.kinds.update(differences)
                if path_text(path) in differences:  # all of it is of another convention
                    self.ask(node, path)
                    return lambda: target
                complete_state(
                    target,
                    state,
                    node,
                    self.view,
                    lambda inner, shape: self.describer.local_shape((*keys, *inner), shape),
                )
            finish = self.walk(state, node, path, keys)
            return lambda: _load_into(target, finish())
        if isinstance(target, dict) and is_mapping(node):
            differences = convention_differences(target, node, path_text(path))
            if differences:
                self.match.problems.kinds.update(differences)
                self.ask(node, path)
                return lambda: target
            return self.mapping(target, node, path, keys)
        if isinstance(target, (list, tuple, deque)) and (holds_arrays(node) or _holds_targets(target)):
            return self.sequence(target, node, path, keys)
        if isinstance(target, (SimpleNamespace, Namespace)) and is_mapping(node):
            finish = self.mapping(vars(target), node, path, keys)
            return lambda: (finish(), target)[1]
        return self.plain(target, node, path)

    def training(self, target: TrainingState, node: Node, path: TreePath, keys: values.Path) -> Finish:
        self.match.has_objects = True
        if not is_mapping(node):
            self.ask(node, path)
            self.match.problems.kinds[path_text(path)] = (_describe(node), "TrainingState")
            return lambda: target

        def local_shape(
            inner: values.Path, parameter: str, own: tuple[int, ...], shape: tuple[int, ...]
        ) -> tuple[int, ...]:
            if len(shape) == len(own) and not self.describer.has_rule((*keys, *inner)):
                like = self.describer.local_shape((*keys, "model", parameter), shape)
                return like if like == own else shape
            return self.describer.local_shape((*keys, *inner), shape)

        part = target.target(node, self.view, local_shape)
        self.match.declared.update(target.declared(keys, part.states, is_open=part.is_open))
        stored = dict(children(node) or ())
        for key, kinds in part.kinds.items():
            inner = (*path, key_token(key))
            self.ask(stored[key], inner)
            self.match.problems.kinds[path_text(inner)] = kinds
        self.match.asked.update(
            below for below, _ in leaves(node, path) if not target.includes(tree_keys(below[len(path) :]))
        )
        self.around.append(Within(keys, target))
        fills = [self.mapping(state, node, path, keys) for state in part.states]
        self.around.pop()

        def finish() -> TrainingState:
            for fill in fills:
                fill()
            part.apply()
            return target

        return finish

    def tensor(self, target: torch.Tensor | ShardedTensor, node: Node, path: TreePath, keys: values.Path) -> Finish:
        text = path_text(path)
        if isinstance(target, DTensor):
            self.match.meshes.add(target.device_mesh)
        array = self.stored(node, path, "tensor")
        if array is None:
            self.describer.note(keys)
            return lambda: target
        if self.around and not self.describer.has_rule(keys):
            keys = self.around[-1].cut_like(keys, target)
        # Where the extents may differ, a rule must follow those of the target.
        global_shape = array.shape if self.view.changes.resize(text) is None else None
        shard = self.describer.shard(target, keys, text, global_shape=global_shape, recorded=node.get("layout"))
        check_writable(shard, target.local if isinstance(target, ShardedTensor) else target)
        self.fill(text, array, [shard], shard.shape)

        def finish() -> Any:
            fill_padding(shard)
            return target

        return finish

    def flat(self, target: FlatShard, node: Node, path: TreePath) -> Finish:
        text = path_text(path)
        array = self.stored(node, path, "tensor")
        if array is None:
            return lambda: target
        if array.shape == target.shape and self.dtypes_fit(text, array.dtype, target.stored(text).dtype):
            self.match.wants += target.wants(array, text)
        else:
            self.fill(text, array, target.boxes(text), target.shape)
        return lambda: target

    def ndarray(self, target: npt.NDArray[Any], node: Node, path: TreePath) -> Finish:
        text = path_text(path)
        shard = ndarray_shard(target, text)[0]
        array = self.stored(node, path, "ndarray")
        if array is None:
            return lambda: target
        check_writable(shard, target)
        stored_dtype, dtype = node.get("numpy"), target.dtype.name if target.dtype.isbuiltin == 2 else target.dtype.str
        if stored_dtype != dtype:
            self.match.problems.dtypes[text] = (stored_dtype, dtype)
        elif array.dtype != shard.dtype:
            raise FormatError(f"{text!r}: a numpy array of {stored_dtype} does not fit its stored {array.dtype} array")
        elif array.shape != shard.shape and shard.shape != target.shape:  # raw bytes, which cannot be resized
            self.match.problems.shapes[text] = (tuple(node["shape"]), tuple(target.shape))
        else:
            self.fill(text, array, [shard], shard.shape)
        return lambda: target

    def stored(self, node: Node, path: TreePath, kind: str) -> VirtualArray | None:
        """What a target asks for; None where something else is stored there."""
        self.ask(node, path)
        if not is_array(node) or node["$"] != kind:
            self.match.problems.kinds[path_text(path)] = (_describe(node), kind)
            return None
        return self.view.array(node)

    def fill(self, text: str, array: VirtualArray, shards: Sequence[LocalShard], shape: tuple[int, ...]) -> None:
        """``shards``: what this rank has of a target of ``shape``, each with a memory of its own."""
        fitting = not shards or self.dtypes_fit(text, array.dtype, shards[0].dtype)
        found = self.view.changes.resize(text)
        if found is not None:
            self.match.patterns.add(found[0])
        if array.shape != shape and (found is None or not fits(array.shape, shape, found[1])):
            self.match.problems.shapes[text] = (array.shape, shape)
            return
        if not fitting:
            return
        if array.shape != shape and found is not None:
            self.match.resized[text] = (array.shape, shape)
            parts = [resized(shard, array.shape, found[1]) for shard in shards]
            self.fills += [fill for _, fill in parts]
            shards = [shard for shard, _ in parts]
        self.match.wants += [want for shard in shards for want in stored_wants(array, shard)]

    def dtypes_fit(self, text: str, stored: str, target: str) -> bool:
        if stored == target:
            return True
        fitting = self.view.changes.casts(stored, target)
        (self.match.cast if fitting else self.match.problems.dtypes)[text] = (stored, target)
        return fitting

    def subclass(self, target: torch.Tensor, node: Node, path: TreePath, keys: values.Path) -> Finish:
        """Its inner tensors are filled where they are."""
        text = path_text(path)
        parts, stored = tensor_parts(target, text), stored_parts(node)
        if stored is None or kind_text(stored) != kind_text(parts):
            self.ask(node, path)
            self.match.problems.kinds[text] = (_describe(node), kind_text(parts))
            return lambda: target
        if stored.dtype != parts.dtype:
            self.match.problems.dtypes[text] = (stored.dtype, parts.dtype)
        if stored.shape != parts.shape:
            self.match.problems.shapes[text] = (stored.shape, parts.shape)
        finish = self.mapping(parts, node, path, keys)
        return lambda: (finish(), target)[1]

    def per_rank(self, target: PerRank, node: Node, path: TreePath) -> Finish:
        text = path_text(path)
        self.ask(node, path)
        if not (isinstance(node, dict) and node.get("$") == "per_rank"):
            self.match.problems.kinds[text] = (_describe(node), "PerRank")
            return lambda: target
        value = decode_rank_value(
            node,
            target,
            text,
            rank=self.rank,
            world_size=self.world_size,
            saved_world_size=self.view.world_size,
            allow_pickle=self.allow_pickle,
        )

        is_object = is_stateful(target.value)
        self.match.has_objects |= is_object

        def finish() -> PerRank:
            if is_object:
                load_object(target.value, value)
            else:
                target.value = value
            return target

        return finish

    def mapping(self, target: Any, node: Node, path: TreePath, keys: values.Path) -> Finish:
        stored = {key_token(key): child for key, child in children(node) or ()}
        if not stored:
            self.ask(node, path)  # an empty dict is a key of its own
        parts: dict[Any, Finish] = {}
        for key, item in target.items():
            token = key_token(values.encode(key))
            inner, inner_keys = (*path, token), (*keys, key)
            if token in stored:
                parts[key] = self.walk(item, stored[token], inner, inner_keys)
            else:
                self.missing(item, inner, inner_keys)
        self.may_fail(target)
        return lambda: _replace_items(target, parts)

    def may_fail(self, target: Any) -> None:
        """A container of the caller's own may refuse what it is given, at the very end."""
        if type(target) not in (dict, list, tuple, deque, OrderedDict, defaultdict):
            self.match.has_objects = True

    def sequence(self, target: Any, node: Node, path: TreePath, keys: values.Path) -> Finish:
        stored = children(node)
        if stored is None or is_mapping(node):
            self.ask(node, path)
            self.match.problems.kinds[path_text(path)] = (_describe(node), type(target).__name__)
            return lambda: target
        parts: dict[Any, Finish] = {}
        for i, item in enumerate(target):
            inner, inner_keys = (*path, str(i)), (*keys, i)
            if i < len(stored):
                parts[i] = self.walk(item, stored[i][1], inner, inner_keys)
            else:
                self.missing(item, inner, inner_keys)
        self.may_fail(target)
        if isinstance(target, (list, deque)):
            return lambda: _replace_items(target, parts)
        return lambda: _rebuilt_tuple(target, parts)

    def plain(self, target: Any, node: Node, path: TreePath) -> Finish:
        self.ask(node, path)
        # None stands for any plain value, other values for one that is no dict.
        if isinstance(target, dict) or holds_arrays(node) or (is_dict(node) and target is not None):
            self.match.problems.kinds[path_text(path)] = (_describe(node), type(target).__name__)
            return lambda: target
        value = decode_inline(node, allow_pickle=self.allow_pickle)
        return lambda: value

    def ask(self, node: Node, path: TreePath) -> None:
        """What is below has a place in the target, be it of the wrong kind: it is not unexpected."""
        self.match.asked.update(below for below, _ in leaves(node, path))

    def missing(self, target: Any, path: TreePath, keys: values.Path) -> None:
        """Every leaf of a part of the target that is not stored at all."""
        if is_stateful(target):
            target = object_state(target)
        if isinstance(target, (dict, FlatShards)) and target:
            for key, item in target.items():
                self.missing(item, (*path, key_token(values.encode(key))), (*keys, key))
        elif isinstance(target, (list, tuple, deque)) and _holds_targets(target):
            for i, item in enumerate(target):
                self.missing(item, (*path, str(i)), (*keys, i))
        else:
            if isinstance(target, (torch.Tensor, ShardedTensor)):
                self.describer.note(keys)
            self.match.problems.missing.append(path_text(path))


def _holds_targets(target: Any) -> bool:
    """Whether something in a sequence is filled in place."""
    if isinstance(target, dict):
        return any(_holds_targets(item) for item in target.values())
    if isinstance(target, (list, tuple, deque)):
        return any(_holds_targets(item) for item in target)
    if isinstance(target, (SimpleNamespace, Namespace)):
        return _holds_targets(vars(target))
    kinds = (torch.Tensor, ShardedTensor, np.ndarray, PerRank, FlatShard, FlatShards)
    return isinstance(target, kinds) or is_stateful(target)


def _describe(node: Node) -> str:
    if is_array(node):
        return str(node["$"])
    if isinstance(node, list):
        return "list"
    if isinstance(node, dict):
        parts = stored_parts(node)
        return kind_text(parts) if parts is not None else str(node.get("$", "dict"))
    return type(node).__name__


def _load_into(target: Any, state: Any) -> Any:
    load_object(target, state)
    return target


def _replace_items(target: MutableMapping[Any, Any] | MutableSequence[Any], parts: dict[Any, Finish]) -> Any:
    for key, finish in parts.items():
        value = finish()
        if value is not target[key]:
            target[key] = value
    return target


def _rebuilt_tuple(target: Any, parts: dict[Any, Finish]) -> Any:
    items = [parts[i]() if i in parts else item for i, item in enumerate(target)]
    if all(a is b for a, b in zip(items, target, strict=True)):
        return target
    return tuple(items) if type(target) is tuple else type(target)(*items)


def check_root(state: Any) -> None:
    """Raises InvalidStateError for a target that cannot be changed in place."""
    kinds = (dict, list, torch.Tensor, ShardedTensor, np.ndarray, PerRank, FlatShards)
    if not (isinstance(state, kinds) or is_stateful(state)):
        raise InvalidStateError(
            f"load() fills its target in place, which a {type(state).__name__} does not allow: pass a dict or a list"
        )
