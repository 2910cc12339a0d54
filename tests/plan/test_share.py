"""Who of those who want a chunk reads it: even bytes, and neighbours in storage together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.plan.share import Sets, _quotas, choose_owners, group_into_sets


def sets_of(chosen: list[tuple[int, ...]]) -> Sets:
    """Of every chunk, the ranks that want it."""
    distinct = sorted(set(chosen))
    number = np.array([distinct.index(ranks) for ranks in chosen], dtype=np.int64)
    return Sets(number, [np.array(ranks, dtype=np.int64) for ranks in distinct])


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
    """Sizes, the ranks that want each, and the order in storage."""
    ranks = st.lists(st.integers(0, 5), unique=True, min_size=1).map(lambda r: tuple(sorted(r)))
    some = draw(st.lists(ranks, min_size=1, max_size=4))
    wanted = draw(st.lists(st.sampled_from(some), min_size=1, max_size=30))
    sizes = draw(st.lists(st.integers(1, 100), min_size=len(wanted), max_size=len(wanted)))
    return sizes, wanted, draw(st.permutations(range(len(wanted))))


@settings(max_examples=200)
@given(chunks())
def test_every_chunk_goes_to_one_who_wants_it_in_runs(
    job: tuple[list[int], list[tuple[int, ...]], list[int]],
) -> None:
    sizes, wanted, order = job
    nbytes = np.array(sizes, dtype=np.int64)
    owner = choose_owners(nbytes, sets_of(wanted), np.array(order, dtype=np.int64), num_ranks=6)
    assert all(rank in ranks for rank, ranks in zip(owner.tolist(), wanted, strict=True))
    for ranks in set(wanted):
        members = [c for c in order if wanted[c] == ranks]
        held = [int(owner[c]) for c in members]
        assert held == sorted(held), "each rank gets one run of neighbours"


@settings(max_examples=200)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 6))
def test_one_set_is_shared_out_evenly(sizes: list[int], num_ranks: int) -> None:
    nbytes = np.array(sizes, dtype=np.int64)
    everybody = sets_of([tuple(range(num_ranks))] * len(sizes))
    owner = choose_owners(nbytes, everybody, np.arange(len(sizes)), num_ranks=num_ranks)
    loads = np.bincount(owner, weights=nbytes, minlength=num_ranks)
    assert np.abs(loads - nbytes.sum() / num_ranks).max() <= nbytes.max()


def test_ranks_that_read_alone_get_less_of_the_rest() -> None:
    """Rank 0 alone wants 4 chunks; it and rank 1 want 8 more; all three 12."""
    wanted = [(0,)] * 4 + [(0, 1)] * 8 + [(0, 1, 2)] * 12
    owner = choose_owners(np.full(24, 10), sets_of(wanted), np.arange(24), num_ranks=3)
    assert np.bincount(owner).tolist() == [8, 8, 8]


@settings(max_examples=200)
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8), st.floats(0, 1e12))
def test_quotas_fill_up_the_least_loaded_to_one_level(load: list[float], total: float) -> None:
    have = np.array(load)
    quotas = _quotas(have, total)
    assert quotas.min() >= 0
    assert quotas.sum() == pytest.approx(total, rel=1e-6, abs=1e-2)
    after = have + quotas
    level = after[quotas > 0].max(initial=0)
    assert after[quotas > 0] == pytest.approx(level, rel=1e-9, abs=1e-2)
    assert (have[quotas == 0] >= level - 1e-2).all()


def test_chunks_are_in_one_set_if_the_same_tables_want_them() -> None:
    # Chunk 0: table 0. 1: tables 0 and 1. 2: table 1. 3: tables 0 and 1.
    pair_table = np.array([0, 0, 1, 1, 0, 1])
    first, num_pairs = np.array([0, 1, 3, 4]), np.array([1, 2, 1, 2])
    sets = group_into_sets(pair_table, first, num_pairs, table=np.array([1, 0, 0, 1, 2]))
    ranks = [sets.ranks[number].tolist() for number in sets.number.tolist()]
    assert ranks == [[1, 2], [0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
    assert sets.number[1] == sets.number[3]
