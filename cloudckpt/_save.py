"""Saving: state -> shards -> plan -> upload -> receipts -> commit."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, InvalidStateError, RankError, StoreError
from cloudckpt.format import values as plain
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.keys import chunk_key, new_attempt
from cloudckpt.format.manifest import (
    FORMAT,
    VERSION,
    ArrayEntry,
    ChunkColumns,
    Document,
    Manifest,
    MeshEntry,
    ObjectEntry,
)
from cloudckpt.format.zarr_json import array_document, encode_document, group_document
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.tree import MergedTree, RankTree, merge
from cloudckpt.plan.writes import SavePlan, plan_save
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.digest import Digests, compare_digests, shard_digests
from cloudckpt.pytorch.group import Group, make_group
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.state import RankState, encode_state, piece_table
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.upload import ChunkWrite, UploadJob, UploadReceipt, upload

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


@dataclass(frozen=True)
class _Description:
    """One rank's part of the first round."""

    options: _Options
    tree: RankTree
    pieces: PieceTable
    ids: tuple[str, ...]
    meshes: tuple[MeshEntry, ...]
    metadata: plain.Node


@dataclass(frozen=True, eq=False)
class _Assignment:
    """What the coordinator tells all ranks to do. ``order``: id to tensor number, ``checked``: digests to send."""

    attempt: str
    merged: MergedTree
    plan: SavePlan
    order: Mapping[str, int]
    checked: Mapping[str, int]


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
    rules: None = None,
    metadata: Mapping[str, Any] | None = None,
    values: Literal["check", "rank0"] = "check",
    allow_pickle: bool = False,
    progress: Progress = None,
    config: Config | None = None,
) -> Commit:
    """Write ``state`` as a committed checkpoint at ``url``. Collective over ``group`` (default: all ranks).

    ``state`` is a nested dict, list or tuple of tensors, DTensors, numpy arrays, plain values and
    objects with ``state_dict()``. It must not change before this returns. Either the checkpoint is
    whole and durable afterwards, or an error is raised on every rank and nothing is visible.

    ``values``: plain values must be equal on all ranks ("check"), or those of rank 0 are kept
    ("rank0"). ``metadata``: plain values for people and tools, beside the state. ``progress``: True
    for a bar on rank 0, or a function of (bytes done, bytes in all) of the rank.

    Raises InvalidStateError, AlreadyCommittedError, NotFoundError (no such bucket), StoreError, and
    RankError where a part of the ranks failed.
    """
    config = config or Config()
    ranks = make_group(group, config.rank_timeout_s)
    _check_options(layout, compression, values, rules, step)
    options = _Options(
        os.fspath(url), step, layout, compression, overwrite, values, config.check_replicas, config.chunk_bytes
    )
    opened: list[Store] = []

    def describe() -> _Description:
        opened.append(resolve(url, storage_options, config))
        held.append(encode_state(state, allow_pickle=allow_pickle))
        return _description(held[0], options, metadata)

    held: list[RankState] = []
    try:
        assignment = ranks.round(describe, lambda parts: _assign(parts, opened[0]))
        return _write(ranks, opened[0], assignment, held[0], options, metadata, progress, config)
    finally:
        for store in opened:
            store.close()


def _check_options(layout: str, compression: str | None, values: str, rules: object, step: object) -> None:
    for name, value, allowed in (
        ("layout", layout, ("packed", "zarr")),
        ("compression", compression, (None, "zstd")),
        ("values", values, ("check", "rank0")),
    ):
        if value not in allowed:
            raise InvalidStateError(f"{name} must be one of {allowed}, not {value!r}")
    if rules is not None:
        raise InvalidStateError("rules are not supported by this version: hold sharded tensors as DTensors")
    if step is not None and (type(step) is not int or step < 0):
        raise InvalidStateError(f"step must be an int >= 0, not {step!r}")


def _description(state: RankState, options: _Options, metadata: Mapping[str, Any] | None) -> _Description:
    ids = tuple(state.shards)
    order = {name: i for i, name in enumerate(ids)}
    encoded = plain.encode(dict(metadata or {}))
    return _Description(options, state.tree, piece_table(state.shards, order), ids, state.meshes, encoded)


