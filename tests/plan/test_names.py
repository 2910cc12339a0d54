"""Local numbers of layers and experts become global ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.plan.names import GlobalNames, global_expert_names, global_layer_names, merge_parts

counts = st.integers(1, 5)


@given(counts, counts, counts)
def test_every_layer_is_somewhere_once_in_megatrons_order(pp: int, vpp: int, per_chunk: int) -> None:
    num_layers = pp * vpp * per_chunk
    held = {
        (stage, chunk): global_layer_names(num_layers, pp=pp, vpp=vpp, stage=stage, chunk=chunk).numbers
        for stage in range(pp)
        for chunk in range(vpp)
    }
    assert sorted(number for numbers in held.values() for number in numbers) == list(range(num_layers))
    for (stage, chunk), numbers in held.items():
        first = (chunk * pp + stage) * per_chunk
        assert numbers == tuple(range(first, first + per_chunk))


@given(st.data(), st.integers(0, 12), counts, counts)
def test_by_hand_any_layout_that_is_whole(data: st.DataObject, num_layers: int, pp: int, vpp: int) -> None:
    order = data.draw(st.permutations(range(num_layers)))
    homes = data.draw(st.lists(st.integers(0, pp * vpp - 1), min_size=num_layers, max_size=num_layers))
    layers = [[[n for n in order if homes[n] == s * vpp + c] for c in range(vpp)] for s in range(pp)]
    everything = merge_parts(
        *(
            global_layer_names(stage=s, chunk=c, layers=layers, marker="h").apply(
                {f"t.h.{i}.w": n for i, n in enumerate(layers[s][c])}
            )
            for s in range(pp)
            for c in range(vpp)
        )
    )
    assert everything == {f"t.h.{n}.w": n for n in range(num_layers)}


@pytest.mark.parametrize(
    ("marker", "name", "expected"),
    [
        ("layers", "layers.1.attention.wq.weight", "layers.11.attention.wq.weight"),
        ("layers", "model.layers.1.mlp.layers.0.weight", "model.layers.11.mlp.layers.0.weight"),
        ("decoder.layers", "encoder.layers.1.w", "encoder.layers.1.w"),
        ("decoder.layers", "module.decoder.layers.0.w", "module.decoder.layers.10.w"),
        ("layers", "embed.weight", "embed.weight"),
        ("layers", "layers.norm.1", "layers.norm.1"),
        ("layers", "mylayers.0.w", "mylayers.0.w"),
        ("layers", "layers.01.w", "layers.01.w"),
        ("layers", "layers.1", "layers.11"),
        ("layers", "layers", "layers"),
        ("layers", "", ""),
    ],
)
def test_what_is_a_layers_number(marker: str, name: str, expected: str) -> None:
    assert GlobalNames(marker, (10, 11))(name) == expected


def test_a_stage_lists_its_layers_at_once_or_by_part_or_holds_none() -> None:
    layers = [[0, 3], [], [[1], [2]]]
    assert global_layer_names(stage=0, layers=layers).numbers == (0, 3)
    assert global_layer_names(stage=1, layers=layers).numbers == ()
    assert global_layer_names(stage=2, chunk=1, layers=layers, num_layers=4, pp=3).numbers == (2,)


def test_a_part_without_layers_has_names_without_numbers() -> None:
    names = global_layer_names(stage=1, layers=[[0, 3], [], [[1], [2]]])
    assert names.apply({"embed.weight": 0}) == {"embed.weight": 0}
    assert global_layer_names(4, pp=2, stage=1).apply({}) == {}


def test_experts() -> None:
    assert global_expert_names(8, ep=4, rank=2)("layers.0.experts.1.w1") == "layers.0.experts.5.w1"
    assert global_expert_names(rank=1, experts=[[0, 3], [2, 1]])("experts.0.w") == "experts.2.w"
    both = global_layer_names(4, pp=2, stage=1), global_expert_names(4, ep=2, rank=1)
    assert both[1](both[0]("layers.0.mlp.experts.1.w")) == "layers.2.mlp.experts.3.w"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: global_layer_names(10, pp=4, stage=0), "10 layers do not divide into 4 equal parts"),
        (lambda: global_layer_names(8, pp=2, vpp=0, stage=0), "do not divide into 0 equal parts"),
        (lambda: global_layer_names(8, stage=0), "needs num_layers and pp, or layers="),
        (lambda: global_layer_names(8, pp=2, stage=2), "there is no stage 2: the layout has 2"),
        (lambda: global_layer_names(8, pp=2, stage=-1), "there is no stage -1"),
        (lambda: global_layer_names(8, pp=2, stage=0, chunk=1), "there is no chunk 1"),
        (lambda: global_layer_names(stage=0, layers=[[0, 1], [1, 2]]), "layer 1 stands twice"),
        (lambda: global_layer_names(stage=0, layers=[[0, 1], [3]]), "layer 2 is missing"),
        (lambda: global_layer_names(5, stage=0, layers=[[0, 1], [2]]), "holds 3 layers on 2 stages"),
        (lambda: global_layer_names(stage=0, pp=3, layers=[[0, 1], [2]]), "not num_layers=None on pp=3"),
        (lambda: global_layer_names(4, pp=2, stage=0)("layers.2.w"), "'layers.2.w' is number 2 of 'layers' here"),
        (
            lambda: global_layer_names(4, pp=2, stage=0).apply({"h.0.w": 0}),
            "number after 'layers', .* names are 'h.0.w'",
        ),
        (lambda: global_expert_names(4, ep=2, rank=0).apply({"ex.0.w": 0}), "number after 'experts', .* are 'ex.0.w'"),
        (lambda: global_expert_names(7, ep=2, rank=0), "7 experts do not divide into 2 equal parts"),
        (lambda: global_expert_names(rank=2, experts=[[0], [1]]), "there is no rank 2"),
        (lambda: global_expert_names(rank=0, experts=[[0], [2]]), "expert 1 is missing"),
        (lambda: merge_parts({"a": 0}, {"a": 0}), "'a' is in model part 0 and in model part 1"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(InvalidStateError, match=message.replace("[", r"\[")):
        call()
