"""From the caller's nested state to an encoded tree and a list of shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.document import MeshEntry
from cloudckpt.format.scalars import MAX_BARE_INT
from cloudckpt.format.tree import key_token
from cloudckpt.plan.shard import PieceTable
from cloudckpt.plan.tree import LeafSpec, RankTree, Tie
from cloudckpt.pytorch.deferred import Deferrals, Deferred
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.digest import piece_digests
from cloudckpt.pytorch.flat import FlatShard, FlatShards
from cloudckpt.pytorch.module_names import object_state
from cloudckpt.pytorch.per_rank import PerRank, encode_per_rank
from cloudckpt.pytorch.sharded import ShardedTensor
from cloudckpt.pytorch.shards import LocalShard, ndarray_shard
from cloudckpt.pytorch.stateful import is_stateful
from cloudckpt.pytorch.subclass import check_uncut, is_made_of_tensors, tensor_parts
from cloudckpt.pytorch.training import TrainingState, Within


@dataclass(frozen=True, eq=False)
class RankState:
    """What one rank saves: its tree, and a shard for every array that is not an alias, by id.

    ``declared``: see `TrainingState.declared`. ``deferred``: must be finished before the tree is used.
    """

    tree: RankTree
    shards: Mapping[str, LocalShard]
    declared: Mapping[str, bool] = field(default_factory=dict)
    deferred: tuple[Deferred, ...] = ()

    @property
    def meshes(self) -> tuple[MeshEntry, ...]:
        found = {shard.mesh for shard in self.shards.values() if shard.mesh is not None}
        return tuple(sorted(found, key=lambda mesh: (mesh.shape, mesh.dim_names)))


def encode_state(state: Any, *, allow_pickle: bool, describer: Describer, defer_pickles: bool = False) -> RankState:
    """Raises InvalidStateError, naming the path, for anything that cannot be stored.

    ``defer_pickles``: objects that a copy can be taken of (`register_staging`) are copied, and pickled later.
    """
    collector = _Collector(allow_pickle, describer, Deferrals() if defer_pickles else None)
    with torch.no_grad():  # else autograd takes part in every to_local(), and takes longer than all of the rest
        node = collector.encode(state, ())
    tree = RankTree(node, tuple(collector.specs))
    return RankState(tree, collector.shards, collector.declared, collector.deferred)


def piece_table(shards: Mapping[str, LocalShard], order: Mapping[str, int]) -> PieceTable:
    """The pieces of this rank's shards; ``order``: id to tensor number."""
    held = sorted((order[i], shard) for i, shard in shards.items() if i in order)
    replicas = {number: shard.replica_number for number, shard in held}
    # Most shards are cut like others, and share the tuple of their pieces.
    distinct = {id(shard.pieces): shard.pieces for shard in shards.values()}
    boxes = {key: [piece.box for piece in pieces] for key, pieces in distinct.items()}
    return PieceTable.build(((number, box) for number, shard in held for box in boxes[id(shard.pieces)]), replicas)


_RULE_NOTE = (
    "; its rule takes the shares of all ranks for equal: where they are not, "
    "state the extent of the dim as its one segment"
)


def _leaf_id(path: values.Path) -> str:
    """Not the array's name, which depends on the other paths."""
    for key in path:
        if not ((type(key) is str and key.isascii()) or (type(key) is int and abs(key) <= MAX_BARE_INT)):
            return key_token(values.encode(path))
    return key_token({"$": "tuple", "items": path})  # the same text, sooner


_NEVER_ARRAYS = frozenset({type(None), bool, int, float, str, bytes, dict, list, tuple})
"""Types of which `_Collector.leaf` need not ask more: almost everything that it is asked about."""