def _assign(parts: Sequence[_Description], store: Store) -> _Assignment:
    """On the coordinator: one tree, one plan."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if part.options != first.options:
            raise InvalidStateError(
                f"save() was called with {first.options} on rank 0 but {part.options} on rank {rank}"
            )
    catalog.check_absent(store, overwrite=first.options.overwrite)
    merged = merge([part.tree for part in parts], values=first.options.values)
    order = {spec.id: i for i, spec in enumerate(merged.leaves)}
    tables = [_renumbered(part, order) for part in parts]
    specs = [TensorSpec(plain.dotted(s.path), s.shape, dtype(s.dtype).itemsize) for s in merged.leaves]
    plan = plan_save(specs, tables, chunk_bytes=first.options.chunk_bytes)
    checked = {} if first.options.check_replicas == "none" else _shared_tensors(merged, tables, first.options)
    return _Assignment(new_attempt(), merged, plan, order, checked)


def _renumbered(part: _Description, order: Mapping[str, int]) -> PieceTable:
    """A rank numbers its own tensors; here they get the numbers of the merged tree. Aliases fall away."""
    numbers = np.array([order.get(i, -1) for i in part.ids], dtype=np.int64)
    if not len(part.pieces):
        return part.pieces
    tensor = numbers[part.pieces.tensor]
    rows = np.nonzero(tensor >= 0)[0]
    rows = rows[np.argsort(tensor[rows], kind="stable")]
    return PieceTable(tensor[rows], part.pieces.offset[rows], part.pieces.shape[rows])


def _shared_tensors(merged: MergedTree, tables: Sequence[PieceTable], options: _Options) -> dict[str, int]:
    """Tensors whose replicas must prove that they are equal."""
    holders = np.zeros(len(merged.leaves), dtype=np.int64)
    for table in tables:
        holders[np.unique(table.tensor)] += 1
    return {
        spec.id: i
        for i, spec in enumerate(merged.leaves)
        if holders[i] > 1 and (spec.checked or options.check_replicas == "all")
    }


def _write(
    ranks: Group,
    store: Store,
    assignment: _Assignment,
    state: RankState,
    options: _Options,
    metadata: Mapping[str, Any] | None,
    progress: Progress,
    config: Config,
) -> Commit:
    written: list[ObjectEntry] = []

    def send() -> _Report:
        digests = shard_digests({i: state.shards[i] for i in assignment.checked if i in state.shards})
        job, shards = _job(assignment, state, options, ranks.rank)
        total = sum(write.nbytes for write in job.writes)
        scratch = Scratch()
        with start_progress(progress, "save", total, show=ranks.rank == 0) as advance:
            receipt = upload(
                store,
                job,
                lambda write: _read_chunk(assignment, shards, write, scratch),
                layout=options.layout,
                config=config,
                cancel=ranks.cancel,
                advance=advance,
                written=written,
            )
        counts = store.counts
        return _Report(receipt, digests, counts.gets + counts.puts + counts.others)

    def assemble(reports: Sequence[_Report]) -> tuple[Manifest, int]:
        compare_digests([report.digests for report in reports])
        manifest = _manifest(assignment, options, metadata, state, [r.receipt for r in reports], ranks.size)
        return manifest, sum(report.num_requests for report in reports)

    pending: list[tuple[Manifest, int]] = []

    def hold(reports: Sequence[_Report]) -> None:
        pending.append(assemble(reports))

    try:
        ranks.round(send, hold)
    except CloudckptError:
        _remove(store, written)
        raise

    def publish(_: Sequence[None]) -> Commit:
        manifest, num_requests = pending[0]
        before = store.counts
        catalog.commit(store, manifest, overwrite=options.overwrite)
        after = store.counts
        own = after.gets + after.puts + after.others - before.gets - before.puts - before.others
        document = manifest.document
        return Commit(
            url=store.url,
            commit_id=document.commit_id,
            step=document.step,
            nbytes=manifest.nbytes,
            num_chunks=document.chunks.count,
            num_objects=len(document.objects),
            num_requests=num_requests + own,
        )

    try:
        return ranks.round(lambda: None, publish)
    except AlreadyCommittedError:
        _remove(store, written)
        raise


def _job(
    assignment: _Assignment, state: RankState, options: _Options, rank: int
) -> tuple[UploadJob, dict[int, LocalShard]]:
    """This rank's chunks in tensor order, and the shards that they come from."""
    plan, merged = assignment.plan, assignment.merged
    shards = {assignment.order[i]: shard for i, shard in state.shards.items() if i in assignment.order}
    names = [merged.names[spec.id] for spec in merged.leaves]
    writes: list[ChunkWrite] = []
    chunks = plan.chunks_of(rank)
    tensors = np.searchsorted(plan.first_chunks, chunks, side="right") - 1
    for chunk, tensor in zip(chunks.tolist(), tensors.tolist(), strict=True):
        grid = plan.grids[tensor]
        number = chunk - int(plan.first_chunks[tensor])
        kind = dtype(merged.leaves[tensor].dtype)
        index = grid.index(number) + (0,) * len(kind.trailing)
        nbytes = int(grid.stored_elements[number]) * kind.itemsize
        writes.append(ChunkWrite(chunk, names[tensor], chunk_key(names[tensor], index), nbytes))
    documents = {
        names[t]: encode_document(array_document(merged.leaves[t].dtype, plan.grids[t], options.compression))
        for t in dict.fromkeys([*tensors.tolist(), *(_unowned(plan) if rank == 0 else ())])
    }
    group = encode_document(group_document())
    own = {f"{names[t]}/zarr.json": documents[names[t]] for t in _first_owned(plan, rank)}
    if rank == 0:
        own["zarr.json"] = group
    job = UploadJob(assignment.attempt, rank, tuple(writes), documents, own, group, options.compression)
    return job, shards


