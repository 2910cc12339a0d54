"""Saving: state -> shards -> plan -> upload -> receipts -> commit."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, InvalidStateError, RankError, StoreError
from cloudckpt.format import values as plain
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.keys import step_dir
from cloudckpt.format.manifest import Manifest, ObjectEntry
from cloudckpt.plan.names import check_found
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.plan.skeleton import split
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.digest import Digests, compare_digests, shard_digests
from cloudckpt.pytorch.group import Group, make_group
from cloudckpt.pytorch.pause import paused_gc
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.state import RankState, encode_state, piece_table
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.job import ArrayPlan, Blueprint, assemble
from cloudckpt.transfer.planning import (
    Assignment,
    Description,
    Planner,
    RankLayout,
    RankPlan,
    SaveOptions,
    check_options,
)
from cloudckpt.transfer.upload import ChunkWrite, UploadReceipt, upload

if TYPE_CHECKING:
    import torch.distributed as dist

Layout = Literal["packed", "zarr"]


@dataclass(frozen=True)
class Commit:
    """A checkpoint that exists. ``nbytes``: stored bytes of its chunks; ``num_requests``: those of all ranks."""

    url: str
    commit_id: str
    step: int | None
    nbytes: int
    num_chunks: int
    num_objects: int
    num_requests: int = 0


@dataclass(frozen=True, eq=False)
class _Report:
    """One rank's part of the second round."""

    receipt: UploadReceipt
    digests: Digests
    num_requests: int


def save(
    state: Any,
    url: str | os.PathLike[str],
    *,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "packed",
    compression: Literal["zstd"] | None = None,
    overwrite: bool = False,
    rules: ShardingRules | None = None,
    metadata: Mapping[str, Any] | None = None,
    values: Literal["check", "rank0"] = "check",
    allow_pickle: bool = False,
    progress: Progress = None,
    config: Config | None = None,
) -> Commit:
    """Write ``state`` as a committed checkpoint at ``url``. Collective over ``group`` (default: all ranks).

    ``state`` is a nested dict, list or tuple of tensors, DTensors, ShardedTensors, numpy arrays, plain
    values and objects with ``state_dict()``. ``rules`` say which part of the whole the plain tensors
    are; those without a rule must be equal on all ranks that hold them. The state must not change before
    this returns. Either the checkpoint is whole and durable afterwards, or an error is raised on every rank
    and nothing is visible.

    ``values``: plain values must be equal on all ranks ("check"), or those of rank 0 are kept
    ("rank0"). ``metadata``: plain values for people and tools, beside the state. ``progress``: True
    for a bar on rank 0, or a function of (bytes done, bytes in all) of the rank.

    Raises InvalidStateError, AlreadyCommittedError, NotFoundError (no such bucket), StoreError, and
    RankError where a part of the ranks failed.
    """
    config = config or Config()
    ranks = make_group(group, config.rank_timeout_s)
    planner = ranks.kept(Planner)
    opened: list[Store] = []
    held: list[tuple[RankState, Description]] = []
    blueprints: list[Blueprint] = []  # on the coordinator

    def describe() -> Description:
        describer = Describer(rules, ranks.rank, ranks.size)
        options = SaveOptions(
            os.fspath(url),
            step,
            layout,
            compression,
            overwrite,
            values,
            config.check_replicas,
            config.chunk_bytes,
            None if rules is None else rules.digest,
        )
        _check_options(options)
        opened.append(resolve(url, storage_options, config))
        with paused_gc():
            encoded = encode_state(state, allow_pickle=allow_pickle, describer=describer)
            layout_held, values_held = _parts(encoded, describer)
            description = planner.describe(options, layout_held, values_held, plain.encode(dict(metadata or {})))
            description = replace(description, declared=encoded.declared)
        held.append((encoded, description))
        return description.in_brief()

    def assign(parts: Sequence[Description]) -> Assignment | None:
        check_options(parts)
        catalog.check_absent(opened[0], overwrite=overwrite)
        found = planner.assign(parts, rules)
        if found is None:
            return None
        check_found(part.declared for part in parts)
        blueprints.append(found[1])
        for note in found[1].notes:
            warnings.warn(note, stacklevel=2)
        return found[0]

    try:
        # The second time is for ranks that hoped for a plan which others cannot use.
        assignment = ranks.round(describe, assign) or ranks.round(lambda: held[0][1], assign)
        assert assignment is not None
        encoded, description = held[0]
        plan = planner.accept(assignment, description.digest, ranks.rank)
        options = description.options
        return _write(ranks, opened[0], plan, blueprints, encoded, options, progress=progress, config=config)
    finally:
        for store in opened:
            store.close()


