"""Trees taken apart into what a layout fixes and plain values, and merged again with other values."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.tree import key_token
from cloudckpt.format.values import Node, encode
from cloudckpt.plan.skeleton import Skeleton, split
from cloudckpt.plan.tree import LeafSpec, MergedTree, RankTree, merge, merge_again


class Array:
    """Stands for a tensor."""


class Own:
    """Stands for a value that differs per rank."""

    def __init__(self, value: Any) -> None:
        self.value = value


def rank_tree(state: Any) -> RankTree:
    specs: list[LeafSpec] = []

    def leaf(path: tuple[Any, ...], obj: Any) -> Any:
        if isinstance(obj, Own):
            return {"$": "per_rank", "value": encode(obj.value)}
        if not isinstance(obj, Array):
            return None
        name = key_token(encode(path))
        specs.append(LeafSpec(name, path, "float32", (2,)))
        return {"$": "tensor", "array": name}

    return RankTree(encode(state, leaf=leaf), tuple(specs))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=6,
)
KEYS = st.text(max_size=2) | st.integers(0, 3)
STATES = st.recursive(
    st.builds(Array) | st.builds(Own, PLAIN) | PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


def other_values(state: Any, change: Any) -> Any:
    """The same arrays in the same places."""
    if isinstance(state, Array):
        return state
    if isinstance(state, Own):
        return Own(change)
    if holds(state):
        if isinstance(state, dict):
            return type(state)((key, other_values(value, change)) for key, value in state.items())
        return type(state)([other_values(value, change) for value in state])
    return change


def holds(state: Any) -> bool:
    if isinstance(state, (Array, Own)):
        return True
    if isinstance(state, dict):
        return any(map(holds, state.values()))
    return isinstance(state, (list, tuple)) and any(map(holds, state))


@given(STATES, PLAIN)
def test_values_are_no_part_of_the_skeleton(state: Any, change: Any) -> None:
    node = rank_tree(state).node
    skeleton, values = split(node)
    assert Skeleton(skeleton).fill(values) == node
    changed = rank_tree(other_values(state, change)).node
    skeleton_then, values_then = split(changed)
    assert skeleton_then == skeleton
    assert len(values_then) == len(values)
    assert Skeleton(skeleton).fill(values_then) == changed


def refilled(trees: list[RankTree]) -> tuple[list[Node], set[int]]:
    """The same trees with everything shared that may be."""
    skeletons: dict[str, Skeleton] = {}
    decoded: dict[str, Node] = {}
    nodes = []
    for tree in trees:
        skeleton, values = split(tree.node)
        made = skeletons.setdefault(key_token(skeleton), Skeleton(skeleton))
        nodes.append(made.fill([decoded.setdefault(key_token(value), value) for value in values]))
    shared = {id(node) for node in decoded.values() if not (isinstance(node, dict) and node.get("$") == "per_rank")}
    return nodes, shared.union(*(skeleton.settled for skeleton in skeletons.values()))


def outcome(call: Any) -> MergedTree | str:
    try:
        return call()  # type: ignore[no-any-return]
    except InvalidStateError as error:
        return str(error)


@given(st.lists(STATES, min_size=1, max_size=3), PLAIN, st.integers(0, 4), st.sampled_from(["check", "rank0"]))
def test_merging_again_is_merging(states: list[Any], change: Any, copies: int, values: str) -> None:
    """Also the errors are the same, and what is the same object on several ranks changes nothing."""
    states += states[:1] * copies
    trees = [rank_tree(state) for state in states]
    known = outcome(partial(merge, trees, values=values))
    if isinstance(known, str):
        nodes, shared = refilled(trees)
        again = [RankTree(node, tree.leaves) for node, tree in zip(nodes, trees, strict=True)]
        assert outcome(partial(merge, again, values=values, shared=shared)) == known
        return
    for later in (
        [*states],
        [other_values(state, change) for state in states],
        [*states[:-1], other_values(states[-1], 7)],
    ):
        trees = [rank_tree(state) for state in later]
        nodes, shared = refilled(trees)
        again = outcome(partial(merge_again, known, nodes, values=values, shared=shared))
        assert again == outcome(partial(merge, trees, values=values))
