"""Plain tensors and rules: every rank of random jobs is described in turn, without processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cloudckpt
from cloudckpt import ParallelConfig, Piece, ShardedTensor, ShardingRules
from cloudckpt.errors import InvalidStateError, MismatchError
from cloudckpt.format.box import Box
from cloudckpt.plan.parallel import DATA_AXES
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.shards import LocalShard
from tests.plan.test_rules import configs, cut


def elements(shard: LocalShard, whole: np.ndarray) -> None:
    """Put a shard into the whole tensor, as a save does."""
    for piece in shard.pieces:
        whole[piece.box.slices] = shard.memory[Box(piece.local_offset, piece.shape).slices]


@given(configs(), configs(), st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_from_any_job_to_any_other(
    saving: ParallelConfig, loading: ParallelConfig, segments: list[int], columns: int, data: st.DataObject
) -> None:
    """Rows in segments, columns cut evenly: saved under one config and rule, loaded under another."""
    rules = []
    for _ in range(2):
        axes = data.draw(st.sampled_from([("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("pp", "edp", "ep", "etp")]))
        named = data.draw(st.lists(st.sampled_from(axes), unique=True, max_size=4))
        named.sort(key=lambda axis: axis in DATA_AXES)
        rules.append(("*", {axis: data.draw(st.sampled_from([0, -1])) for axis in named}, {0: segments}))
    rule, other = rules
    columns *= math.prod(saving.size(axis) for axis, dim in rule[1].items() if dim == -1)
    whole = np.arange(sum(segments) * columns).reshape(-1, columns)
    stored, recorded = np.full_like(whole, -1), []
    for rank in range(saving.world_size):
        local = torch.from_numpy(cut(whole, rule, saving, rank))
        shard = Describer(ShardingRules([rule], saving), rank, saving.world_size).shard(local, ("w",), "w")
        assert shard.shape == whole.shape
        elements(shard, stored)
        recorded.append(shard.layout)
    assert (stored == whole).all()
    assert all(layout == recorded[0] for layout in recorded), "all ranks record the same"
    for rank in range(loading.world_size):
        expected = cut(whole, other, loading, rank)
        describer = Describer(ShardingRules([other], loading), rank, loading.world_size)
        assert describer.local_shape(("w",), whole.shape) == expected.shape
        target = torch.from_numpy(np.full_like(expected, -1))
        shard = describer.shard(target, ("w",), "w", global_shape=whole.shape, recorded=recorded[0])
        assert shard.shape == whole.shape
        for piece in shard.pieces:
            target[Box(piece.local_offset, piece.shape).slices] = torch.from_numpy(whole[piece.box.slices])
        assert (target.numpy() == expected).all()
        assert describer.matched == {0}


TP4 = ShardingRules([("w", {"tp": 0}), ("*.exp_avg", {"tp": 0})], ParallelConfig(tp=4))


@pytest.mark.parametrize(
    ("extent", "shares"), [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (6, [2, 2, 2, 0]), (2, [1, 1, 0, 0])]
)
def test_a_load_takes_uneven_shares_without_being_told(extent: int, shares: list[int]) -> None:
    start = 0
    for rank, share in enumerate(shares):
        shard = Describer(TP4, rank, 4).shard(torch.zeros(share, 3), ("w",), "w", global_shape=(extent, 3))
        assert shard.shape == (extent, 3)
        assert [piece.global_offset[0] for piece in shard.pieces if share] == [start] * bool(share)
        start += share


def test_other_shares_have_another_global_shape_and_are_still_described() -> None:
    shard = Describer(TP4, 1, 4).shard(torch.zeros(3, 3), ("w",), "w", global_shape=(8, 3))
    assert shard.shape == (12, 3)
    assert [piece.global_offset for piece in shard.pieces] == [(3, 0)]
    assert Describer(TP4, 1, 4).shard(torch.zeros(2), ("w",), "w", global_shape=(8, 3)).shape == (2,)


def test_tensors_without_a_rule_are_whole() -> None:
    describer = Describer(TP4, 1, 4)
    shard = describer.shard(torch.zeros(2, 3), ("v",), "v")
    assert (shard.shape, shard.layout, describer.matched) == ((2, 3), None, set())
    assert describer.local_shape(("v",), (8, 3)) == (8, 3)
    assert Describer(None, 0, 1).local_shape(("w",), (8, 3)) == (8, 3)


def test_keys_that_are_no_strings_are_matched_as_they_are_printed() -> None:
    describer = Describer(TP4, 0, 4)
    assert describer.shard(torch.zeros(2), ("optim", "state", 0, "exp_avg"), "x").shape == (8,)
    assert describer.matched == {1}


def test_sharded_tensors_keep_their_pieces_and_must_not_contradict() -> None:
    describer = Describer(TP4, 1, 4)
    inside = ShardedTensor(torch.zeros(1, 3), (8, 3), [Piece((0, 0), (3, 0), (1, 3))])
    assert [piece.global_offset for piece in describer.shard(inside, ("w",), "w").pieces] == [(3, 0)]
    assert describer.shard(ShardedTensor(torch.zeros(0), (8, 3), []), ("w",), "w").pieces == ()
    outside = ShardedTensor(torch.zeros(2, 3), (8, 3), [Piece((0, 0), (3, 0), (2, 3))])
    with pytest.raises(InvalidStateError, match=r"'w': the tensor itself says .* to another rank"):
        describer.shard(outside, ("w",), "w")


@pytest.mark.parametrize("rules", [[("w", {"tp": 0})], {"w": {"tp": 0}}, "w"])
def test_rules_must_be_sharding_rules(tmp_path: Path, rules: Any) -> None:
    for call in (cloudckpt.save, cloudckpt.load):
        with pytest.raises(InvalidStateError, match="rules must be ShardingRules, not a"):
            call({"w": torch.zeros(2)}, tmp_path / "c", rules=rules)


ONE = ParallelConfig()


def test_rules_for_keys_that_are_not_stored(tmp_path: Path) -> None:
    """Such a rule has a tensor; that nothing is stored for it is another matter, which strict=False forgives."""
    cloudckpt.save({"w": torch.ones(2), "n": 5}, tmp_path / "c")
    rules = ShardingRules([("w", {"tp": 0}), ("new.*", {"tp": 0}), ("n", {"tp": 0})], ONE)
    target = {"w": torch.zeros(2), "new": {"v": torch.zeros(2)}, "n": torch.zeros(3)}
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load(target, tmp_path / "c", rules=rules)
    assert (caught.value.missing, list(caught.value.kinds)) == (["new.v"], ["n"])
    target = {"w": torch.zeros(2), "new": {"v": torch.zeros(2)}}
    rules = ShardingRules([("w", {"tp": 0}), ("new.*", {"tp": 0})], ONE)
    report = cloudckpt.load(target, tmp_path / "c", rules=rules, strict=False)
    assert report.missing == ["new.v"]
    assert target["w"].tolist() == [1, 1]


def test_layouts_survive_and_are_ignored_by_those_who_need_none(tmp_path: Path) -> None:
    rules = ShardingRules([("*.w", {"tp": 0}, {0: [2, 2]}), ("*.v", {})], ONE)
    state = {"a": {"w": torch.arange(4.0), "v": torch.ones(2)}}
    cloudckpt.save(state, tmp_path / "c", rules=rules)
    tree = cloudckpt.open_checkpoint(tmp_path / "c").manifest.document.tree
    assert tree["a"]["w"]["layout"] == {"axes": {"tp": [0, 1]}, "segments": {"0": [2, 2]}}
    assert "layout" not in tree["a"]["v"]
    assert cloudckpt.read(tmp_path / "c")["a"]["w"].tolist() == [0, 1, 2, 3]
    target = {"a": {"w": torch.zeros(4), "v": torch.zeros(2)}}
    cloudckpt.load(target, tmp_path / "c")
    assert target["a"]["w"].tolist() == [0, 1, 2, 3]
