"""An encoded tree in two parts: where its arrays stand, which a layout fixes, and its plain values, which change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from cloudckpt.format.tree import Node, children, is_array, is_mapping, is_per_rank

SkeletonNode: TypeAlias = Node
"""A tree in which None stands for every value. Such a tree has no other None."""


def split(node: Node) -> tuple[SkeletonNode, list[Node]]:
    """The skeleton, and the values in tree order: what differs per rank, and the largest subtrees without arrays."""
    values: list[Node] = []
    return _split(node, values), values


def _split(node: Node, values: list[Node]) -> SkeletonNode:
    if is_array(node):
        return node
    before = len(values)
    parts = [_split(child, values) for _, child in children(node) or ()]
    if not any(part is not None for part in parts) and not any(map(is_per_rank, values[before:])):
        del values[before:]
        values.append(node)
        return None
    return node if len(values) == before else _rebuilt(node, parts)


def _rebuilt(node: Node, parts: list[Node]) -> Node:
    """The same container with other children."""
    if isinstance(node, list):
        return parts
    if "$" not in node:
        return dict(zip(node, parts, strict=True))
    if is_mapping(node):
        return {**node, "items": [[key, part] for (key, _), part in zip(node["items"], parts, strict=True)]}
    return {**node, "items": parts}


class Skeleton:
    """``settled``: ids of the nodes that have no value below; they are the same objects in every tree filled in."""

    def __init__(self, node: SkeletonNode) -> None:
        self._node = node
        settled: set[int] = set()
        _settle(node, settled)
        self.settled = frozenset(settled)

    def fill(self, values: Sequence[Node]) -> Node:
        """The tree of which this is the skeleton, given what `split` took out of it."""
        return self._fill(self._node, iter(values))

    def _fill(self, node: SkeletonNode, values: Iterator[Node]) -> Node:
        if node is None:
            return next(values)
        if id(node) in self.settled:
            return node
        return _rebuilt(node, [self._fill(child, values) for _, child in children(node) or ()])


def _settle(node: SkeletonNode, settled: set[int]) -> bool:
    if node is None:
        return False
    parts = [_settle(child, settled) for _, child in children(node) or ()]
    if not all(parts):
        return False
    settled.add(id(node))
    return True
