"""Under any layout each stored byte is fetched once by the job, or once by each node, and every bit comes back.

`python -m pytest -s` shows the table; so does `python benchmarks/layout_pairs.py`.
"""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankPool
from tests.recipes.layout_pairs import NUM_RANKS, PAIRS, Row, as_table, run_pairs, whole_table

FRAMING = 1.005
"""What stands between neighbouring chunks of a pack is fetched, too; see CONFIG there."""


def check(ranks: RankPool, name: str, folder: Path) -> list[Row]:
    table = whole_table(name, ranks.run(NUM_RANKS, run_pairs, name, str(folder)))
    print(f"\n{as_table(table)}")
    for row in table:
        assert row.wrong == [], row
        assert row.times <= row.fetched / row.needed <= row.times * FRAMING, row
    return table


def test_there_are_enough_pairs():
    assert len({str(pair) for pair in PAIRS}) == len(PAIRS) >= 40
    assert {pair.loaded.num_ranks for pair in PAIRS} == set(range(1, NUM_RANKS + 1))


def test_every_byte_is_fetched_once(ranks: RankPool, tmp_path: Path):
    check(ranks, "pairs", tmp_path)


def test_whichever_way_chunks_are_passed_on(ranks: RankPool, tmp_path: Path):
    table = check(ranks, "forced", tmp_path)
    half = len(table) // 2
    for one, other in zip(table[:half], table[half:], strict=True):
        assert "broadcast" in one.kind
        assert other.kind == "alltoall"
        assert one.sent >= other.sent, "whole chunks are more than the parts that are wanted"


def test_every_node_fetches_what_it_wants_once(ranks: RankPool, tmp_path: Path):
    check(ranks, "on nodes", tmp_path)


def test_groups_of_some_ranks_exchange_among_themselves(ranks: RankPool, tmp_path: Path):
    check(ranks, "on others", tmp_path)