class _Collector:
    def __init__(self, allow_pickle: bool, describer: Describer, deferrals: Deferrals | None) -> None:
        self.allow_pickle = allow_pickle
        self.deferrals = deferrals
        self.describer = describer
        self.specs: list[LeafSpec] = []
        self.shards: dict[str, LocalShard] = {}
        self.declared: dict[str, bool] = {}
        self._at: dict[tuple[int, int], tuple[LocalShard, str]] = {}
        self._views: dict[tuple[int, int], list[tuple[LocalShard, str]]] = {}
        self._kept: list[Any] = []
        self._training: list[Within] = []
        self._digests: dict[tuple[Any, ...], frozenset[Any]] = {}

    @property
    def deferred(self) -> tuple[Deferred, ...]:
        return () if self.deferrals is None else tuple(self.deferrals.taken)

    def encode(self, value: Any, path: values.Path) -> values.Node:
        return values.encode(value, leaf=self.leaf, allow_pickle=self.allow_pickle, defer=self.deferrals, path=path)

    def leaf(self, path: values.Path, obj: Any) -> values.Node:
        if type(obj) in _NEVER_ARRAYS:
            return None
        if is_made_of_tensors(obj):
            parts = tensor_parts(obj, values.dotted(path))
            node = self.encode(parts, path)
            check_uncut(node, parts, values.dotted(path))
            return node
        if isinstance(obj, (torch.Tensor, ShardedTensor)):
            shard = self.describer.shard(obj, self._cut_like(path, obj), values.dotted(path))
            layout = {} if shard.layout is None else {"layout": shard.layout}
            return {"$": "tensor", "array": self._add(path, shard)} | layout
        if isinstance(obj, np.ndarray):
            if type(obj) is not np.ndarray:
                raise InvalidStateError(f"{values.dotted(path)!r}: unsupported numpy subclass {type(obj).__qualname__}")
            shard, name = ndarray_shard(obj, values.dotted(path))
            return {"$": "ndarray", "array": self._add(path, shard), "numpy": name, "shape": list(obj.shape)}
        if isinstance(obj, FlatShards):
            return self.encode(dict(obj), path)
        if isinstance(obj, FlatShard):
            logical = obj.logical_shape
            fields = {} if logical is None else {"logical_shape": list(logical)}
            return {"$": "tensor", "array": self._add(path, obj.stored(values.dotted(path))), **fields}
        if isinstance(obj, PerRank):
            return encode_per_rank(obj, path, self.allow_pickle, self.deferrals)
        if is_stateful(obj):
            inner = object_state(obj)
            self._kept.append(inner)  # ids of temporaries must not be used twice
            around: list[Within] = []
            if isinstance(obj, TrainingState):
                around.append(Within(path, obj))
                self.declared.update(obj.declared(path, [inner]))
            self._training += around
            node = self.encode(inner, path)
            del self._training[len(self._training) - len(around) :]
            return node
        return None

    def _cut_like(self, path: values.Path, obj: torch.Tensor | ShardedTensor) -> values.Path:
        if not self._training or self.describer.has_rule(path):
            return path
        return self._training[-1].cut_like(path, obj)

    def _tie(self, path: values.Path, shard: LocalShard) -> Tie | None:
        """What is declared as tied must prove that it is equal, on whatever ranks the two are."""
        for within in self._training[-1:]:
            source, is_tied = within.tie(path)
            if is_tied:
                if shard.identity not in self._digests:
                    self._digests[shard.identity] = frozenset(piece_digests(shard).items())
                digests = self._digests[shard.identity]
                if source is None:
                    return Tie(None, digests)
                # A parameter without optimizer state is nothing wrong, one without itself is.
                is_needed = source[len(within.prefix)] == "model"
                return Tie(_leaf_id(source), digests, values.dotted(source), is_needed=is_needed)
        return None

    def _add(self, path: values.Path, shard: LocalShard) -> str:
        name = _leaf_id(path)
        alias = self._same_memory(shard, name)
        self.specs.append(
            LeafSpec(
                id=name,
                path=path,
                dtype=shard.dtype,
                shape=shard.shape,
                checked=not shard.placed,
                alias_of=alias,
                note=_RULE_NOTE if shard.layout is not None else "",
                tie=self._tie(path, shard),
            )
        )
        # Kept for aliases too: another rank may not have them tied.
        self.shards[name] = shard
        return name

    def _same_memory(self, shard: LocalShard, name: str) -> str | None:
        """The id of an earlier shard that is the same."""
        address = shard.address
        if address is None:
            return None
        first = self._at.setdefault(address, (shard, name))
        if first[0] is shard:
            return None
        others = self._views.setdefault(address, [first])  # what begins at one address may be cut in several ways
        for other, other_name in others:
            if other.identity == shard.identity:
                return other_name
        others.append((shard, name))
        return None
