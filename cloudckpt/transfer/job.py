"""From the plan of a save to one rank's upload job, and from all ranks' receipts to the manifest."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from cloudckpt._cached import cached_property
from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.codec import DIGEST_BYTES
from cloudckpt.format.document import (
    FORMAT,
    VERSION,
    ArrayEntry,
    ChunkColumns,
    ChunkTable,
    Document,
    MeshEntry,
    ObjectEntry,
)
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.keys import chunk_key
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.zarr_json import array_document, encode_document, group_document
from cloudckpt.plan.tree import LeafSpec
from cloudckpt.plan.writes import SavePlan
from cloudckpt.transfer.upload import ChunkWrite, UploadJob, UploadReceipt


@dataclass(frozen=True, eq=False)
class ArrayPlan:
    """Which arrays there will be and who writes what of them; the same for every save of the same layout.

    ``leaves``, ``names``: the arrays and their names, by number.
    """

    leaves: tuple[LeafSpec, ...]
    names: tuple[str, ...]
    chunks: SavePlan
    compression: str | None

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Leaf id to number; aliases have none."""
        return {spec.id: i for i, spec in enumerate(self.leaves)}

    def locate(self, chunk: int) -> tuple[int, int]:
        """The number of the array that a chunk is of, and the chunk's number in the array's grid."""
        array = int(self.chunks.tensors_of(np.array([chunk]))[0])
        return array, chunk - int(self.chunks.first_chunks[array])


@dataclass(frozen=True, eq=False)
class Blueprint:
    """Everything about the checkpoint that is known before its chunks are written. ``notes``: to warn the caller of."""

    attempt: str
    step: int | None
    model_version: str | None
    layout: str
    arrays: ArrayPlan
    tree: values.Node
    meshes: tuple[MeshEntry, ...]
    metadata: values.Node
    world_size: int
    topology: str | None
    branch: int = 0
    notes: tuple[str, ...] = ()


def upload_job(arrays: ArrayPlan, attempt: str, rank: int) -> UploadJob:
    """What ``rank`` writes: its chunks in tensor order, and the zarr.json of their arrays."""
    plan, leaves, names = arrays.chunks, arrays.leaves, arrays.names
    chunks = plan.chunks_of(rank)
    tensors = plan.tensors_of(chunks)
    writes = []
    for chunk, tensor in zip(chunks.tolist(), tensors.tolist(), strict=True):
        grid, number = plan.grids[tensor], chunk - int(plan.first_chunks[tensor])
        kind = dtype(leaves[tensor].dtype)
        index = grid.index(number) + (0,) * len(kind.trailing)
        nbytes = int(grid.stored_elements[number]) * kind.itemsize
        writes.append(ChunkWrite(chunk, names[tensor], chunk_key(names[tensor], index), nbytes))
    described = _described_by(plan, rank)
    documents = {
        names[t]: encode_document(array_document(leaves[t].dtype, plan.grids[t], arrays.compression))
        for t in dict.fromkeys([*tensors.tolist(), *described])
    }
    group = encode_document(group_document())
    own = {f"{names[t]}/zarr.json": documents[names[t]] for t in described}
    if rank == 0:
        own["zarr.json"] = group
    return UploadJob(attempt, rank, tuple(writes), documents, own, group, arrays.compression)


def _described_by(plan: SavePlan, rank: int) -> list[int]:
    """Tensors whose zarr.json this rank writes in the plain layout: the writer of the first chunk, else rank 0."""
    firsts = zip(plan.grids, plan.first_chunks.tolist(), strict=True)
    return [i for i, (grid, first) in enumerate(firsts) if rank == (plan.owner[first] if grid.num_chunks else 0)]


def assemble(blueprint: Blueprint, receipts: Sequence[UploadReceipt]) -> Manifest:
    """The manifest. Raises InvalidStateError, naming tensor and box, unless every chunk was written exactly once."""
    plan = blueprint.arrays
    objects, chunks = _joined(plan, receipts)
    arrays = tuple(
        ArrayEntry(
            name=name,
            dtype=spec.dtype,
            shape=spec.shape,
            grid=grid.encode(),
            first_chunk=first,
            compression=plan.compression,
        )
        for name, spec, grid, first in zip(
            plan.names, plan.leaves, plan.chunks.grids, plan.chunks.first_chunks.tolist(), strict=True
        )
    )
    return Manifest(
        Document(
            format=FORMAT,
            version=VERSION,
            commit_id=uuid.uuid4().hex,
            attempt=blueprint.attempt,
            step=blueprint.step,
            branch=blueprint.branch,
            topology=blueprint.topology,
            model_version=blueprint.model_version,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            writer=f"cloudckpt {version('cloudckpt')}",
            world_size=blueprint.world_size,
            layout=blueprint.layout,
            meshes=blueprint.meshes,
            metadata=blueprint.metadata,
            tree=blueprint.tree,
            arrays=arrays,
            objects=objects,
            chunks=chunks,
        )
    )


def _joined(plan: ArrayPlan, receipts: Sequence[UploadReceipt]) -> tuple[tuple[ObjectEntry, ...], ChunkTable]:
    count = len(plan.chunks.owner)
    times = np.zeros(count, dtype=np.int64)
    columns: list[npt.NDArray[Any]] = [np.zeros(count, dtype=np.int64) for _ in range(4)]
    digests = None
    if all(receipt.digest is not None for receipt in receipts):
        digests = np.zeros((count, DIGEST_BYTES), dtype=np.uint8)
    objects: dict[str, ObjectEntry] = {}  # several ranks may refer to one that was there before
    numbers: dict[str, int] = {}
    for receipt in receipts:
        np.add.at(times, receipt.chunk, 1)
        for entry in receipt.objects:
            objects.setdefault(entry.key, entry)
            numbers.setdefault(entry.key, len(numbers))
        number = np.array([numbers[entry.key] for entry in receipt.objects], dtype=np.int64)
        parts = (number[receipt.object], receipt.byte_offset, receipt.nbytes, receipt.crc32c)
        for column, part in zip(columns, parts, strict=True):
            column[receipt.chunk] = part
        if digests is not None and receipt.digest is not None:
            digests[receipt.chunk] = receipt.digest
    wrong = np.nonzero(times != 1)[0]
    if len(wrong):
        raise _miscounted(plan, int(wrong[0]), int(times[wrong[0]]))
    holder, byte_offset, nbytes, crc32c = columns
    return tuple(objects.values()), ChunkColumns.pack(holder, byte_offset, nbytes, crc32c, digests)


def _miscounted(plan: ArrayPlan, chunk: int, times: int) -> InvalidStateError:
    array, number = plan.locate(chunk)
    path, box = values.dotted(plan.leaves[array].path), plan.chunks.grids[array].box(number)
    fault = f"was written {times} times" if times else "was written by nobody"
    return InvalidStateError(f"tensor {path!r}: chunk {box} {fault}")
