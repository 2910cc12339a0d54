"""Rounds whose parts and outcomes are small and large, in all mixtures."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence

import torch.distributed as dist

from cloudckpt.errors import InvalidStateError
from cloudckpt.pytorch.group import make_group
from cloudckpt.pytorch.ranks import INLINE_BYTES
from tests.collectives import counted_collectives
from tests.ranks import RankPool
from tests.sharding import error_of

SMALL, LARGE = 100, 3 * INLINE_BYTES


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def rounds_of_sizes(sizes: Sequence[Sequence[int]], outcome: int) -> list[tuple[bool, bool, int]]:
    """Per round: whether all parts arrived, whether the outcome did, and how much else was called."""
    ranks = make_group(None, 60)
    found = []
    for of_round in sizes:
        mine = os.urandom(of_round[ranks.rank])

        def combine(parts: Sequence[tuple[bytes, str]]) -> tuple[bytes, str, bool]:
            answer = os.urandom(outcome)
            return answer, _digest(answer), all(_digest(data) == digest for data, digest in parts)

        def part(mine: bytes = mine) -> tuple[bytes, str]:
            return mine, _digest(mine)

        with counted_collectives() as counts:
            answer, digest, is_whole = ranks.round(part, combine)
        found.append((is_whole, _digest(answer) == digest, counts.total()))
    return found


def test_large_parts_and_outcomes_arrive(ranks: RankPool):
    sizes = [
        (SMALL,) * 3,
        (LARGE, SMALL, SMALL),
        (SMALL, SMALL, LARGE),
        (LARGE, LARGE, LARGE),
        (SMALL, LARGE, 2 * LARGE),
    ]
    for outcome in (SMALL, LARGE):
        for rank, found in enumerate(ranks.run(3, rounds_of_sizes, sizes, outcome)):
            assert all(is_whole and has_answer for is_whole, has_answer, _ in found)
            # Rank 0 receives what is large, the others send theirs.
            sent = [sum(n > SMALL for n in (s[1:] if rank == 0 else s[rank : rank + 1])) for s in sizes]
            assert [count for _, _, count in found] == [n + (outcome == LARGE) for n in sent]


def fail_beside_large_parts() -> tuple[str, str]:
    ranks = make_group(None, 60)

    def failing() -> bytes:
        if ranks.rank == 1:
            raise InvalidStateError("x" * 2 * INLINE_BYTES)
        return os.urandom(LARGE)

    def refuse(_: Sequence[bytes]) -> None:
        raise InvalidStateError("refused")

    part: Callable[[], bytes] = lambda: os.urandom(LARGE)  # noqa: E731
    first = error_of(lambda: ranks.round(failing, len))
    second = error_of(lambda: ranks.round(part, refuse))
    assert ranks.round(part, len) == dist.get_world_size()
    return str(first), str(second)


def test_failures_beside_large_parts(ranks: RankPool):
    for first, second in ranks.run(3, fail_beside_large_parts):
        assert first.startswith("rank 1: InvalidStateError: xxx")
        assert second == "refused"
