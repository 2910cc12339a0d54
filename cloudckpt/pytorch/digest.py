"""Proof that replicas are equal: digests of what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.codec import checksum
from cloudckpt.format.values import dotted
from cloudckpt.plan.shard import PieceTable, padded_bounds
from cloudckpt.plan.tree import LeafSpec
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard

BLOCK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, eq=False)
class Digests:
    """Of what one rank holds: row i of ``digest`` (uint32[k, 2]) is about piece i of ``pieces``, by array number."""

    pieces: PieceTable
    digest: npt.NDArray[np.uint32]


def shard_digests(shards: Mapping[int, LocalShard]) -> Digests:
    """``shards``: by array number."""
    held = [(number, *found) for number in sorted(shards) for found in piece_digests(shards[number]).items()]
    digest = np.array([digest for _, _, digest in held], dtype=np.uint32).reshape(-1, 2)
    return Digests(PieceTable.build((number, box) for number, box, _ in held), digest)


def piece_digests(shard: LocalShard) -> dict[Box, tuple[int, int]]:
    """Of every piece that holds anything."""
    return {piece.box: _digest(shard, piece.box) for piece in shard.pieces if piece.box.num_elements}


def _digest(shard: LocalShard, box: Box) -> tuple[int, int]:
    """CRC-32C and CRC-32, which together miss a chance difference once in 2**64; read in slabs to bound memory."""
    a = b = 0
    scratch = Scratch()
    for slab in _slabs(box, shard.itemsize):
        data = shard.read(slab, slab.shape, scratch)
        a, b = checksum(data, a), isal_zlib.crc32(data, b)
    return a, b


def _slabs(box: Box, itemsize: int) -> list[Box]:
    if not box.shape or box.num_elements * itemsize <= BLOCK_BYTES:
        return [box]
    rows = box.shape[0]
    step = max(1, rows * BLOCK_BYTES // (box.num_elements * itemsize))
    rest_offset, rest_shape = box.offset[1:], box.shape[1:]
    return [
        Box((box.offset[0] + row, *rest_offset), (min(step, rows - row), *rest_shape)) for row in range(0, rows, step)
    ]


def compare_digests(ranks: Sequence[Digests], leaves: Sequence[LeafSpec]) -> None:
    """Raises InvalidStateError naming the tensor and the ranks that differ. ``leaves``: by array number."""
    if not any(len(digests.pieces) for digests in ranks):
        return
    dims = max(digests.pieces.offset.shape[1] for digests in ranks)
    rank = np.repeat(np.arange(len(ranks)), [len(digests.pieces) for digests in ranks])
    digest = np.concatenate([digests.digest for digests in ranks])
    number = np.concatenate([digests.pieces.tensor for digests in ranks])
    piece = np.column_stack([number, np.concatenate([padded_bounds(digests.pieces, dims) for digests in ranks])])
    order = np.lexsort([rank, *piece.T[::-1]])
    rank, digest, piece = rank[order], digest[order], piece[order]
    is_new = np.ones(len(rank), dtype=bool)
    is_new[1:] = (piece[1:] != piece[:-1]).any(axis=1)
    first = np.nonzero(is_new)[0][np.cumsum(is_new) - 1]
    wrong = np.nonzero((digest != digest[first]).any(axis=1))[0]
    if len(wrong):
        row = int(wrong[0])
        leaf = leaves[piece[row, 0]]
        offset, shape = piece[row, 1 : 1 + dims].tolist(), piece[row, 1 + dims :].tolist()
        box = Box(tuple(offset[: len(leaf.shape)]), tuple(shape[: len(leaf.shape)]))
        raise InvalidStateError(
            f"{dotted(leaf.path)!r} {box} counts as replicated, but ranks {rank[first[row]]} and {rank[row]} "
            "hold different values; say which part each rank holds (DTensor, ShardedTensor, ShardingRules), "
            "or wrap it in PerRank(...)"
        )
