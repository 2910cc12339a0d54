"""Comparing a target state with what is stored, and filling it.

Nothing is changed while comparing: plain values are put in place by ``Match.finish``, once every
tensor has arrived.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import MutableMapping, MutableSequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import (
    Node,
    TreePath,
    children,
    holds_arrays,
    is_dict,
    is_mapping,
    key_token,
    leaves,
    path_text,
    tree_keys,
)
from cloudckpt.plan.view import View, renamed
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.flat import FlatShard, FlatShards
from cloudckpt.pytorch.leaves import LeafMatcher
from cloudckpt.pytorch.match import Finish, Match
from cloudckpt.pytorch.module_names import load_object, object_state
from cloudckpt.pytorch.optimizers import complete_state, convention_differences, group_differences
from cloudckpt.pytorch.per_rank import PerRank, decode_inline, decode_rank_value
from cloudckpt.pytorch.sharded import ShardedTensor
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.stateful import is_stateful
from cloudckpt.pytorch.subclass import is_made_of_tensors, kind_text, stored_parts, tensor_parts
from cloudckpt.pytorch.training import TrainingState, Within


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
        for fill in matcher.leaves.fills:
            fill()
        return finish()

    matcher.match.finish = fill_and_finish
    check_shared_memory(manifest, matcher.match.wants)
    return matcher.match


def check_shared_memory(manifest: Manifest, wants: list[tuple[int, LocalShard]]) -> None:
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
        self.leaves = LeafMatcher(view, describer, self.match)
        self.around: list[Within] = []

    def walk(self, target: Any, node: Node, path: TreePath, keys: values.Path) -> Finish:
        if isinstance(target, PerRank):
            return self.per_rank(target, node, path)
        if is_made_of_tensors(target):
            return self.subclass(target, node, path, keys)
        if isinstance(target, (torch.Tensor, ShardedTensor)):
            return self.leaves.tensor(target, node, path, keys, self.around[-1] if self.around else None)
        if isinstance(target, np.ndarray):
            return self.leaves.ndarray(target, node, path)
        if isinstance(target, FlatShard):
            return self.leaves.flat(target, node, path)
        if isinstance(target, FlatShards):
            finish = self.walk(dict(target), node, path, keys)
            return lambda: (finish(), target)[1]
        if isinstance(target, TrainingState):
            return self.training(target, node, path, keys)
        if is_stateful(target):
            return self.stateful(target, node, path, keys)
        if isinstance(target, dict) and is_mapping(node):
            differences = convention_differences(target, node, path_text(path))
            if differences:
                self.match.problems.kinds.update(differences)
                self.match.ask(node, path)
                return lambda: target
            return self.mapping(target, node, path, keys)
        if isinstance(target, (list, tuple, deque)) and (holds_arrays(node) or _holds_targets(target)):
            return self.sequence(target, node, path, keys)
        if isinstance(target, (SimpleNamespace, Namespace)) and is_mapping(node):
            finish = self.mapping(vars(target), node, path, keys)
            return lambda: (finish(), target)[1]
        return self.plain(target, node, path)

    def stateful(self, target: Any, node: Node, path: TreePath, keys: values.Path) -> Finish:
        self.match.has_objects = True
        state = object_state(target)
        if isinstance(target, torch.optim.Optimizer):
            differences = group_differences(state, node, path_text(path))
            self.match.problems.kinds.update(differences)
            if path_text(path) in differences:  # all of it is of another convention
                self.match.ask(node, path)
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

    def training(self, target: TrainingState, node: Node, path: TreePath, keys: values.Path) -> Finish:
        self.match.has_objects = True
        if not is_mapping(node):
            self.match.refuse(node, path, "TrainingState")
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
            self.match.ask(stored[key], inner)
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

    def subclass(self, target: torch.Tensor, node: Node, path: TreePath, keys: values.Path) -> Finish:
        """Its inner tensors are filled where they are."""
        text = path_text(path)
        parts, stored = tensor_parts(target, text), stored_parts(node)
        if stored is None or kind_text(stored) != kind_text(parts):
            self.match.refuse(node, path, kind_text(parts))
            return lambda: target
        if stored.dtype != parts.dtype:
            self.match.problems.dtypes[text] = (stored.dtype, parts.dtype)
        if stored.shape != parts.shape:
            self.match.problems.shapes[text] = (stored.shape, parts.shape)
        finish = self.mapping(parts, node, path, keys)
        return lambda: (finish(), target)[1]

    def per_rank(self, target: PerRank, node: Node, path: TreePath) -> Finish:
        text = path_text(path)
        self.match.ask(node, path)
        if not (isinstance(node, dict) and node.get("$") == "per_rank"):
            self.match.refuse(node, path, "PerRank")
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
            self.match.ask(node, path)  # an empty dict is a key of its own
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
            self.match.refuse(node, path, type(target).__name__)
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
        self.match.ask(node, path)
        # None stands for any plain value, other values for one that is no dict.
        if isinstance(target, dict) or holds_arrays(node) or (is_dict(node) and target is not None):
            self.match.refuse(node, path, type(target).__name__)
            return lambda: target
        value = decode_inline(node, allow_pickle=self.allow_pickle)
        return lambda: value

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
