"""What every rank fetches by itself of a tensor that was cut along the other dim: little more than it wants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cloudckpt.config import Config
from cloudckpt.format.box import Box
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.writes import plan_save
from cloudckpt.transfer.download import effective_read_bytes

EXTENT = 4096
CHECKSUM_BYTES = 4
FRAMING_BYTES = 128
"""Between neighbours in a pack: a header, a name, alignment."""


def cut(dim: int, ways: int) -> list[PieceTable]:
    size = EXTENT // ways
    shape = tuple(size if d == dim else EXTENT for d in range(2))
    return [PieceTable.build([(0, Box(tuple(i * size * (d == dim) for d in range(2)), shape))]) for i in range(ways)]


@pytest.mark.parametrize(
    ("saved", "loaded", "dim"), [(a, b, dim) for a, b in itertools.product([2, 4], [2, 4]) for dim in (0, 1)]
)
def test_a_rank_fetches_at_most_a_tenth_more_than_it_wants(saved: int, loaded: int, dim: int) -> None:
    config = Config()
    spec = TensorSpec("w", (EXTENT, EXTENT), 4)
    plan = plan_save([spec], cut(dim, saved), chunk_bytes=config.chunk_bytes)
    nbytes = plan.grids[0].stored_elements * spec.itemsize + CHECKSUM_BYTES
    offset = np.zeros(len(nbytes), dtype=np.int64)
    for rank in range(saved):
        mine = plan.chunks_of(rank)
        offset[mine] = np.cumsum(nbytes[mine] + FRAMING_BYTES) - nbytes[mine]
    stored = StoredChunks(plan.grids, plan.first_chunks, plan.owner.astype(np.int64), offset, nbytes, [spec.itemsize])
    load = plan_load(stored, cut(1 - dim, loaded), read_bytes=effective_read_bytes(config))
    for rank in range(loaded):
        fetched = sum(read.nbytes for read in load.rank(rank).reads)
        assert fetched <= 1.10 * EXTENT * EXTENT * spec.itemsize / loaded
