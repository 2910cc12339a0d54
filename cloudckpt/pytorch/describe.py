"""Which part of which stored array every tensor of a state is, on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.tree import Node
from cloudckpt.plan.rules import Layout, ShardingRules, agrees, check_recorded, local_shape
from cloudckpt.plan.shard import pieces_from_runs
from cloudckpt.pytorch.sharded import ShardedTensor, sharded_shard
from cloudckpt.pytorch.shards import LocalShard, tensor_shard


class Describer:
    """``matched``: the numbers of the rules that matched a tensor of this rank so far.

    Raises InvalidStateError for rules that are not for a job of ``world_size`` ranks.
    """

    def __init__(self, rules: ShardingRules | None, rank: int, world_size: int) -> None:
        self.matched: set[int] = set()
        self._rules = rules
        self._rank = rank
        if rules is not None:
            if not isinstance(rules, ShardingRules):
                raise InvalidStateError(f"rules must be ShardingRules, not a {type(rules).__name__}")
            self._config = rules.config(world_size)
            self._coordinates = self._config.coordinates(rank)

    def shard(
        self,
        obj: torch.Tensor | ShardedTensor,
        keys: values.Path,
        text: str,
        *,
        global_shape: Sequence[int] | None = None,
        recorded: Node = None,
    ) -> LocalShard:
        """A tensor, DTensor or ShardedTensor as a part of its array. Raises InvalidStateError for what cannot be one.

        ``keys`` is the path that rules are matched with, ``text`` stands in messages. Only plain
        tensors are cut by rules; the shares of all ranks are taken for equal, unless the rule states the
        extent. On a load, ``global_shape`` is that of what is stored, and ``recorded`` the layout that was
        recorded with it: shares may then be unequal. The shard's own shape differs from ``global_shape``
        where the local shape does not fit.
        """
        shard = sharded_shard(obj, text) if isinstance(obj, ShardedTensor) else tensor_shard(obj, text)
        layout = self._layout(keys, len(shard.shape))
        if layout is None:
            return shard
        if not shard.placed:
            return self._cut(shard, layout, global_shape, recorded)
        if not agrees(layout, shard.pieces, shard.shape, self._rank, self._config):
            raise InvalidStateError(
                f"{text!r}: the tensor itself says that this rank holds elements that its rule gives to another rank; "
                "rules are for plain tensors: describe it in one way"
            )
        return shard

    def local_shape(self, keys: values.Path, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that this rank's part of a plain tensor has by rule; the global shape without one."""
        layout = None if self._rules is None else self._rules.layout(values.dotted(keys), len(global_shape))
        if layout is None:
            return tuple(global_shape)
        return local_shape(layout.runs(global_shape, self._coordinates, self._config))

    def has_rule(self, keys: values.Path) -> bool:
        return self._rules is not None and bool(self._rules.match(values.dotted(keys)))

    def note(self, keys: values.Path) -> None:
        """A tensor that is there, though nothing is stored for it: its rules have not matched nothing."""
        if self._rules is not None:
            self.matched.update(self._rules.match(values.dotted(keys)))

    def _layout(self, keys: values.Path, num_dims: int) -> Layout | None:
        if self._rules is None:
            return None
        self.note(keys)
        return self._rules.layout(values.dotted(keys), num_dims)

    def _cut(self, whole: LocalShard, layout: Layout, stored: Sequence[int] | None, recorded: Node) -> LocalShard:
        """A plain tensor as the part that its rule says it is."""
        config, local = self._config, whole.shape
        if stored is not None and len(stored) != len(local):
            return whole
        alike = layout.global_shape(local, config)
        shape = alike if stored is None else tuple(stored)
        runs = None
        if shape != alike and layout.adds_up(shape):  # as uneven shares do
            runs = layout.runs(shape, self._coordinates, config)
        if runs is None or local_shape(runs) != local:
            shape, runs = alike, layout.runs(alike, self._coordinates, config)
        if local_shape(runs) != local:
            raise InvalidStateError(
                f"{whole.text!r}: the local tensor has shape {local}, but its rule gives this rank "
                f"{local_shape(runs)} of {shape}"
            )
        check_recorded(layout, config, recorded, whole.text)
        return replace(whole, shape=shape, pieces=tuple(pieces_from_runs(runs)), layout=layout.encode(config))
