"""TileDB-Inc/TileDB#1070: a fixed part size runs past 10,000 parts near the end of a huge upload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.config import GIB, MIB
from cloudckpt.store.parts import MAX_PARTS, MIN_PART_BYTES, part_size


def num_parts(nbytes: int, size: int) -> int:
    return max(1, -(-nbytes // size))


@pytest.mark.parametrize(
    "nbytes", [100 * GIB, int(48.9 * GIB), 10_000 * 5 * MIB, 10_000 * 5 * MIB + 1, 5 * MIB + 1, 0, 1, 5 * 1024 * GIB]
)
def test_ten_thousand_parts_are_enough(nbytes: int):
    size = part_size(nbytes, 5 * MIB)
    assert num_parts(nbytes, size) <= MAX_PARTS
    assert size >= MIN_PART_BYTES


def test_the_part_size_is_raised_only_where_it_has_to_be():
    assert part_size(None, 16 * MIB) == 16 * MIB
    assert part_size(48 * GIB, 5 * MIB) == 5 * MIB
    assert part_size(10_000 * 5 * MIB, 5 * MIB) == 5 * MIB
    assert part_size(100 * GIB, 5 * MIB) >= 10.24 * MIB
    assert part_size(100 * GIB, 5 * MIB) <= 13 * MIB
    assert part_size(100 * GIB, 64 * MIB) == 64 * MIB


@given(st.integers(0, 50 * 1024 * GIB), st.integers(5 * MIB, GIB))
def test_a_hint_may_be_a_tenth_too_low(nbytes: int, part_bytes: int):
    size = part_size(nbytes, part_bytes)
    assert size >= part_bytes
    if size > part_bytes:
        assert num_parts(nbytes * 11 // 10, size) <= MAX_PARTS
    assert num_parts(nbytes, size) <= MAX_PARTS
