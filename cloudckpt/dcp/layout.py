"""From DCP's plans of all ranks to the arrays of the checkpoint, and to what each rank writes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from cloudckpt._cached import cached_property
from cloudckpt.dcp.keys import nested_paths
from cloudckpt.errors import InvalidStateError
from cloudckpt.format.array_names import array_names
from cloudckpt.format.box import Box
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.grid import Grid, Ints
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.tree import LeafSpec
from cloudckpt.plan.writes import SavePlan as ChunkPlan
from cloudckpt.plan.writes import plan_save
from cloudckpt.pytorch.shards import stored_dtype
from cloudckpt.transfer.job import ArrayPlan


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank writes: arrays of which it has chunks.

    ``own``: the chunks that it writes, counted through these arrays; ``rows``: where each array begins in the table of
    all chunks, which has ``num_rows`` rows.
    """

    url: str
    attempt: str
    rank: int
    num_ranks: int
    leaves: tuple[LeafSpec, ...]
    names: tuple[str, ...]
    grids: tuple[Grid, ...]
    own: Ints
    rows: Ints
    num_rows: int
    compression: str | None

    @cached_property
    def arrays(self) -> ArrayPlan:
        """The owner of every chunk that is another's is -1."""
        counts = [grid.num_chunks for grid in self.grids]
        owner = np.full(sum(counts), -1, dtype=np.int32)
        owner[self.own] = self.rank
        chunks = ChunkPlan(self.grids, _firsts(counts), owner, np.zeros(len(counts), dtype=bool))
        return ArrayPlan(self.leaves, self.names, chunks, self.compression)

    def all_rows(self, chunks: Ints) -> Ints:
        """The rows in the table of all chunks, of chunks counted through these arrays."""
        array = self.arrays.chunks.tensors_of(chunks)
        return self.rows[array] + chunks - self.arrays.chunks.first_chunks[array]


def _firsts(counts: Sequence[int]) -> Ints:
    return np.cumsum([0, *counts], dtype=np.int64)[:-1]


def lay_out(plans: Sequence[SavePlan], *, chunk_bytes: int, compression: str | None) -> ArrayPlan:
    """The arrays, by the order of their keys in the plans, and who writes which chunk. ``plans``: by rank.

    A leaf's id is DCP's key. Raises InvalidStateError, naming key, box and ranks, for items that do not make whole
    tensors.
    """
    found: dict[str, _Tensor] = {}
    pieces: list[list[tuple[int, Box]]] = []
    for rank, plan in enumerate(plans):
        held = []
        for item in plan.items:
            if item.type is not WriteItemType.BYTE_IO:
                tensor, box = _tensor_of(item)
                known = found.setdefault(item.index.fqn, _Tensor(len(found), *tensor, rank))
                known.check(item.index.fqn, *tensor, rank)
                held.append((known.number, box))
        pieces.append(sorted(held, key=lambda piece: piece[0]))
    leaves = [
        LeafSpec(id=key, path=path, dtype=stored_dtype(found[key].dtype, key), shape=found[key].shape)
        for key, path in _paths(plans, found).items()
    ]
    specs = [TensorSpec(leaf.id, leaf.shape, dtype(leaf.dtype).itemsize) for leaf in leaves]
    chunks = plan_save(specs, [PieceTable.build(held) for held in pieces], chunk_bytes=chunk_bytes)
    return ArrayPlan(tuple(leaves), tuple(array_names([leaf.path for leaf in leaves])), chunks, compression)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """As the first rank says that has a part of it."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int

    def check(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> None:
        if (self.shape, self.dtype) != (shape, dtype):
            raise InvalidStateError(
                f"{key!r} is a {self.dtype} tensor of {self.shape} on rank {self.rank}, "
                f"but a {dtype} tensor of {shape} on rank {rank}"
            )


def _tensor_of(item: WriteItem) -> tuple[tuple[tuple[int, ...], torch.dtype], Box]:
    data = item.tensor_data
    if data is None:
        raise InvalidStateError(f"{item.index.fqn!r}: the planner has a {item.type} item without tensor_data")
    shape = tuple(data.size)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if not len(box.offset) == len(box.shape) == len(shape):
        raise InvalidStateError(f"{item.index.fqn!r}: the planner's {box} has not the dims of the tensor of {shape}")
    return (shape, data.properties.dtype), box


def _paths(plans: Sequence[SavePlan], tensors: Mapping[str, _Tensor]) -> dict[str, tuple[Any, ...]]:
    """Of every tensor; of flat keys, the key alone."""
    mappings: dict[str, Any] = {}
    for plan in plans:
        if isinstance(plan.planner_data, Mapping):
            mappings.update({key: path for key, path in plan.planner_data.items() if key not in mappings})
    keys = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
    nested = nested_paths(keys, mappings)
    return {key: (key,) if nested is None else nested[key] for key in tensors}


def shares(arrays: ArrayPlan, url: str, attempt: str, num_ranks: int) -> list[Share]:
    """By rank. Arrays without chunks are rank 0's."""
    plan = arrays.chunks
    order = np.argsort(plan.owner, kind="stable")
    bounds = np.searchsorted(plan.owner[order], np.arange(num_ranks + 1))
    empty = [number for number, grid in enumerate(plan.grids) if not grid.num_chunks]
    found = []
    for rank in range(num_ranks):
        chunks = order[bounds[rank] : bounds[rank + 1]]
        array = plan.tensors_of(chunks)
        held = np.unique(array)
        if rank == 0 and empty:
            held = np.union1d(held, np.array(empty, dtype=np.int64))
        first = _firsts([plan.grids[i].num_chunks for i in held.tolist()])
        own = first[np.searchsorted(held, array)] + chunks - plan.first_chunks[array]
        share = Share(
            url=url,
            attempt=attempt,
            rank=rank,
            num_ranks=num_ranks,
            leaves=tuple(arrays.leaves[i] for i in held.tolist()),
            names=tuple(arrays.names[i] for i in held.tolist()),
            grids=tuple(plan.grids[i] for i in held.tolist()),
            own=own,
            rows=plan.first_chunks[held],
            num_rows=len(plan.owner),
            compression=arrays.compression,
        )
        found.append(share)
    return found
