"""What an export takes of a stored state, and under which names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from cloudckpt.errors import InvalidStateError, NotFoundError
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import Node, TreePath, children, is_array, leaves, path_text, tree_keys
from cloudckpt.plan.moves import Leaf, Moves
from cloudckpt.plan.rename import Rules, listed
from cloudckpt.plan.virtual import VirtualArray, array_of


@dataclass(frozen=True, eq=False)
class Selection:
    """``leaves``: in stored order, under their new paths. ``made``: arrays that rename rules have made, by name."""

    manifest: Manifest
    leaves: Sequence[Leaf]
    made: Mapping[str, VirtualArray]

    def array(self, node: Mapping[str, Any]) -> VirtualArray:
        """What a leaf refers to."""
        found = self.made.get(node.get("array", ""))
        return found if found is not None else array_of(self.manifest, node)

    def check_names(self) -> None:
        """Raises InvalidStateError where two leaves have one dotted path."""
        seen: dict[str, Leaf] = {}
        clashes = []
        for leaf in self.leaves:
            first = seen.setdefault(leaf.text, leaf)
            if first is not leaf:
                clashes.append(f"{_keys(first.old)} and {_keys(leaf.old)} both become {leaf.text!r}")
        if clashes:
            raise InvalidStateError(f"names clash: {'; '.join(clashes)}; give them others with rename")


def select(
    manifest: Manifest,
    include: str | Iterable[str] | None,
    rename: Rules | None,
    made: Mapping[str, VirtualArray] | None = None,
    *,
    keep_empty: bool = False,
) -> Selection:
    """``include``: patterns of stored dotted paths (``fnmatch``); what is below a match comes with it. None: all.

    ``rename`` is for what is included; see `cloudckpt.plan.rename`. Empty containers are left out
    unless ``keep_empty``.

    Raises NotFoundError for patterns that match nothing, InvalidStateError for rules as a load does.
    """
    found = [(path, node) for path, node in leaves(manifest.document.tree) if keep_empty or children(node) != []]
    if include is not None:
        found = _included(found, [include] if isinstance(include, str) else list(include))
    moves = Moves(manifest, [Leaf(path, path, node) for path, node in found], made or {})
    for rule in listed(rename) if rename is not None else ():
        moves.apply(rule)
    return Selection(manifest, moves.leaves, moves.made)


def kind_of(node: Node) -> str:
    """What a leaf is that is no array, for messages."""
    if is_array(node):
        return str(node["$"])
    if isinstance(node, dict):
        return {"per_rank": "PerRank"}.get(str(node.get("$", "dict")), str(node.get("$", "dict")))
    return "None" if node is None else type(node).__name__


def _included(found: Sequence[tuple[TreePath, Node]], patterns: Sequence[str]) -> list[tuple[TreePath, Node]]:
    matched: set[str] = set()
    kept = []
    for path, node in found:
        texts = [path_text(path[:depth]) for depth in range(1, len(path) + 1)]
        hits = {p for p in patterns if any(text == p or fnmatchcase(text, p) for text in texts)}
        matched |= hits
        if hits:
            kept.append((path, node))
    idle = [pattern for pattern in patterns if pattern not in matched]
    if idle:
        raise NotFoundError(f"include: nothing that is stored matches {', '.join(map(repr, idle))}")
    return kept


def _keys(path: TreePath) -> str:
    """With the keys apart, since different paths can have one text."""
    return "".join(f"[{key!r}]" for key in tree_keys(path))