def _check_options(options: SaveOptions) -> None:
    for name, value, allowed in (
        ("layout", options.layout, ("packed", "zarr")),
        ("compression", options.compression, (None, "zstd")),
        ("values", options.values, ("check", "rank0")),
    ):
        if value not in allowed:
            raise InvalidStateError(f"{name} must be one of {allowed}, not {value!r}")
    if options.step is not None:
        step_dir(options.step)  # refuses what cannot name a step


def _parts(state: RankState, describer: Describer) -> tuple[RankLayout, list[plain.Node]]:
    """What plans are made of, and the plain values that stand in it."""
    skeleton, values = split(state.tree.node)
    pieces = piece_table(state.shards, {name: i for i, name in enumerate(state.shards)})
    matched = tuple(sorted(describer.matched))
    return RankLayout(skeleton, state.tree.leaves, pieces, state.meshes, matched), values


def _write(
    ranks: Group,
    store: Store,
    plan: RankPlan,
    blueprints: Sequence[Blueprint],
    state: RankState,
    options: SaveOptions,
    *,
    progress: Progress,
    config: Config,
) -> Commit:
    """``blueprints``: one on the coordinator, none elsewhere."""
    arrays = plan.arrays
    written: list[ObjectEntry] = []
    assembled: list[tuple[Manifest, int]] = []

    def send() -> _Report:
        numbers = arrays.numbers
        shards = {numbers[i]: shard for i, shard in state.shards.items() if i in numbers}
        digests = shard_digests({number: shards[number] for number in plan.checked if number in shards})
        scratch = Scratch()
        total = sum(write.nbytes for write in plan.job.writes)
        with start_progress(progress, "save", total, show=ranks.rank == 0) as advance:
            receipt = upload(
                store,
                plan.job,
                lambda write: _read_chunk(arrays, shards, write, scratch),
                layout=options.layout,
                config=config,
                cancel=ranks.cancel,
                advance=advance,
                written=written,
            )
        return _Report(receipt, digests, store.counts.requests)

    def check(reports: Sequence[_Report]) -> None:
        compare_digests([report.digests for report in reports], arrays.leaves)
        manifest = assemble(blueprints[0], [report.receipt for report in reports])
        assembled.append((manifest, sum(report.num_requests for report in reports)))

    def publish(_: Sequence[None]) -> Commit:
        manifest, num_requests = assembled[0]
        before = store.counts.requests
        catalog.commit(store, manifest, overwrite=options.overwrite)
        document = manifest.document
        return Commit(
            url=store.url,
            commit_id=document.commit_id,
            step=document.step,
            nbytes=manifest.nbytes,
            num_chunks=document.chunks.count,
            num_objects=len(document.objects),
            num_requests=num_requests + store.counts.requests - before,
        )

    try:
        ranks.round(send, check)
    except CloudckptError:
        _remove(store, written)
        raise
    try:
        return ranks.round(lambda: None, publish, is_last=True)
    except AlreadyCommittedError:
        _remove(store, written)
        raise


def _read_chunk(arrays: ArrayPlan, shards: Mapping[int, LocalShard], write: ChunkWrite, scratch: Scratch) -> Bytes1D:
    array, number = arrays.locate(write.chunk)
    grid = arrays.chunks.grids[array]
    return shards[array].read(grid.box(number), grid.stored_shape(number), scratch)


def _remove(store: Store, written: Sequence[ObjectEntry]) -> None:
    """Objects of a save that was not committed serve nobody. What cannot be removed now is left to the sweep."""
    keys = [entry.key for entry in written]
    with contextlib.suppress(StoreError, RankError):
        # Where the store is down every key would wait for its deadline: the first one tells.
        if keys and not store.delete(keys[:1]):
            store.delete(keys[1:])
