"""DCP's flat keys and the nested tree of a checkpoint, from each to the other.

DCP flattens a state before it plans: mappings are walked, and lists that hold tensors or mappings; the names of
what is met are joined by dots. Tuples, and all that is none of these, are values of one key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.tree import Node, children, is_dict

KeyPath: TypeAlias = tuple[str | int, ...]
"""Names of mappings as strings, whatever they were, and indices of lists."""

NOTES = "torch.distributed.checkpoint"
"""Under this key the metadata of a manifest has what its tree does not tell."""


@dataclass(frozen=True)
class Notes:
    """What a tree does not tell of the items that DCP saved.

    ``whole``: paths of items that are one value to DCP though a flattening planner would have walked them. ``raw``:
    paths of items whose bytes the planner made in its own way; the tree has the bytes. ``streams``: of BytesIO, of
    which the tree has the bytes, too. ``planner_data``: the node of a planner's own data, None where the tree tells
    them.
    """

    whole: Collection[KeyPath] = ()
    raw: Collection[KeyPath] = ()
    streams: Collection[KeyPath] = ()
    planner_data: Node = None

    def encode(self) -> Node:
        """None where there is nothing to note."""
        lists = {"whole": self.whole, "raw": self.raw, "streams": self.streams}
        found: dict[str, Any] = {name: [list(path) for path in sorted(p, key=str)] for name, p in lists.items() if p}
        if self.planner_data is not None:
            found["planner_data"] = self.planner_data
        return found or None

    @staticmethod
    def of(metadata: Node) -> Notes:
        """From the metadata of a manifest, which anybody may have written. Raises FormatError."""
        found = next((child for key, child in children(metadata) or () if key == NOTES), None)
        if found is None:
            return Notes()
        if not isinstance(found, dict):
            raise FormatError(f"malformed metadata: {NOTES!r} is not an object")
        whole, raw, streams = (_paths(found.get(name, [])) for name in ("whole", "raw", "streams"))
        return Notes(whole, raw, streams, found.get("planner_data"))


def _paths(listed: Any) -> frozenset[KeyPath]:
    if not isinstance(listed, list) or not all(
        isinstance(path, list) and all(type(part) in (str, int) for part in path) for path in listed
    ):
        raise FormatError(f"malformed metadata: a list of paths in {NOTES!r} is none")
    return frozenset(tuple(path) for path in listed)


def key_of(path: KeyPath) -> str:
    return ".".join(map(str, path))


def flat_items(tree: Node, whole: Collection[KeyPath] = (), path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """What DCP takes for one key each, in tree order. ``whole``: paths that are not walked."""
    if path in whole or not is_walked(tree):
        yield path, tree
        return
    for key, child in children(tree) or ():
        name = key if isinstance(tree, list) else str(values.decode(key))
        yield from flat_items(child, whole, (*path, name))


def is_walked(node: Node) -> bool:
    """Whether DCP's flattening goes into it."""
    if isinstance(node, list):
        return any(_is_tensor(child) or is_walked(child) for child in node)
    return is_dict(node)


def _is_tensor(node: Node) -> bool:
    return isinstance(node, dict) and node.get("$") == "tensor"


def keyed(items: Iterable[tuple[KeyPath, Node]], where: str) -> dict[str, tuple[KeyPath, Node]]:
    """By DCP's keys. Raises InvalidStateError where two have the same."""
    found: dict[str, tuple[KeyPath, Node]] = {}
    for path, node in items:
        key = key_of(path)
        if key in found:
            raise InvalidStateError(
                f"{where}: {found[key][0]} and {path} are both {key!r} to torch.distributed.checkpoint; "
                "tell them apart with rename="
            )
        found[key] = (path, node)
    return found


def nested_paths(keys: Iterable[str], planner_data: Any) -> dict[str, KeyPath] | None:
    """The path of each key, as a flattening planner's data say; None where these do not make a tree of the keys."""
    if not isinstance(planner_data, Mapping):
        return None
    found: dict[str, KeyPath] = {}
    inner: dict[KeyPath, type] = {}
    """Of every container, whether its parts have names or indices."""
    for key in keys:
        path = planner_data.get(key)
        if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
            return None
        if key_of(path) != key or type(path[0]) is not str:
            return None
        found[key] = path
        for depth in range(len(path)):
            if inner.setdefault(path[:depth], type(path[depth])) is not type(path[depth]):
                return None
    leaves = set(found.values())
    return None if leaves & inner.keys() else found


@dataclass(frozen=True)
class _Leaf:
    node: Node


@dataclass
class _Branch:
    parts: dict[str | int, _Branch | _Leaf | None] = field(default_factory=dict)

    def value(self) -> Any:
        """As nested dicts and lists. What is missing in a list was an empty mapping, of which DCP keeps nothing."""
        parts = {name: part.value() if isinstance(part, _Branch) else part for name, part in self.parts.items()}
        if not parts or type(next(iter(parts))) is str:
            return parts
        return [parts.get(index, {}) for index in range(1 + max(int(name) for name in parts))]


def tree_of(leaves: Mapping[KeyPath, Node]) -> Node:
    """The tree that has these nodes at these paths, of which none begins with another."""
    root = _Branch()
    for path, node in leaves.items():
        branch = root
        for name in path[:-1]:
            inner = branch.parts.setdefault(name, _Branch())
            assert isinstance(inner, _Branch)
            branch = inner
        # A leaf's node of None would mean to the encoder that it is no leaf.
        branch.parts[path[-1]] = None if node is None else _Leaf(node)
    return values.encode(root.value(), leaf=lambda _, obj: obj.node if isinstance(obj, _Leaf) else None)
