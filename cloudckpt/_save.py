"""Saving: state -> shards -> plan -> upload -> receipts -> commit."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, InvalidStateError, RankError, StoreError
from cloudckpt.format import values as plain
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.keys import new_attempt, step_dir
from cloudckpt.format.manifest import Manifest, MeshEntry, ObjectEntry
from cloudckpt.plan.rules import ShardingRules, check_all_matched
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.tree import MergedTree, RankTree, merge
from cloudckpt.plan.writes import SavePlan, plan_save
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.digest import Digests, compare_digests, shard_digests
from cloudckpt.pytorch.group import Group, make_group
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.state import RankState, encode_state, piece_table
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.job import Blueprint, assemble, upload_job
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


@dataclass(frozen=True)
class _Options:
    """What all ranks must have been called with alike."""

    url: str
    step: int | None
    layout: str
    compression: str | None
    overwrite: bool
    values: str
    check_replicas: str
    chunk_bytes: int
    rules: str | None


@dataclass(frozen=True)
class _Description:
    """One rank's part of the first round."""

    options: _Options
    tree: RankTree
    pieces: PieceTable
    ids: tuple[str, ...]
    meshes: tuple[MeshEntry, ...]
    metadata: plain.Node
    matched: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Assignment:
    """What the coordinator tells all ranks to do. ``order``: id to tensor number, ``checked``: digests to send."""

    blueprint: Blueprint
    order: Mapping[str, int]
    checked: tuple[str, ...]


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
    opened: list[Store] = []

    def describe() -> _Description:
        describer = Describer(rules, ranks.rank, ranks.size)
        options = _Options(
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
        held.append(encode_state(state, allow_pickle=allow_pickle, describer=describer))
        return _description(held[0], options, metadata, describer)

    held: list[RankState] = []
    try:
        assignment = ranks.round(describe, lambda parts: _assign(parts, opened[0], rules))
        return _write(ranks, opened[0], assignment, held[0], overwrite=overwrite, progress=progress, config=config)
    finally:
        for store in opened:
            store.close()


def _check_options(options: _Options) -> None:
    for name, value, allowed in (
        ("layout", options.layout, ("packed", "zarr")),
        ("compression", options.compression, (None, "zstd")),
        ("values", options.values, ("check", "rank0")),
    ):
        if value not in allowed:
            raise InvalidStateError(f"{name} must be one of {allowed}, not {value!r}")
    if options.step is not None:
        step_dir(options.step)  # refuses what cannot name a step


def _description(
    state: RankState, options: _Options, metadata: Mapping[str, Any] | None, describer: Describer
) -> _Description:
    ids = tuple(state.shards)
    order = {name: i for i, name in enumerate(ids)}
    encoded = plain.encode(dict(metadata or {}))
    table = piece_table(state.shards, order)
    return _Description(options, state.tree, table, ids, state.meshes, encoded, tuple(sorted(describer.matched)))


def _assign(parts: Sequence[_Description], store: Store, rules: ShardingRules | None) -> _Assignment:
    """On the coordinator: one tree, one plan."""
    options = parts[0].options
    for rank, part in enumerate(parts):
        if part.options != options:
            raise InvalidStateError(f"save() was called with {options} on rank 0 but {part.options} on rank {rank}")
    catalog.check_absent(store, overwrite=options.overwrite)
    merged = merge([part.tree for part in parts], values=options.values)
    check_all_matched(rules, [part.matched for part in parts], (plain.dotted(spec.path) for spec in merged.leaves))
    for note in merged.notes:
        warnings.warn(note, stacklevel=2)
    order = {spec.id: i for i, spec in enumerate(merged.leaves)}
    tables = [_renumbered(part, order) for part in parts]
    specs = [TensorSpec(plain.dotted(s.path), s.shape, dtype(s.dtype).itemsize) for s in merged.leaves]
    plan = plan_save(specs, tables, chunk_bytes=options.chunk_bytes)
    blueprint = Blueprint(
        attempt=new_attempt(),
        step=options.step,
        layout=options.layout,
        compression=options.compression,
        merged=merged,
        plan=plan,
        meshes=tuple(dict.fromkeys(mesh for part in parts for mesh in part.meshes)),
        metadata=parts[0].metadata,
        world_size=len(parts),
    )
    return _Assignment(blueprint, order, _to_compare(merged, plan, options.check_replicas))


def _renumbered(part: _Description, order: Mapping[str, int]) -> PieceTable:
    """A rank numbers its own tensors; here they get the numbers of the merged tree. Aliases fall away."""
    numbers = np.array([order.get(i, -1) for i in part.ids], dtype=np.int64)
    if not len(part.pieces):
        return part.pieces
    tensor = numbers[part.pieces.tensor]
    rows = np.nonzero(tensor >= 0)[0]
    rows = rows[np.argsort(tensor[rows], kind="stable")]
    return part.pieces.take(rows, tensor[rows])


def _to_compare(merged: MergedTree, plan: SavePlan, check_replicas: str) -> tuple[str, ...]:
    """Ids of the tensors whose replicas must prove that they are equal."""
    if check_replicas == "none":
        return ()
    return tuple(
        spec.id
        for spec, replicated in zip(merged.leaves, plan.replicated.tolist(), strict=True)
        if replicated and (spec.checked or check_replicas == "all")
    )


def _write(
    ranks: Group,
    store: Store,
    assignment: _Assignment,
    state: RankState,
    *,
    overwrite: bool,
    progress: Progress,
    config: Config,
) -> Commit:
    blueprint = assignment.blueprint
    written: list[ObjectEntry] = []
    assembled: list[tuple[Manifest, int]] = []

    def send() -> _Report:
        digests = shard_digests({i: state.shards[i] for i in assignment.checked if i in state.shards})
        job = upload_job(blueprint, ranks.rank)
        shards = {assignment.order[i]: shard for i, shard in state.shards.items() if i in assignment.order}
        scratch = Scratch()
        total = sum(write.nbytes for write in job.writes)
        with start_progress(progress, "save", total, show=ranks.rank == 0) as advance:
            receipt = upload(
                store,
                job,
                lambda write: _read_chunk(blueprint.plan, shards, write, scratch),
                layout=blueprint.layout,
                config=config,
                cancel=ranks.cancel,
                advance=advance,
                written=written,
            )
        return _Report(receipt, digests, store.counts.requests)

    def check(reports: Sequence[_Report]) -> None:
        compare_digests([report.digests for report in reports])
        manifest = assemble(blueprint, [report.receipt for report in reports])
        assembled.append((manifest, sum(report.num_requests for report in reports)))

    def publish(_: Sequence[None]) -> Commit:
        manifest, num_requests = assembled[0]
        before = store.counts.requests
        catalog.commit(store, manifest, overwrite=overwrite)
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
        return ranks.round(lambda: None, publish)
    except AlreadyCommittedError:
        _remove(store, written)
        raise


def _read_chunk(plan: SavePlan, shards: Mapping[int, LocalShard], write: ChunkWrite, scratch: Scratch) -> Bytes1D:
    tensor = int(plan.tensors_of(np.array([write.chunk]))[0])
    number = write.chunk - int(plan.first_chunks[tensor])
    grid = plan.grids[tensor]
    return shards[tensor].read(grid.box(number), grid.stored_shape(number), scratch)


def _remove(store: Store, written: Sequence[ObjectEntry]) -> None:
    """Objects of a save that was not committed serve nobody. What cannot be removed now is left to the sweep."""
    keys = [entry.key for entry in written]
    with contextlib.suppress(StoreError, RankError):
        # Where the store is down every key would wait for its deadline: the first one tells.
        if keys and not store.delete(keys[:1]):
            store.delete(keys[1:])