def _unowned(plan: SavePlan) -> list[int]:
    """Tensors without elements have no chunks, and so no rank that writes them."""
    return [i for i, grid in enumerate(plan.grids) if not grid.num_chunks]


def _first_owned(plan: SavePlan, rank: int) -> list[int]:
    """Tensors whose zarr.json this rank writes in the plain layout: whoever writes the first chunk does."""
    return [
        i
        for i, (grid, first) in enumerate(zip(plan.grids, plan.first_chunks.tolist(), strict=True))
        if (int(plan.owner[first]) if grid.num_chunks else 0) == rank
    ]


def _read_chunk(
    assignment: _Assignment, shards: Mapping[int, LocalShard], write: ChunkWrite, scratch: Scratch
) -> Bytes1D:
    plan = assignment.plan
    tensor = int(np.searchsorted(plan.first_chunks, write.chunk, side="right")) - 1
    number = write.chunk - int(plan.first_chunks[tensor])
    grid = plan.grids[tensor]
    return shards[tensor].read(grid.box(number), grid.stored_shape(number), scratch)


def _manifest(
    assignment: _Assignment,
    options: _Options,
    metadata: Mapping[str, Any] | None,
    state: RankState,
    receipts: Sequence[UploadReceipt],
    world_size: int,
) -> Manifest:
    plan, merged = assignment.plan, assignment.merged
    objects, columns = _joined_receipts(plan, merged, receipts)
    arrays = tuple(
        ArrayEntry(
            name=merged.names[spec.id],
            dtype=spec.dtype,
            shape=spec.shape,
            grid=grid.encode(),
            first_chunk=first,
            compression=options.compression,
        )
        for spec, grid, first in zip(merged.leaves, plan.grids, plan.first_chunks.tolist(), strict=True)
    )
    return Manifest(
        Document(
            format=FORMAT,
            version=VERSION,
            commit_id=uuid.uuid4().hex,
            attempt=assignment.attempt,
            step=options.step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            writer=f"cloudckpt {version('cloudckpt')}",
            world_size=world_size,
            layout=options.layout,
            meshes=state.meshes,
            metadata=plain.encode(dict(metadata or {})),
            tree=merged.node,
            arrays=arrays,
            objects=objects,
            chunks=ChunkColumns.pack(*columns),
        )
    )


def _joined_receipts(
    plan: SavePlan, merged: MergedTree, receipts: Sequence[UploadReceipt]
) -> tuple[tuple[ObjectEntry, ...], tuple[Any, Any, Any, Any]]:
    """The object list and the chunk table. Raises InvalidStateError unless every chunk was written exactly once."""
    count = len(plan.owner)
    times = np.zeros(count, dtype=np.int64)
    table = np.zeros((4, count), dtype=np.int64)
    objects: list[ObjectEntry] = []
    for receipt in receipts:
        np.add.at(times, receipt.chunk, 1)
        table[:, receipt.chunk] = [
            receipt.object + len(objects), receipt.byte_offset, receipt.nbytes, receipt.crc32c.astype(np.int64)
        ]  # fmt: skip
        objects.extend(receipt.objects)
    wrong = np.nonzero(times != 1)[0]
    if len(wrong):
        chunk = int(wrong[0])
        tensor = int(np.searchsorted(plan.first_chunks, chunk, side="right")) - 1
        box = plan.grids[tensor].box(chunk - int(plan.first_chunks[tensor]))
        fault = "was written by nobody" if times[chunk] == 0 else f"was written {times[chunk]} times"
        raise InvalidStateError(f"tensor {plain.dotted(merged.leaves[tensor].path)!r}: chunk {box} {fault}")
    return tuple(objects), (table[0], table[1], table[2], table[3])


def _remove(store: Store, written: Sequence[ObjectEntry]) -> None:
    """Objects of a save that was not committed serve nobody. What cannot be removed now is left to the sweep."""
    keys = [entry.key for entry in written]
    with contextlib.suppress(StoreError, RankError):
        # Where the store is down every key would wait for its deadline: the first one tells.
        if keys and not store.delete(keys[:1]):
            store.delete(keys[1:])
