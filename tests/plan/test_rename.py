"""Rules against trees of every shape: where leaves go, what they are made of, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.document import ArrayEntry, ChunkTable, Document
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import leaves, path_text
from cloudckpt.plan.rename import Concatenate, Rules, Split, Stack, Transpose, Unstack
from cloudckpt.plan.view import View, describe_rules, renamed

NO_CHUNKS = ChunkTable(count=0, object=b"", byte_offset=b"", nbytes=b"", crc32c=b"")


class T(tuple[int, ...]):
    """Stands in a state for a tensor of this shape."""

    __slots__ = ()


def manifest(state: Any, **logical: list[int]) -> Manifest:
    """As if ``state`` had been saved. ``logical``: by name of the array, what its leaf records."""
    arrays: list[ArrayEntry] = []

    def leaf(path: values.Path, obj: Any) -> values.Node:
        if type(obj) is not T:
            return None
        name = values.dotted(path)
        arrays.append(ArrayEntry(name=name, dtype="float32", shape=tuple(obj), grid=(), first_chunk=0))
        return {"$": "tensor", "array": name, **({"logical_shape": logical[name]} if name in logical else {})}

    tree = values.encode(state, leaf=leaf)
    rest: dict[str, Any] = {"commit_id": "", "attempt": "", "step": None, "created": "", "writer": "", "meshes": ()}
    document = Document(
        format="cloudckpt",
        version="1.0",
        world_size=1,
        layout="packed",
        metadata={},
        tree=tree,
        arrays=tuple(arrays),
        objects=(),
        chunks=NO_CHUNKS,
        **rest,
    )
    return Manifest(document)


def state_of(view: View) -> Any:
    """The renamed state, with shapes where tensors are."""
    return values.decode(view.tree, leaf=lambda node: T(view.array(node).shape))


def rename(state: Any, rules: Rules) -> Any:
    return state_of(renamed(manifest(state), rules))


W = T((2, 3))


@pytest.mark.parametrize(
    ("state", "rules", "expected"),
    [
        # One flat dict, as state_dict() gives it.
        ({"b.0.w": W, "b.1.w": W, "n": 1}, [("b.{i}.w", "l.{i}.weight")], {"l.0.weight": W, "l.1.weight": W, "n": 1}),
        # Below another key, which stays a key of its own.
        ({"model": {"b.0.w": W}}, ("{p:*}.b.{i}.w", "{p}.l.{i}.weight"), {"model": {"l.0.weight": W}}),
        ({"model": {"a.w": W}}, {"model.{rest:*}": "net.{rest}"}, {"net": {"a.w": W}}),
        ({"model": {"a.w": W}}, ("model.{rest:*}", "{rest}"), {"a.w": W}),
        ({"w": W}, ("w", ("model", "w")), {"model": {"w": W}}),
        # Nested dicts, lists and int keys keep their kind.
        ({"b": [{"w": W}, {"w": W, "b": 1}]}, ("b.{i}.{r:*}", "l.{i}.{r}"), {"l": [{"w": W}, {"w": W, "b": 1}]}),
        ({"s": {0: {"m": W}, 1: {"m": W}}}, ("s.{i}.m", "s.{i}.avg"), {"s": {0: {"avg": W}, 1: {"avg": W}}}),
        ({"s": {0: W}}, ("s.0", "s.7"), {"s": {7: W}}),
        ({"s": {"0": W}}, ("s.0", ("t", "{x}", 3)), None),
        ({"s": {"5": W}}, ("s.{i:d}", ("t", "{i:d}")), {"t": {5: W}}),
        ({"s": {"5": W}}, ("s.{i:d}", ("t", "{i}")), {"t": {"5": W}}),
        ({"t": (1, W)}, ("t.1", "w"), {"t": (1,), "w": W}),
        ({"a": {}, "b": [1, 2]}, [("a", "c"), ("b", "d")], {"c": {}, "d": [1, 2]}),
        # A swap takes a name in between; within one rule everything moves at once.
        ({"a": W, "b": T((1,))}, [("a", "x"), ("b", "a"), ("x", "b")], {"b": W, "a": T((1,))}),
        ({"l.0": W, "l.1": T((1,))}, lambda text: {"l.0": "l.1", "l.1": "l.0"}[text], {"l.1": W, "l.0": T((1,))}),
        # Structure.
        ({"m": {f"e.{e}.w": W for e in range(3)}}, Stack("{p:*}.e.{e}.w", "{p}.e.w"), {"m": {"e.w": T((3, 2, 3))}}),
        ({"e": [{"w": W}, {"w": W}]}, Stack("e.{e}.w", "e.w", dim=-1), {"e": {"w": T((2, 3, 2))}}),
        ({"e": {"w": T((4, 2))}}, Unstack("e.w", "e.{e}.w", dim=1), {"e": {"0.w": T((4,)), "1.w": T((4,))}}),
        ({"e.w": W}, Unstack("e.w", ("e", "{e:d}", "w")), {"e": {0: {"w": T((3,))}, 1: {"w": T((3,))}}}),
        ({"a.q": W, "a.k": T((1, 3))}, Concatenate(("{a}.q", "{a}.k"), "{a}.qk"), {"a.qk": T((3, 3))}),
        ({"w.0": W, "w.1": W}, Concatenate("w.{i}", "w", dim=1), {"w": T((2, 6))}),
        ({"qk": W}, Split("qk", ("q", "k"), (2, 1), dim=1), {"q": T((2, 2)), "k": T((2, 1))}),
        ({"w": W}, Split("w", "w.{i}", 3, dim=1), {"w.0": T((2, 1)), "w.1": T((2, 1)), "w.2": T((2, 1))}),
        ({"w": W}, Split("w", (("q", 0),), 1), {"q": {0: W}}),
        ({"w": T((1, 2, 3))}, Transpose("w", (2, 0, 1), "v"), {"v": T((3, 1, 2))}),
        ({"w": W}, [Transpose("w"), Unstack("w", "w.{i}"), Stack("w.{i}", "w", dim=1)], {"w": W}),
    ],
)  # fmt: skip
def test_what_becomes_of_a_state(state: Any, rules: Rules, expected: Any) -> None:
    if expected is None:
        with pytest.raises(InvalidStateError):
            rename(state, rules)
        return
    assert repr(rename(state, rules)) == repr(expected)


EXPERTS = {"e.0": W, "e.1": W, "e.3": W, "x": 1}


@pytest.mark.parametrize(
    ("state", "rules", "fault"),
    [
        ({"a": W}, ("b", "c"), "matches nothing"),
        ({"a": W}, [("a", "b"), ("a", "c")], "matches nothing"),
        ({"a": W}, lambda text: text, "matches nothing"),
        ({"a": W, "b": W}, ("a", "b"), "'a' and 'b' both become 'b'"),
        ({"a": W, "b": W}, [("a", "c"), ("b", "c")], "'a' and 'b' both become 'c'"),
        ({"a.1": W, "b.1": W}, ("{x}.1", "c"), "both become 'c'"),
        ({"a": W, "b": W}, ("a", ("b", "c")), "'b' would be a value and hold others"),
        (EXPERTS, Stack("e.{i}", "e"), r"beside 'e.0' there is no numbers \[2\]"),
        ({"e.1": W}, Stack("e.{i}", "e"), r"there is no numbers \[0\]"),
        ({"e.0": W, "e.00": W}, Stack("e.{i}", "e"), "are both part 0"),
        ({"e.a": W}, Stack("e.{i}", "e"), "'a' in 'e.a' is no number"),
        ({"e.0": W, "e.1": T((2, 2))}, Stack("e.{i}", "e"), "do not go into one tensor"),
        ({"e.0": W, "e.1": 3}, Stack("e.{i}", "e"), "'e.1' is no tensor"),
        ({"e.0": W}, Stack("e.{i}", "e", dim=3), "no dim 3 among 3"),
        ({"e.0": W}, Stack("e.{i}", "e.{i}"), "just one placeholder"),
        ({"e.0.1": W}, Stack("e.{i}.{j}", "e"), "just one placeholder"),
        ({"q": W}, Concatenate(("q", "k"), "qk"), r"beside 'q' there is no \['k'\]"),
        ({"q": W, "k": T((2, 4))}, Concatenate(("q", "k"), "qk"), "do not go into one tensor"),
        ({"a.q": W, "k": W}, Concatenate(("{a}.q", "k"), "qk"), "different placeholders"),
        ({"w": W}, Split("w", ("a", "b"), (1, 2)), r"parts of \(1, 2\) do not make up dim 0"),
        ({"w": W}, Split("w", ("a", "b"), (3, -1)), "do not make up"),
        ({"w": W}, Split("w", ("a", "b"), 2, dim=1), "does not divide into 2"),
        ({"w": W}, Split("w", ("a", "b"), (2,)), "1 parts for 2 targets"),
        ({"w": W}, Split("w", "a", 2), "2 parts for 1 targets"),
        ({"w": W}, Transpose("w", (0, 0)), "no permutation"),
        ({"w": W}, Transpose("w", (2, 1, 0)), "no permutation"),
        ({"w": 1}, Transpose("w"), "'w' is no tensor"),
        ({"w": T(())}, Unstack("w", "w.{i}"), "no dim 0"),
        ({"w": W}, ("w", "{i}"), "which 'w' has not"),
        ({"w": W}, ("{", "w"), "placeholders are"),
        ({"w": W}, ("w", 3), "dotted path or a tuple of keys"),
        ({"w": W}, [3], "is no rename rule"),
        ({"w": W}, 3, "must be a list of rules"),
        ({"w": W}, [lambda _: 3], "returned 3 for 'w'"),
        ({"l": [W, W, W]}, ("l.1", "w"), "leave a gap"),
    ],
)  # fmt: skip
def test_what_is_refused(state: Any, rules: Any, fault: str) -> None:
    with pytest.raises(InvalidStateError, match=fault):
        rename(state, rules)


def test_without_rules_the_tree_is_as_it_is() -> None:
    stored = manifest({"a": [W, {1: W}]})
    assert renamed(stored, None).tree is stored.document.tree


def test_rules_that_move_nothing_else_leave_the_rest_as_it_was() -> None:
    state = {"o": [{}, (1, W), {True: W, 1.5: [W]}], "w": W, "e": {}, "$": 3}
    view = renamed(manifest(state), ("w", "v"))
    assert repr(state_of(view)) == repr({"o": state["o"], "v": W, "e": {}, "$": 3})
    found = [path_text(path) for path, _ in leaves(view.tree)]
    assert found == ["o.0", "o.1.0", "o.1.1", "o.2.True", "o.2.1.5.0", "v", "e", "$"]


def test_tied_tensors_stay_tied() -> None:
    stored = manifest({"a": W})
    tree = {"a": stored.document.tree["a"], "b": dict(stored.document.tree["a"])}
    tied = Manifest(Document(**{f: getattr(stored.document, f) for f in Document.__struct_fields__} | {"tree": tree}))
    view = renamed(tied, ("b", "c"))
    assert view.tree["a"]["array"] == view.tree["c"]["array"]


def test_a_logical_shape_is_the_shape() -> None:
    stored = manifest({"w": T((6,))}, w=[2, 3])
    assert repr(state_of(renamed(stored, None))) == "{'w': (2, 3)}"
    assert repr(state_of(renamed(stored, ("w", "v")))) == "{'v': (2, 3)}"
    assert repr(state_of(renamed(stored, Transpose("w")))) == "{'w': (3, 2)}"


@pytest.mark.parametrize("logical", [[2, 2], [-2, -3], [6.0], "6", [2**40, 2**40, 0]])
def test_a_logical_shape_that_lies_is_refused(logical: Any) -> None:
    view = renamed(manifest({"w": T((6,))}, w=logical), None)
    with pytest.raises(FormatError, match="logical shape"):
        view.array(view.tree["w"])


def test_rules_that_come_to_something_else_are_told_apart() -> None:
    stored = manifest({"e.0": W, "e.1": W})
    shown = {describe_rules(rules, renamed(stored, rules)) for rules in (
        None, ("e.0", "x"), ("e.0", "y"), Stack("e.{i}", "e"), Stack("e.{i}", "e", dim=1),
    )}  # fmt: skip
    assert len(shown) == 5
    digests = {renamed(stored, lambda text, end=end: f"{text}{end}").digest() for end in "ab"}  # type: ignore[misc]
    assert len(digests) == 2
