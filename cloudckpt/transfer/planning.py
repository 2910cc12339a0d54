"""The first round of a save: from what the ranks hold to who writes what, remembered for the next save.

A plan hangs on the layout alone: on everything that the ranks hold but bytes and plain values. So a rank
sends a digest of its layout; only where the coordinator has no plan for the digests of all ranks, or a rank
has lost it, are the layouts themselves asked for. Values are sent, compared and merged on every save.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import numpy as np

from cloudckpt.format import values as plain
from cloudckpt.format.document import MeshEntry
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.keys import new_attempt
from cloudckpt.format.tree import is_per_rank
from cloudckpt.plan.rules import ShardingRules, check_all_matched
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.skeleton import Skeleton
from cloudckpt.plan.tree import MergedTree, RankTree, merge, merge_again, ties_hold
from cloudckpt.plan.writes import plan_save
from cloudckpt.transfer.description import Description, RankLayout, SaveOptions, ties_of, topology_of
from cloudckpt.transfer.job import ArrayPlan, Blueprint, upload_job
from cloudckpt.transfer.places import Base
from cloudckpt.transfer.upload import UploadJob

T = TypeVar("T")

PLANS_KEPT = 4
"""Per group of ranks: a job may save several states in turn, but every plan is held in memory."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """What the coordinator tells all ranks to do. ``plan``: None where they have it already.

    ``checked``: numbers of the arrays whose replicas must prove by digest that they are equal. ``base``: of an
    incremental save, where the run has one.
    """

    attempt: str
    plan_id: str
    plan: ArrayPlan | None = None
    checked: tuple[int, ...] = ()
    base: Base | None = None


@dataclass(frozen=True, eq=False)
class RankPlan:
    """A plan as one rank has it. The attempt of ``job`` is that of the save at hand."""

    arrays: ArrayPlan
    job: UploadJob
    checked: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Layout:
    """On the coordinator: what a plan was made for, and all of the checkpoint but its bytes and values."""

    id: str
    digests: tuple[bytes, ...]
    skeletons: tuple[Skeleton, ...]
    merged: MergedTree
    meshes: tuple[MeshEntry, ...]
    arrays: ArrayPlan


class Planner:
    """Makes plans for one group of ranks, and keeps the last few: every rank its own part, the coordinator the layouts.

    Each rank says which plans it has, so that ranks need not forget at the same moment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[str, tuple[bytes, RankPlan]] = OrderedDict()
        self._layouts: OrderedDict[str, _Layout] = OrderedDict()

    def describe(
        self, options: SaveOptions, layout: RankLayout, values: Sequence[plain.Node], metadata: plain.Node
    ) -> Description:
        digest = layout.digest(options)
        with self._lock:
            plans = tuple(i for i, (made_for, _) in self._plans.items() if made_for == digest)
        encoded = tuple(map(msgspec.json.encode, values))
        ties = {spec.id: spec.tie.digests for spec in layout.leaves if spec.tie is not None}
        return Description(options, digest, encoded, ties, metadata, plans, layout, topology=layout.topology)

    def assign(
        self, parts: Sequence[Description], rules: ShardingRules | None = None
    ) -> tuple[Assignment, Blueprint] | None:
        """On the coordinator: from an earlier plan or a new one; None if the layouts must be sent for that."""
        options = parts[0].options
        known = self._find(parts)
        if known is not None:
            nodes, shared = _filled(known.skeletons, parts)
            merged = merge_again(known.merged, nodes, values=options.values, shared=shared)
            assignment = Assignment(new_attempt(), known.id)
        else:
            layouts = [part.layout for part in parts if part.layout is not None]
            if len(layouts) < len(parts):
                return None
            known = _planned(parts, layouts, rules)
            merged = known.merged
            with self._lock:
                _keep(self._layouts, known.id, known)
            checked = _to_compare(known.arrays, options.check_replicas)
            assignment = Assignment(known.id, known.id, known.arrays, checked)
        blueprint = Blueprint(
            attempt=assignment.attempt,
            step=options.step,
            model_version=options.model_version,
            layout=options.layout,
            arrays=known.arrays,
            tree=merged.node,
            meshes=known.meshes,
            metadata=parts[0].metadata,
            world_size=len(parts),
            topology=topology_of(parts),
            notes=merged.notes,
        )
        return assignment, blueprint

    def accept(self, assignment: Assignment, digest: bytes, rank: int) -> RankPlan:
        """On every rank: its part of the plan."""
        with self._lock:
            if assignment.plan is None:
                _, plan = self._plans[assignment.plan_id]
            else:
                job = upload_job(assignment.plan, assignment.attempt, rank)
                plan = RankPlan(assignment.plan, job, assignment.checked)
            _keep(self._plans, assignment.plan_id, (digest, plan))
        return replace(plan, job=replace(plan.job, attempt=assignment.attempt))

    def _find(self, parts: Sequence[Description]) -> _Layout | None:
        digests = tuple(part.digest for part in parts)
        everywhere = set(parts[0].plans).intersection(*(part.plans for part in parts))
        with self._lock:
            for layout in self._layouts.values():
                if layout.digests == digests and layout.id in everywhere and ties_hold(layout.merged, ties_of(parts)):
                    _keep(self._layouts, layout.id, layout)
                    return layout
        return None


