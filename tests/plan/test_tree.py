"""Trees of ranks that hold the same, more, less, or something else."""

from __future__ import annotations

from typing import Any

import pytest

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.array_names import array_names
from cloudckpt.format.values import encode
from cloudckpt.plan.tree import LeafSpec, RankTree, Tie, merge


class Tensor:
    """Stands for a tensor in a state."""

    def __init__(
        self,
        shape: tuple[int, ...] = (2,),
        dtype: str = "float32",
        alias_of: tuple[Any, ...] | None = None,
        tie: Tie | None = None,
    ):
        self.shape, self.dtype, self.alias_of, self.tie = shape, dtype, alias_of, tie


def rank_tree(state: Any) -> RankTree:
    specs: list[LeafSpec] = []

    def leaf(path: tuple[Any, ...], obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        name = array_names([path])[0]
        root = None if obj.alias_of is None else array_names([obj.alias_of])[0]
        specs.append(LeafSpec(name, path, obj.dtype, obj.shape, True, root, tie=obj.tie))
        return {"$": "tensor", "array": name}

    return RankTree(encode(state, leaf=leaf), tuple(specs))


def test_different_keys_are_united_in_order() -> None:
    merged = merge([rank_tree({"a": Tensor(), "n": 1}), rank_tree({"b": Tensor(), "n": 1, "m": {"x": 2}})])
    assert list(merged.node) == ["a", "n", "b", "m"]
    assert [spec.path for spec in merged.leaves] == [("a",), ("b",)]


def test_key_types_stay_apart() -> None:
    merged = merge([rank_tree({1: "int"}), rank_tree({"1": "str"})])
    assert merged.node == {"$": "dict", "items": [[1, "int"], ["1", "str"]]}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": 1}, {"a": 2}, "'a' differs between ranks 0 and \\[1\\]"),
        ({"a": [1]}, {"a": [1, 2]}, "'a' has a different length per rank"),
        (
            {"a": {"b": Tensor((2,))}},
            {"a": {"b": Tensor((3,))}},
            "'a.b' has shape \\(2,\\) on rank 0 but \\(3,\\) on rank 1",
        ),
        ({"a": Tensor()}, {"a": Tensor(dtype="bfloat16")}, "'a' has dtype float32 on rank 0 but bfloat16 on rank 1"),
        ({"a": Tensor()}, {"a": 5}, "'a' is a tensor on rank 0 but a int on rank 1"),
        ({"a": {"b": 1}}, {"a": [1]}, "'a' is a dict on rank 0 but a list on rank 1"),
        ({"a": 1}, {"a": 1.0}, "'a' is a int on rank 0 but a float on rank 1"),
        ({"a": {1, 2}}, {"a": {1, 3}}, "'a' differs"),
    ],
)
def test_what_ranks_share_must_agree(first: Any, second: Any, message: str) -> None:
    with pytest.raises(InvalidStateError, match=message):
        merge([rank_tree(first), rank_tree(second)])


def test_rank0_wins_on_request() -> None:
    merged = merge([rank_tree({"a": 1, "l": [1]}), rank_tree({"a": 2, "l": [1, 2]})], values="rank0")
    assert merged.node == {"a": 1, "l": [1]}


def test_ties_are_one_array() -> None:
    state = {"emb": Tensor(), "head": Tensor(alias_of=("emb",))}
    merged = merge([rank_tree(state), rank_tree(state)])
    assert [spec.path for spec in merged.leaves] == [("emb",)]
    assert merged.node["head"]["array"] == merged.node["emb"]["array"] == "emb"


def test_tied_on_one_rank_only_is_stored_twice() -> None:
    tied = {"emb": Tensor(), "head": Tensor(alias_of=("emb",))}
    merged = merge([rank_tree(tied), rank_tree({"emb": Tensor(), "head": Tensor()})])
    assert [spec.path for spec in merged.leaves] == [("emb",), ("head",)]


def held(*pieces: tuple[int, int], to: str | None = None, needed: bool = True) -> Tie:
    """Pieces as (where, digest)."""
    return Tie(to, frozenset(pieces), "emb", is_needed=needed)


def test_a_declared_tie_over_ranks_is_one_array_where_all_pieces_are_equal() -> None:
    first, last = {"emb": Tensor(tie=held((0, 7)))}, {"head": Tensor(tie=held((0, 7), to="emb"))}
    more = {"emb": Tensor(tie=held((1, 8)))}, {"head": Tensor(tie=held((1, 8), to="emb"))}
    for trees in ([first, last, *more], [last, first, *more], [more[1], last, more[0], first]):
        merged = merge([rank_tree(tree) for tree in trees])
        assert [spec.path for spec in merged.leaves] == [("emb",)]
        assert merged.node["head"]["array"] == "emb"
        assert merged.names == {"emb": "emb", "head": "emb"}
        assert merged.notes == ()


@pytest.mark.parametrize(
    ("emb", "head", "fault"),
    [
        (Tensor(tie=held((0, 7))), Tensor(tie=held((0, 8), to="emb")), "they differ"),
        (Tensor(tie=held((0, 7))), Tensor(tie=held((1, 7), to="emb")), "the ranks cut them differently"),
        (Tensor(tie=held((0, 7))), Tensor(tie=held((0, 7), (1, 7), to="emb")), "the ranks cut them differently"),
        (Tensor(tie=held((0, 7))), Tensor((3,), tie=held((0, 7), to="emb")), "they are of (3,) float32 and (2,)"),
    ],
)
def test_a_declared_tie_that_is_none_is_stored_twice_and_told(emb: Tensor, head: Tensor, fault: str) -> None:
    merged = merge([rank_tree({"emb": emb}), rank_tree({"head": head})])
    assert [spec.path for spec in merged.leaves] == [("emb",), ("head",)]
    (note,) = merged.notes
    assert note.startswith(f"'head' is declared to be tied to 'emb', but {fault}")


def test_ties_that_ranks_declare_differently_are_refused() -> None:
    head = Tensor(tie=held((0, 7), to="emb"))
    with pytest.raises(InvalidStateError, match="'head' is declared to be tied to 'emb', which no rank holds"):
        merge([rank_tree({"head": head})])
    merged = merge([rank_tree({"head": Tensor(tie=held((0, 7), to="emb", needed=False))})])
    assert [spec.path for spec in merged.leaves] == [("head",)]
    with pytest.raises(InvalidStateError, match="'emb' is tied to 'head' on some ranks only"):
        merge([rank_tree({"emb": Tensor()}), rank_tree({"head": head})])
    with pytest.raises(InvalidStateError, match="'head' is declared to be tied otherwise on rank 0 than on rank 1"):
        merge([rank_tree({"head": head}), rank_tree({"head": Tensor()})])


def test_names_differ_where_only_case_does() -> None:
    merged = merge([rank_tree({"W": Tensor()}), rank_tree({"w": Tensor()})])
    names = [merged.names[spec.id] for spec in merged.leaves]
    assert len({name.lower() for name in names}) == 2
