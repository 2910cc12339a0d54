"""Sharing work out among the ranks that could do it, so that the bytes are even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloudckpt.format.grid import Ints
from cloudckpt.plan.overlap import group_rows, runs, stable_order


@dataclass(frozen=True, eq=False)
class Sets:
    """``number``: of every chunk, the set of ranks that want it; ``ranks[i]``: the ascending ranks of set i."""

    number: Ints
    ranks: Sequence[Ints]


def group_into_sets(pair_table: Ints, first: Ints, num_pairs: Ints, table: Ints) -> Sets:
    """Chunk i is wanted by the tables ``pair_table[first[i] : first[i] + num_pairs[i]]``; rank r has ``table[r]``."""
    if not len(first):
        return Sets(first, [])
    # A set is told by the sum of its members' hashes, and its size. Neighbours mostly have the same.
    hashes = _mixed(np.arange(int(pair_table.max()) + 1))
    digest = np.add.reduceat(hashes[pair_table], first) ^ _mixed(np.arange(int(num_pairs.max()) + 1))[num_pairs]
    digests, starts = runs(digest)
    _, example, run_number = np.unique(digests, return_index=True, return_inverse=True)
    example = starts[example]
    number = np.repeat(run_number.reshape(-1), np.diff(np.append(starts, len(digest))))
    by_table = stable_order(table)
    ends = np.searchsorted(table[by_table], np.arange(int(pair_table.max()) + 2))
    ranks = []
    for chunk in example.tolist():
        tables = pair_table[first[chunk] : first[chunk] + num_pairs[chunk]].tolist()
        members = np.concatenate([by_table[ends[t] : ends[t + 1]] for t in tables])
        ranks.append(np.sort(members))
    return Sets(number, ranks)


def _mixed(values: Ints) -> npt.NDArray[np.uint64]:
    """A good hash of every value (the finaliser of splitmix64; public domain, Vigna)."""
    x = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose_owners(nbytes: Ints, sets: Sets, order: Ints, *, num_ranks: int) -> Ints:
    """A rank of its set for every chunk; ``order``: the chunks as they lie in storage.

    Small sets first, since they have the least choice. Within a set each rank gets one run of
    neighbours in storage, as long as evens out what it has so far: few, large reads.
    """
    owner = np.zeros(len(nbytes), dtype=np.int64)
    load = np.zeros(num_ranks)
    numbers, members = group_rows(sets.number[order])
    # Of equal sizes the first in storage, so that the numbers of sets, and of tables, do not matter.
    by_size = sorted(zip(numbers.tolist(), members, strict=True), key=lambda s: (len(sets.ranks[s[0]]), int(s[1][0])))
    for number, rows in by_size:
        chunks, ranks = order[rows], sets.ranks[number]
        sizes = nbytes[chunks].astype(np.float64)
        if len(ranks) == 1:
            owner[chunks] = ranks[0]
            load[ranks[0]] += sizes.sum()
            continue
        bounds = np.cumsum(_quotas(load[ranks], float(sizes.sum())))
        middle = np.cumsum(sizes) - sizes / 2
        chosen = ranks[np.minimum(np.searchsorted(bounds, middle, side="right"), len(ranks) - 1)]
        owner[chunks] = chosen
        load += np.bincount(chosen, weights=sizes, minlength=num_ranks)
    return owner


def _quotas(load: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """What each gets of ``total`` so that the least loaded are filled up to one level."""
    order = np.argsort(load, kind="stable")
    ascending = load[order]
    below = np.cumsum(ascending)
    count = np.arange(1, len(load) + 1)
    level = (total + below) / count  # if only the first `count` get anything
    fits = np.nonzero(level >= ascending)[0][-1]
    quotas: npt.NDArray[np.float64] = np.maximum(0.0, level[fits] - load)
    return quotas