def _keep(kept: OrderedDict[str, T], name: str, item: T) -> None:
    kept[name] = item
    kept.move_to_end(name)
    while len(kept) > PLANS_KEPT:
        kept.popitem(last=False)


def _planned(parts: Sequence[Description], layouts: Sequence[RankLayout], rules: ShardingRules | None) -> _Layout:
    """A new plan, named after the attempt that it is made for."""
    options = parts[0].options
    skeletons = _skeletons(layouts)
    nodes, shared = _filled(skeletons, parts)
    trees = [RankTree(node, layout.leaves) for node, layout in zip(nodes, layouts, strict=True)]
    merged = merge(trees, values=options.values, shared=shared)
    paths = (plain.dotted(spec.path) for spec in merged.leaves)
    check_all_matched(rules, [layout.matched for layout in layouts], paths)
    arrays = _plan_arrays(layouts, merged, options)
    meshes = tuple(dict.fromkeys(mesh for layout in layouts for mesh in layout.meshes))
    return _Layout(new_attempt(), tuple(part.digest for part in parts), skeletons, merged, meshes, arrays)


def _plan_arrays(layouts: Sequence[RankLayout], merged: MergedTree, options: SaveOptions) -> ArrayPlan:
    """Who writes what."""
    numbers = {spec.id: i for i, spec in enumerate(merged.leaves)}
    tables = [_renumbered(layout, numbers) for layout in layouts]
    specs = [TensorSpec(plain.dotted(s.path), s.shape, dtype(s.dtype).itemsize) for s in merged.leaves]
    chunks = plan_save(specs, tables, chunk_bytes=options.chunk_bytes)
    names = tuple(merged.names[spec.id] for spec in merged.leaves)
    return ArrayPlan(merged.leaves, names, chunks, options.compression)


def _skeletons(layouts: Sequence[RankLayout]) -> tuple[Skeleton, ...]:
    """By rank; equal ones are the same object, so that the trees need not be compared node by node."""
    made: dict[bytes, Skeleton] = {}
    texts = [msgspec.json.encode(layout.skeleton) for layout in layouts]
    return tuple(
        made.get(text) or made.setdefault(text, Skeleton(layout.skeleton))
        for text, layout in zip(texts, layouts, strict=True)
    )


def _filled(skeletons: Sequence[Skeleton], parts: Sequence[Description]) -> tuple[list[plain.Node], set[int]]:
    """The trees of all ranks, and the ids of what may be the same object in several of them, see `merge_again`."""
    decoded: dict[bytes, plain.Node] = {}
    for part in parts:
        for value in part.values:
            if value not in decoded:
                decoded[value] = msgspec.json.decode(value)
    nodes = [s.fill([decoded[v] for v in part.values]) for s, part in zip(skeletons, parts, strict=True)]
    shared = {id(node) for node in decoded.values() if not is_per_rank(node)}
    return nodes, shared.union(*(skeleton.settled for skeleton in set(skeletons)))


def _renumbered(layout: RankLayout, numbers: Mapping[str, int]) -> PieceTable:
    """A rank numbers its own arrays; here they get the numbers of the merged tree. Aliases fall away."""
    if not len(layout.pieces):
        return layout.pieces
    tensor = np.array([numbers.get(spec.id, -1) for spec in layout.leaves], dtype=np.int64)[layout.pieces.tensor]
    rows = np.nonzero(tensor >= 0)[0]
    rows = rows[np.argsort(tensor[rows], kind="stable")]
    return layout.pieces.take(rows, tensor[rows])


def _to_compare(arrays: ArrayPlan, check_replicas: str) -> tuple[int, ...]:
    """The arrays whose replicas must prove that they are equal."""
    if check_replicas == "none":
        return ()
    held_twice = np.nonzero(arrays.chunks.replicated)[0].tolist()
    return tuple(number for number in held_twice if arrays.leaves[number].checked or check_replicas == "all")
