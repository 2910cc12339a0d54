"""A tree from its leaves, once these have other paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import containers
from cloudckpt.format.tree import Node, TreePath, children, is_mapping, key_token, path_text


def regrow(tree: Node, leaves: Sequence[tuple[TreePath, TreePath, Node]]) -> Node:
    """``leaves``: ``(path, path in tree, node)``. Containers are of the kind that they were in ``tree``.

    A new container is of the kind of that at the same depth of the old path, if both paths have the same length;
    else a dict. Raises InvalidStateError where a leaf would stand above another, or a list would have holes.
    """
    kinds = dict(_containers(tree, ()))
    for path, old, _ in leaves:
        for depth in range(len(path) if len(path) == len(old) else 0):
            kinds.setdefault(path[:depth], kinds[old[:depth]])
    branches: dict[TreePath, dict[str, None]] = {}
    nodes: dict[TreePath, Node] = {}
    for path, _, node in leaves:
        nodes[path] = node
        for depth in range(len(path)):
            branches.setdefault(path[:depth], {})[path[depth]] = None
    for path in branches:
        if path in nodes:
            raise InvalidStateError(f"rename: {path_text(path)!r} would be a value and hold others, too")
    return _grow((), branches, nodes, kinds)


def _containers(node: Node, path: TreePath) -> list[tuple[TreePath, Node]]:
    inner = children(node)
    if not inner:
        return []
    found = [(path, node)]
    for key, child in inner:
        found += _containers(child, (*path, key_token(key)))
    return found


def _grow(
    path: TreePath,
    branches: dict[TreePath, dict[str, None]],
    nodes: dict[TreePath, Node],
    kinds: dict[TreePath, Node],
) -> Node:
    if path not in branches:
        return nodes.get(path, {})
    tokens = list(branches[path])
    grown = {token: _grow((*path, token), branches, nodes, kinds) for token in tokens}
    kind: Any = kinds.get(path, {})
    if not is_mapping(kind) and all(token.isdecimal() for token in tokens):
        if {*tokens} != {str(i) for i in range(len(tokens))}:
            raise InvalidStateError(
                f"rename: the rules take elements out of the list {path_text(path)!r}, and leave a gap"
            )
        items = [grown[str(i)] for i in range(len(tokens))]
        return items if isinstance(kind, list) else {**kind, "items": items}
    keys = [msgspec.json.decode(token) for token in tokens]
    if not is_mapping(kind):
        kind = {}  # experts in a list that have become one: their keys are names now
    if "$" not in kind and all(isinstance(key, str) and key != "$" for key in keys):
        return dict(zip(keys, grown.values(), strict=True))
    base = kind if "$" in kind else {"$": containers.DICT.tag}
    return {**base, "items": [[key, child] for key, child in zip(keys, grown.values(), strict=True)]}
