"""Proof that replicas are equal: digests of what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isal import isal_zlib

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.codec import checksum
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard

BLOCK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Digests:
    """By tensor: its dotted path, and a 64-bit digest of every piece, by the piece's box."""

    pieces: Mapping[str, tuple[str, Mapping[Box, tuple[int, int]]]]


def shard_digests(shards: Mapping[str, LocalShard]) -> Digests:
    return Digests({name: (shard.text, piece_digests(shard)) for name, shard in shards.items()})


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


def compare_digests(ranks: Sequence[Digests]) -> None:
    """Raises InvalidStateError naming the tensor and the ranks that differ."""
    seen: dict[tuple[str, Box], tuple[int, tuple[int, int]]] = {}
    for rank, digests in enumerate(ranks):
        for name, (text, pieces) in digests.pieces.items():
            for box, digest in pieces.items():
                first, expected = seen.setdefault((name, box), (rank, digest))
                if digest != expected:
                    raise InvalidStateError(
                        f"{text!r} {box} counts as replicated, but ranks {first} and {rank} hold different values; "
                        "say which part each rank holds (DTensor, ShardedTensor, ShardingRules), "
                        "or wrap it in PerRank(...)"
                    )
