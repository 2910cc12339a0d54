"""Rules for random tensors on random jobs; numpy's slices and torch.chunk are the oracles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.plan.parallel import DATA_AXES, DENSE_AXES, ParallelConfig
from cloudckpt.plan.rules import Layout, ShardingRules, check_all_matched, check_recorded, local_shape, wanted_pieces
from cloudckpt.plan.shard import pieces_from_runs

SIZES = st.integers(1, 3)


@st.composite
def configs(draw: st.DrawFn) -> ParallelConfig:
    sizes = {axis: draw(st.integers(1, 2)) for axis in DENSE_AXES}
    stage = math.prod(sizes.values()) // sizes["pp"]
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if stage % n == 0]))
    etp = draw(st.sampled_from([n for n in (1, 2) if stage % (ep * n) == 0]))
    order = draw(st.permutations([*DENSE_AXES, "ep"]))
    return ParallelConfig(**sizes, ep=ep, etp=etp, order=tuple(order))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ParallelConfig, tuple[int, ...], tuple[Any, ...]]:
    """A config, a global shape, and a rule for it."""
    config = draw(configs())
    axes = draw(st.sampled_from([("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("pp", "edp", "ep", "etp")]))
    named = draw(st.lists(st.sampled_from(axes), unique=True, max_size=4))
    num_dims = draw(st.integers(1, 3))
    segments = {
        dim: draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)) for dim in range(num_dims) if draw(st.booleans())
    }
    shape = tuple(sum(segments[dim]) if dim in segments else draw(st.integers(0, 9)) for dim in range(num_dims))
    named.sort(key=lambda axis: axis in DATA_AXES)  # as segments demand
    negative = draw(st.booleans())
    dims = {axis: draw(st.integers(0, num_dims - 1)) - num_dims * negative for axis in named}
    return config, shape, ("*", dims, segments)


def cut(whole: np.ndarray, rule: tuple[Any, ...], config: ParallelConfig, rank: int) -> np.ndarray:
    """What a rank holds, by torch.chunk on the real thing."""
    _, dims, segments = rule
    coordinates = config.coordinates(rank)
    part = torch.from_numpy(whole)
    for dim in range(part.dim()):
        axes = [axis for axis, d in dims.items() if d % whole.ndim == dim]

        def take(tensor: torch.Tensor, axis: str, dim: int = dim) -> torch.Tensor:
            parts = tensor.chunk(config.size(axis), dim)
            i = coordinates[axis]
            return parts[i] if i < len(parts) else tensor.narrow(dim, 0, 0)

        pieces = list(part.split(segments[dim], dim)) if dim in segments else [part]
        for axis in axes:
            if axis not in DATA_AXES:
                pieces = [take(piece, axis) for piece in pieces]
        part = torch.cat(pieces, dim)
        for axis in axes:
            if axis in DATA_AXES:
                part = take(part, axis)
    return part.numpy()


@given(jobs())
def test_every_rank_holds_what_torch_would_give_it_and_all_hold_everything(
    job: tuple[ParallelConfig, tuple[int, ...], tuple[Any, ...]],
) -> None:
    config, shape, rule = job
    whole = np.arange(math.prod(shape)).reshape(shape)
    rules = ShardingRules([rule], config)
    layout = rules.layout("x", len(shape))
    assert layout is not None
    again = np.full(shape, -1)
    count = np.zeros(shape, dtype=int)
    for rank in range(config.world_size):
        local = cut(whole, rule, config, rank)
        runs = layout.runs(shape, config.coordinates(rank), config)
        assert local_shape(runs) == local.shape
        for piece in pieces_from_runs(runs):
            part = local[Box(piece.local_offset, piece.shape).slices]
            assert (part == whole[piece.box.slices]).all()
            again[piece.box.slices] = part
            count[piece.box.slices] += 1
    assert (again == whole).all()
    copies = config.world_size // math.prod(config.size(axis) for axis in rule[1])
    assert (count == copies).all()


@given(jobs(), st.data())
def test_even_cuts_give_the_global_shape_from_the_local_one(
    job: tuple[ParallelConfig, tuple[int, ...], tuple[Any, ...]], data: st.DataObject
) -> None:
    config, shape, (pattern, dims, _) = job
    per_dim = [
        math.prod(config.size(axis) for axis, d in dims.items() if d % len(shape) == i) for i in range(len(shape))
    ]
    shape = tuple(n * count for n, count in zip(shape, per_dim, strict=True))
    layout = ShardingRules([(pattern, dims)], config).layout("x", len(shape))
    assert layout is not None
    rank = data.draw(st.integers(0, config.world_size - 1))
    local = local_shape(layout.runs(shape, config.coordinates(rank), config))
    assert layout.global_shape(local, config) == shape


@given(jobs())
def test_wanted_pieces_are_those_of_the_layout(job: tuple[ParallelConfig, tuple[int, ...], tuple[Any, ...]]) -> None:
    config, shape, (_, *rest) = job
    rules = ShardingRules([("a.*", *rest)], config)
    for rank in range(config.world_size):
        layout = rules.layout("a.w", len(shape))
        assert layout is not None
        pieces = pieces_from_runs(layout.runs(shape, config.coordinates(rank), config))
        table = wanted_pieces([("b.w", shape), ("a.w", shape)], rules, rank)
        held = [table.box(row, len(shape)) for row in range(len(table)) if table.tensor[row] == 1]
        assert held == [piece.box for piece in pieces if piece.box.num_elements]
        whole = [table.box(row, len(shape)) for row in range(len(table)) if table.tensor[row] == 0]
        assert whole == ([Box((0,) * len(shape), shape)] if math.prod(shape) else [])


@given(configs(), st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6))
def test_wanted_pieces_of_many_tensors_are_those_of_each(config: ParallelConfig, shapes: list[list[int]]) -> None:
    rules = ShardingRules([("[02].*", {"tp": 0}), ("4.*", {"dp_shard": -1, "tp": -1})], config)
    tensors = [(f"{i}.w", shape if i % 2 or shape else [4]) for i, shape in enumerate(shapes)]
    for rank in {0, config.world_size - 1}:
        table = wanted_pieces(tensors, rules, rank)
        held = [(int(t), table.box(row, len(tensors[t][1]))) for row, t in enumerate(table.tensor.tolist())]
        singles = [wanted_pieces([tensor], rules, rank) for tensor in tensors]
        assert held == [
            (number, one.box(row, len(tensors[number][1])))
            for number, one in enumerate(singles)
            for row in range(len(one))
        ]
        assert (np.diff(table.tensor) >= 0).all()
        for row, box in enumerate(held):
            own = len(box[1].shape)
            assert (table.offset[row, own:] == 0).all()
            assert (table.shape[row, own:] == 1).all()


TP2 = ParallelConfig(tp=2)


def test_packed_qkv_with_fewer_heads_of_k_and_v() -> None:
    """q of 8 rows, k and v of 2 each: every rank has its half of each, one after another."""
    rules = ShardingRules([("*.qkv.weight", {"tp": 0}, {0: [8, 2, 2]})], TP2)
    layout = rules.layout("model.0.qkv.weight", 2)
    assert layout is not None
    assert layout.runs((12, 3), TP2.coordinates(1), TP2) == [((4, 8), (9, 10), (11, 12)), ((0, 3),)]
    assert layout.global_shape((6, 3), TP2) == (12, 3)
    assert layout.encode(TP2) == {"axes": {"tp": [0, 2]}, "segments": {"0": [8, 2, 2]}}


def test_fsdp_cuts_what_tensor_parallelism_has_left() -> None:
    config = ParallelConfig(dp_shard=2, tp=2)
    plain = ShardingRules([("w", {"tp": 0, "dp_shard": 0})], config).layout("w", 1)
    packed = ShardingRules([("w", {"tp": 0, "dp_shard": 0}, {0: [4, 4]})], config).layout("w", 1)
    assert plain is not None
    assert packed is not None
    held = [[x.runs((8,), config.coordinates(rank), config)[0] for rank in range(4)] for x in (plain, packed)]
    assert held[0] == [((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),)]
    assert held[1] == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]


@pytest.mark.parametrize(
    ("pattern", "path", "does"),
    [
        ("*.wq.weight", "model.layers.0.wq.weight", True),
        ("*.wq.weight", "optim.state.layers.0.wq.weight.exp_avg", False),
        ("*.wq.weight.exp_avg*", "optim.state.layers.0.wq.weight.exp_avg_sq", True),
        ("layers.*.wq.weight", "model.layers.0.wq.weight", False),
        ("model.layers.[01].w?", "model.layers.1.wk", True),
        ("*.WQ", "model.wq", False),
    ],
)
def test_patterns_are_for_the_whole_path(pattern: str, path: str, does: bool) -> None:
    assert bool(ShardingRules([(pattern, {"tp": 0})], TP2).match(path)) is does


def test_rules_that_agree_may_both_match() -> None:
    rules = ShardingRules([("*.weight", {"tp": 0}), ("*.wq.*", {"tp": -2})], TP2)
    assert rules.match("a.wq.weight") == (0, 1)
    assert rules.layout("a.wq.weight", 2) == Layout((("tp",), ()), (None, None))


@pytest.mark.parametrize("other", [("*.wq.*", {"tp": 1}), ("*.wq.*", {}), ("*.wq.*", {"tp": 0}, {0: [2, 2]})])
def test_contradictions_name_both(other: tuple[Any, ...]) -> None:
    rules = ShardingRules([("*.weight", {"tp": 0}), other], TP2)
    with pytest.raises(InvalidStateError) as caught:
        rules.layout("a.wq.weight", 2)
    for text in ("'a.wq.weight'", "'*.weight'", "'*.wq.*'", "contradict"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("w", "a rule is"),
        (("w",), "a rule is"),
        ((1, {}), "a rule is"),
        (("w", "tp"), "must be dicts"),
        (("w", {"tp": 0.0}), "'w': the dim of tp must be an int, not 0.0"),
        (("w", {"tp": True}), "the dim of tp"),
        (("w", {"model": 0}), "no axis 'model'"),
        (("w", {"tp": 0, "ep": 1}), "divide the same ranks twice"),
        (("w", {"tp": 0}, {0: []}), "segments of dim 0"),
        (("w", {"tp": 0}, {0: [2, -1]}), "segments of dim 0"),
        (("w", {"tp": 0}, {0: [2.0]}), "a segment of dim 0"),
        (("w", {"tp": 0}, {0: 4}), "list of sizes"),
        (("w", {"tp": 0}, {"0": [4]}), "a dim with segments"),
    ],
)
def test_rules_that_are_none(rule: Any, fault: str) -> None:
    with pytest.raises(InvalidStateError, match=fault):
        ShardingRules([rule], TP2)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        (("w", {"tp": 2}), r"'w' has 2 dims; .* dim 2"),
        (("w", {"tp": -3}), "dim -3"),
        (("w", {"tp": 0}, {5: [4]}), "dim 5"),
        (("w", {"tp": 0}, {0: [4], -2: [4]}), "two lists of segments"),
        (("w", {"dp_shard": 0, "tp": 0}, {0: [4, 4]}), "name dp_shard last"),
    ],
)
def test_rules_that_do_not_fit_the_tensor(rule: Any, fault: str) -> None:
    with pytest.raises(InvalidStateError, match=fault):
        ShardingRules([rule], TP2).layout("w", 2)


def test_rules_need_a_config_of_the_right_size() -> None:
    with pytest.raises(InvalidStateError, match=r"pass ShardingRules\(rules, ParallelConfig"):
        ShardingRules([("w", {"tp": 0})]).config(2)
    with pytest.raises(InvalidStateError, match=r"are for 2 ranks .*tp=2.*, the job has 4"):
        ShardingRules([("w", {"tp": 0})], TP2).config(4)


def test_rules_without_any_tensor_are_named() -> None:
    rules = ShardingRules([("a.*", {"tp": 0}), ("b.*", {"tp": 0}), ("layers.*", {"tp": 0})], TP2)
    check_all_matched(rules, [(0, 1), (2,)])
    with pytest.raises(InvalidStateError, match=r"'layers\.\*'.*the tensors are 'model.layers.0'") as caught:
        check_all_matched(rules, [(0,), (1,)], ["model.layers.0"])
    assert "'a.*'" not in str(caught.value)


def test_digests_tell_rules_and_configs_apart() -> None:
    one = ShardingRules([("w", {"tp": 0})], TP2)
    assert one.digest == ShardingRules([("w", {"tp": np.int64(0)})], ParallelConfig(tp=2)).digest
    others = [
        ShardingRules([("w", {"tp": 1})], TP2),
        ShardingRules([("w", {"tp": 0}, {0: [4]})], TP2),
        ShardingRules([("w", {"tp": 0})], ParallelConfig(dp_shard=2)),
        ShardingRules([("w", {"tp": 0})]),
    ]
    assert len({rules.digest for rules in (one, *others)}) == 5


CUT, WHOLE = {"axes": {"tp": [0, 2]}}, {"axes": {"tp": [0, 1]}}


def packed(recorded: dict[str, Any], *sizes: int) -> dict[str, Any]:
    return recorded | {"segments": {"0": [*sizes]}}


@pytest.mark.parametrize(
    ("recorded", "rule", "fits"),
    [
        (None, ("w", {"tp": 0}, {0: [4, 4]}), True),
        (CUT, ("w", {"tp": 0}), True),
        (CUT, ("w", {"tp": 0}, {0: [8]}), True),
        (packed(CUT, 8), ("w", {"tp": 0}), True),
        (WHOLE, ("w", {"tp": 0}, {0: [4, 4]}), True),
        ({"axes": {"dp_shard": [0, 4]}}, ("w", {"tp": 0}, {0: [4, 4]}), True),
        ({"axes": {"tp": [1, 4]}}, ("w", {"tp": 0}, {0: [4, 4]}), True),
        (packed(CUT, 4, 4), ("w", {"tp": 0}, {0: [4, 4]}), True),
        (packed(CUT, 4, 4), ("w", {"tp": 1}), True),
        (packed(CUT, 4, 4), ("w", {"dp_shard": 0}), True),
        (packed(CUT, 4, 4), ("w", {}), True),
        (packed(CUT, 4, 4), ("w", {"tp": 0}), False),
        (packed(WHOLE, 4, 4), ("w", {"tp": 0}), False),
        (packed(CUT, 4, 4), ("w", {"tp": 0}, {0: [6, 2]}), False),
        (packed(CUT, 4, 4), ("w", {"tp": 0}, {0: [8]}), False),
        (CUT, ("w", {"tp": 0}, {0: [4, 4]}), False),
        ({"axes": {"unknown": [0, 2]}}, ("w", {"tp": 0}, {0: [4, 4]}), False),
    ],
)
def test_segments_must_be_those_of_the_checkpoint(recorded: Any, rule: Any, fits: bool) -> None:
    config = ParallelConfig(tp=2, dp_shard=2)
    layout = ShardingRules([rule], config).layout("w", 2)
    assert layout is not None
    if fits:
        check_recorded(layout, config, recorded, "w")
    else:
        with pytest.raises(InvalidStateError, match="'w': dim 0 was saved with"):
            check_recorded(layout, config, recorded, "w")


def test_a_dim_that_is_whole_may_have_had_any_segments() -> None:
    config = ParallelConfig(dp_shard=2)
    layout = ShardingRules([("w", {"tp": 0, "dp_shard": 0})], config).layout("w", 2)
    assert layout is not None
    check_recorded(layout, config, packed(CUT, 4, 4), "w")


@pytest.mark.parametrize(
    "recorded",
    [5, [], {}, {"axes": []}, {"axes": {"tp": 0}}, {"axes": {"tp": [0, "2"]}}, {"axes": {"tp": [0, 2.0]}},
     packed(CUT, -1), {"axes": {}, "segments": {"x": [1]}}, {"axes": {}, "segments": {"0": 4}}],
)  # fmt: skip
def test_malformed_layouts_are_refused(recorded: Any) -> None:
    layout = ShardingRules([("w", {"tp": 0})], TP2).layout("w", 2)
    assert layout is not None
    with pytest.raises(FormatError, match="'w': malformed layout"):
        check_recorded(layout, TP2, recorded, "w")


def test_wanted_pieces_refuse_segments_of_another_size() -> None:
    rules = ShardingRules([("w", {"tp": 0}, {0: [4, 4]})], TP2)
    with pytest.raises(InvalidStateError, match=r"add up to 8, but dim 0 of \(9, 2\) has 9"):
        wanted_pieces([("w", (9, 2))], rules, 0)
