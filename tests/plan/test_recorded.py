"""What is recorded of a packed tensor goes with it through rename rules."""

from __future__ import annotations

import pytest

from cloudckpt.errors import FormatError
from cloudckpt.plan.recorded import joined, parted, permuted, recorded_of, stacked, unstacked

PACKED = {"axes": {"tp": [0, 2], "dp_shard": [1, 4]}, "segments": {"0": [8, 2, 2]}}


def test_dims_move():
    assert permuted(PACKED, [1, 0]) == {"axes": {"tp": [1, 2], "dp_shard": [0, 4]}, "segments": {"1": [8, 2, 2]}}
    beside = stacked([PACKED, PACKED], 0, [(12, 4), (12, 4)])
    assert beside == {"axes": {"tp": [1, 2], "dp_shard": [2, 4]}, "segments": {"1": [8, 2, 2]}}
    assert unstacked(beside, 0) == PACKED
    assert unstacked(PACKED, 0) == {"axes": {"dp_shard": [0, 4]}}


def test_parts_keep_the_segments_that_they_have():
    assert parted(PACKED, 0, [12, 0]) == [PACKED, {"axes": PACKED["axes"]}]
    single = {"axes": PACKED["axes"]}
    assert parted(PACKED, 0, [8, 2, 2]) == [single, single, single]
    assert parted(PACKED, 0, [9, 3])[0] == {"axes": PACKED["axes"], "segments": {"0": [8, 1]}}
    assert parted(PACKED, 1, [2, 2]) == [PACKED, PACKED]
    assert parted(None, 0, [1, 2]) == [None, None]


def test_tensors_that_were_cut_become_segments():
    one = {"axes": {"tp": [0, 2]}}
    assert joined([one, one, one], 0, [(8, 4), (2, 4), (2, 4)]) == one | {"segments": {"0": [8, 2, 2]}}
    assert joined([PACKED, None], 0, [(12, 4), (3, 4)])["segments"] == {"0": [8, 2, 2, 3]}
    assert joined([one, one], 1, [(8, 4), (8, 4)]) == one
    assert joined([None, None], 0, [(8, 4), (8, 4)]) is None


def test_of_a_leaf():
    assert recorded_of({"$": "tensor", "array": "a", "layout": PACKED}, "a") == PACKED
    assert recorded_of({"$": "tensor", "array": "a"}, "a") is None
    with pytest.raises(FormatError, match="malformed layout"):
        recorded_of({"layout": {"axes": {"tp": 3}}}, "a")
