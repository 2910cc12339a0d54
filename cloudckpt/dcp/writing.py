"""One rank's part of a save: its items, resolved by the planner, encoded and uploaded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from cloudckpt.config import Config
from cloudckpt.dcp.layout import Share
from cloudckpt.dcp.plain import PlainItems
from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.tree import Node
from cloudckpt.plan.shard import PieceBox
from cloudckpt.plan.writes import SavePlan as ChunkPlan
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard, dtype_name, plain_tensor
from cloudckpt.store.base import Store
from cloudckpt.telemetry import Recorder
from cloudckpt.transfer.job import ArrayPlan, upload_job
from cloudckpt.transfer.upload import ChunkWrite, UploadJob, UploadReceipt, upload


@dataclass(frozen=True, eq=False)
class RankReport:
    """What a rank has written. ``late``: arrays that stand in its values. ``raw``, ``streams``: as in `PlainItems`.

    The rows of ``receipt`` are those of the table of all chunks; from its end on, chunks of ``late``.
    """

    attempt: str
    receipt: UploadReceipt
    late: ArrayPlan
    nodes: Mapping[str, Node]
    raw: frozenset[str]
    streams: frozenset[str]
    num_requests: int
    seconds: Mapping[str, float]


def write_share(
    store: Store,
    share: Share,
    plan: SavePlan,
    planner: SavePlanner,
    recorder: Recorder,
    *,
    layout: str,
    allow_pickle: bool,
    progress: Progress,
    config: Config,
    written: list[ObjectEntry],
) -> RankReport:
    """Everything is durable on return. ``written`` grows with every object that is there."""
    with recorder.stage("describe"):
        plain = PlainItems(planner, allow_pickle)
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                plain.add(item)
        late = plain.arrays(chunk_bytes=config.chunk_bytes, compression=share.compression)
        job = _joined(share, upload_job(share.arrays, share.attempt, share.rank), late)
        source = _Source(share, plan.items, planner, late, plain.shards, kept=config.num_threads)
    with recorder.stage("upload"):
        total = sum(write.nbytes for write in job.writes)
        with start_progress(progress, "save", total, show=share.rank == 0) as advance:
            receipt = upload(
                store,
                job,
                source.read,
                layout=layout,
                config=config,
                cancel=threading.Event(),  # DCP tells no rank that another one has failed
                advance=advance,
                written=written,
            )
    return RankReport(
        attempt=share.attempt,
        receipt=replace(receipt, chunk=_rows(share, receipt)),
        late=late,
        nodes=plain.nodes,
        raw=frozenset(plain.raw),
        streams=frozenset(plain.streams),
        num_requests=store.counts.requests,
        seconds=recorder.seconds,
    )


def _joined(share: Share, job: UploadJob, late: ArrayPlan) -> UploadJob:
    """The late arrays come last; their chunks are counted on."""
    first = len(share.arrays.chunks.owner)
    more = upload_job(late, share.attempt, 0)
    own = {key: document for key, document in more.own_documents.items() if key != "zarr.json"}
    return replace(
        job,
        writes=(*job.writes, *(replace(write, chunk=first + write.chunk) for write in more.writes)),
        documents={**job.documents, **more.documents},
        own_documents={**job.own_documents, **own},
    )


def _rows(share: Share, receipt: UploadReceipt) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    first = len(share.arrays.chunks.owner)
    chunk = receipt.chunk
    is_late = chunk >= first
    rows = share.num_rows + chunk - first
    rows[~is_late] = share.all_rows(chunk[~is_late])
    return rows


def join_late(arrays: ArrayPlan, reports: Sequence[RankReport]) -> tuple[ArrayPlan, list[UploadReceipt]]:
    """On the coordinator: the arrays of all ranks' values behind those that were planned, and receipts that count so.

    Raises InvalidStateError where two have the same name.
    """
    leaves, names, grids = [*arrays.leaves], [*arrays.names], [*arrays.chunks.grids]
    num_rows = first = len(arrays.chunks.owner)
    receipts = []
    for report in reports:
        chunk = report.receipt.chunk
        receipts.append(replace(report.receipt, chunk=np.where(chunk < first, chunk, chunk - first + num_rows)))
        leaves += report.late.leaves
        names += report.late.names
        grids += report.late.chunks.grids
        num_rows += len(report.late.chunks.owner)
    seen: dict[str, str] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if seen.setdefault(name.lower(), leaf.id) != leaf.id:
            raise InvalidStateError(f"{seen[name.lower()]!r} and {leaf.id!r} would both be arrays named {name!r}")
    counts = [grid.num_chunks for grid in grids]
    firsts = np.cumsum([0, *counts], dtype=np.int64)[:-1]
    owner, replicated = np.zeros(num_rows, dtype=np.int32), np.zeros(len(grids), dtype=bool)
    chunks = ChunkPlan(tuple(grids), firsts, owner, replicated)
    return ArrayPlan(tuple(leaves), tuple(names), chunks, arrays.compression), receipts


class _Source:
    """The bytes of chunks. Items are resolved when their first chunk is asked for, and the last few are kept."""

    def __init__(
        self,
        share: Share,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        late: ArrayPlan,
        late_shards: Sequence[LocalShard],
        *,
        kept: int,
    ) -> None:
        self._arrays = share.arrays
        self._first_late = len(share.arrays.chunks.owner)
        self._planner = planner
        self._late, self._late_shards = late, late_shards
        self._items: dict[str, list[WriteItem]] = {}
        for item in items:
            if item.type is not WriteItemType.BYTE_IO:
                self._items.setdefault(item.index.fqn, []).append(item)
        self._resolved: OrderedDict[int, LocalShard] = OrderedDict()
        self._num_kept = kept
        self._lock = threading.Lock()
        self._scratch = Scratch()

    def read(self, write: ChunkWrite) -> Bytes1D:
        late = write.chunk - self._first_late
        arrays, chunk = (self._arrays, write.chunk) if late < 0 else (self._late, late)
        array, number = arrays.locate(chunk)
        grid = arrays.chunks.grids[array]
        box = grid.box(number)
        shard = self._shard(arrays.leaves[array].id, box) if late < 0 else self._late_shards[array]
        return shard.read(box, grid.stored_shape(number), self._scratch)

    def _shard(self, key: str, box: Box) -> LocalShard:
        item = next((item for item in self._items.get(key, ()) if _box(item).intersect(box) == box), None)
        if item is None:
            raise InvalidStateError(f"{key!r}: the plan of all ranks has {box} for this rank, its own plan has not")
        with self._lock:
            shard = self._resolved.get(id(item))
            if shard is None:
                shard = self._resolved[id(item)] = self._resolve(key, item)
                while len(self._resolved) > self._num_kept:
                    self._resolved.popitem(last=False)
            return shard

    def _resolve(self, key: str, item: WriteItem) -> LocalShard:
        with torch.no_grad():  # else autograd takes part in the to_local() of DTensors
            tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidStateError(f"{key!r}: the planner announced a tensor, and gave a {type(tensor).__name__}")
        local = plain_tensor(tensor, key)
        data, box = item.tensor_data, _box(item)
        assert data is not None
        if tuple(local.shape) != box.shape or local.dtype != data.properties.dtype:
            raise InvalidStateError(
                f"{key!r}: the plan has a {data.properties.dtype} tensor of {box.shape}, the planner gave a "
                f"{local.dtype} tensor of {tuple(local.shape)}; plans that DCP keeps (enable_plan_caching) do not "
                "notice other dtypes: switch that off once where they change"
            )
        piece = PieceBox((0,) * len(box.shape), box.offset, box.shape)
        return LocalShard(key, dtype_name(local, key), tuple(data.size), (piece,), local, placed=True)


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
