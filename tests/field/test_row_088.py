"""huggingface/accelerate#4099: what ranks tell of their wants stays small, however many they are.

1,024 simulated ranks with 500 keys each. All of this file takes about two seconds on one core; no time is asserted.
"""

from __future__ import annotations

import pickle
from dataclasses import asdict

import numpy as np
import pytest

from cloudckpt.config import Config
from cloudckpt.format.box import Box
from cloudckpt.plan.shard import PieceTable
from cloudckpt.plan.wants import Wants, decode_table, encode_table, table_digest
from cloudckpt.pytorch.match import Problems
from cloudckpt.pytorch.sharing import FEW_CHUNKS
from cloudckpt.pytorch.wishes import Sharing, Wish, pack_bits

RANKS, KEYS = 1024, 500
SHAPES = [(8192, 8192), (2048, 8192), (8192, 28672), (28672, 8192), (8192, 8)]


def wanted(row: int, rows: int, column: int, columns: int) -> PieceTable:
    """Of every key the same part: rows of ``rows``, columns of ``columns``."""
    sizes = [(a // rows, b // columns) for a, b in SHAPES]
    return PieceTable.build(
        (key, Box((row * sizes[key % 5][0], column * sizes[key % 5][1]), sizes[key % 5])) for key in range(KEYS)
    )


LAYOUTS = {
    "fsdp": lambda rank: (rank, RANKS, 0, 1),
    "fsdp x tp": lambda rank: (rank // 8, RANKS // 8, rank % 8, 8),
    "hsdp": lambda rank: (rank % 64, 64, 0, 1),
    "replicated": lambda _: (0, 1, 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_distinct_tables_are_told_once_in_few_bytes(layout: str):
    coordinates = [LAYOUTS[layout](rank) for rank in range(RANKS)]
    distinct = {where: wanted(*where) for where in sorted(set(coordinates))}
    digests = {table_digest(table) for table in distinct.values()}
    assert len(digests) == len(distinct)
    encoded = [encode_table(table) for table in distinct.values()]
    told = sum(map(len, encoded)) + 16 * RANKS
    assert told <= RANKS * KEYS, "a byte for each key and rank; a pickled record takes some hundred"
    assert max(map(len, encoded)) <= 1024
    again = decode_table(encoded[-1])
    assert table_digest(again) in digests


def test_the_plan_holds_each_distinct_table_once():
    coordinates = [LAYOUTS["hsdp"](rank) for rank in range(RANKS)]
    tables = {where: wanted(*where) for where in set(coordinates)}
    wants = Wants.of([tables[where] for where in coordinates])
    assert len(wants.tables) == 64
    assert np.bincount(wants.table).tolist() == [RANKS // 64] * 64
    columns = sum(a.nbytes for t in wants.tables for a in (t.tensor, t.offset, t.shape))
    assert columns <= 2 * 1024 * 1024


def test_a_rank_tells_the_coordinator_a_few_hundred_bytes():
    """Everything that is gathered before the tables: bits, settings, a digest."""
    config = asdict(Config())
    sharing = Sharing(
        digest=table_digest(wanted(*LAYOUTS["fsdp x tp"](17))),
        touched=None,  # there are too many chunks to tell them bit by bit
        is_own=False,
        node="GROUP_RANK=2",
        device="cuda",
        serves=frozenset({"cpu", "cuda"}),
        groups=frozenset({(tuple(range(16, 24)), "mesh_tp"), (tuple(range(1, RANKS, 8)), "mesh_dp")}),
    )
    asked = pack_bits(np.ones(KEYS, dtype=bool))
    wish = Wish(asked, Problems(), tuple(config.items()), True, (), frozenset(), {}, {}, sharing)
    # The ranks of the groups are most of it.
    assert len(pickle.dumps(wish)) <= 1536
    assert FEW_CHUNKS // 8 <= 4096, "the bits, where there are few"
