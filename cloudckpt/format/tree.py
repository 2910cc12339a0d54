"""Walking an encoded tree (see values.py) without decoding it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from cloudckpt.errors import FormatError
from cloudckpt.format import containers, values

Node: TypeAlias = Any
TreePath: TypeAlias = tuple[str, ...]
"""Key nodes as JSON texts: unlike Python keys they tell 1 from True and "1", and always compare."""

MAX_RANKS = 10**6
"""A list by rank must not take memory that its text has not."""
_RANK = re.compile(r"0|[1-9][0-9]{0,5}")


def key_token(key: Node) -> str:
    return msgspec.json.encode(key).decode()


def path_text(path: TreePath) -> str:
    """The dotted path for people and for the lists in errors and reports."""
    return values.dotted(tree_keys(path))


def tree_keys(path: TreePath) -> tuple[Any, ...]:
    """The Python keys; of sequences the indices."""
    return tuple(values.decode(msgspec.json.decode(token)) for token in path)


def children(node: Node) -> list[tuple[Node, Node]] | None:
    """``(key node, child)`` of a container, whose keys are indices for sequences; None for a leaf."""
    if isinstance(node, list):
        return list(enumerate(node))
    if not isinstance(node, dict):
        return None
    if "$" not in node:
        return list(node.items())
    container = containers.BY_TAG.get(node["$"]) if isinstance(node["$"], str) else None
    if container is None or container.form == "set" or not isinstance(node.get("items"), list):
        return None
    if container.form == "sequence":
        return list(enumerate(node["items"]))
    return [(item[0], item[1]) for item in node["items"] if isinstance(item, list) and len(item) == 2]


def is_mapping(node: Node) -> bool:
    """Whether its children have keys, be they those of a dict or names of attributes."""
    return _mapping_form(node) is not None


def is_dict(node: Node) -> bool:
    return _mapping_form(node) == "mapping"


def _mapping_form(node: Node) -> str | None:
    if not isinstance(node, dict):
        return None
    if "$" not in node:
        return "mapping"
    container = containers.BY_TAG.get(node["$"]) if isinstance(node["$"], str) else None
    return container.form if container is not None and container.form in ("mapping", "attributes") else None


def is_array(node: Node) -> bool:
    return isinstance(node, dict) and "$" in node and "array" in node


def is_per_rank(node: Node) -> bool:
    """Whether it is a value that every rank has for itself."""
    return isinstance(node, dict) and node.get("$") == "per_rank"


def holds_arrays(node: Node) -> bool:
    """Whether an array, or a value that differs per rank, is anywhere below."""
    if is_array(node) or is_per_rank(node):
        return True
    return any(holds_arrays(child) for _, child in children(node) or ())


def array_leaves(node: Node, path: TreePath = ()) -> Iterator[tuple[TreePath, dict[str, Any]]]:
    """Every reference to an array."""
    if is_array(node):
        yield path, node
    for key, child in children(node) or ():
        yield from array_leaves(child, (*path, key_token(key)))


def values_by_rank(node: Mapping[str, Any]) -> dict[int, Node]:
    """What a "per_rank" leaf holds; FormatError if its ranks are not canonical."""
    held = node.get("values")
    if not isinstance(held, dict) or not all(_RANK.fullmatch(rank) for rank in held):
        raise FormatError("malformed per-rank value")
    return {int(rank): value for rank, value in held.items()}


def per_rank_leaves(node: Node, path: TreePath = ()) -> Iterator[tuple[TreePath, dict[str, Any]]]:
    if is_per_rank(node):
        yield path, node
    for key, child in children(node) or ():
        yield from per_rank_leaves(child, (*path, key_token(key)))


def leaves(node: Node, path: TreePath = ()) -> Iterator[tuple[TreePath, Node]]:
    """What a load counts as one key: arrays, plain values, sequences of plain values only, empty containers."""
    inner = children(node)
    if not inner or not (is_mapping(node) or holds_arrays(node)):
        yield path, node
        return
    for key, child in inner:
        yield from leaves(child, (*path, key_token(key)))


def map_arrays(node: Node, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Node:
    """The same tree with every reference to an array replaced."""
    if is_array(node):
        return change(node)
    if isinstance(node, list):
        return [map_arrays(item, change) for item in node]
    if children(node) is None:
        return node
    if "$" not in node:
        return {key: map_arrays(child, change) for key, child in node.items()}
    if is_mapping(node):
        return {**node, "items": [[key, map_arrays(child, change)] for key, child in node["items"]]}
    return {**node, "items": [map_arrays(item, change) for item in node["items"]]}
