"""The stored state as a load sees it: under the names that rename rules give it, and with what may be changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cloudckpt._cached import cached_property
from cloudckpt.errors import InvalidStateError
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import Node, array_leaves, leaves, path_text
from cloudckpt.plan.changes import Changes, fits
from cloudckpt.plan.migrations import Migration
from cloudckpt.plan.moves import Leaf, Moves
from cloudckpt.plan.regrow import regrow
from cloudckpt.plan.rename import Rules, listed, shown
from cloudckpt.plan.virtual import VirtualArray, array_of


class View:
    """The stored state as a load sees it, and what the load may change on the way.

    ``migrations``: those that led to it, before the caller's own rules.
    """

    def __init__(
        self,
        manifest: Manifest,
        tree: Node,
        made: Mapping[str, VirtualArray],
        changes: Changes,
        migrations: Sequence[Migration] = (),
    ) -> None:
        self.tree = tree
        self.changes = changes
        self.migrations = migrations
        self._manifest = manifest
        self._made = made

    @property
    def world_size(self) -> int:
        """Of the job that saved."""
        return self._manifest.document.world_size

    def array(self, node: Mapping[str, Any]) -> VirtualArray:
        """What a leaf of ``tree`` refers to. FormatError if its ``logical_shape`` does not fit the stored array."""
        # A leaf without a name, too, is for the manifest to refuse.
        found = self._made.get(node.get("array", ""))
        return found if found is not None else array_of(self._manifest, node)

    def shape_for(self, node: Mapping[str, Any], owner: tuple[int, ...]) -> tuple[int, ...]:
        """Of a target that is yet to be made for a leaf that belongs to a tensor of shape ``owner``.

        The stored shape, or that of its owner where ``resize`` lets it grow along (or shrink). Extents
        of 1 do not: there an optimizer keeps one number for a whole dim.
        """
        stored = self.array(node).shape
        found = self.changes.resize(self.text(node))
        if found is None or not fits(stored, owner, found[1]):
            return stored
        return stored if any(a == 1 < b for a, b in zip(stored, owner, strict=True)) else owner

    def text(self, node: Mapping[str, Any]) -> str:
        """The dotted path of the first leaf that refers to the same array, for messages."""
        return self._texts.get(node["array"], str(node["array"]))

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {node["array"]: path_text(path) for path, node in reversed([*array_leaves(self.tree)])}

    def digest(self) -> str:
        """Equal for equal views; for views of equal manifests only."""
        made = sorted(self._made.items())
        return hashlib.sha256(msgspec.json.encode(self.tree) + repr(made).encode()).hexdigest()[:16]


def renamed(
    manifest: Manifest,
    rules: Rules | None,
    changes: Changes | None = None,
    migrations: Sequence[Migration] = (),
    made: Mapping[str, VirtualArray] | None = None,
) -> View:
    """Raises InvalidStateError for rules that match nothing, lead to one name twice, or do not fit the tensors.

    ``migrations`` come before ``rules``; theirs may match nothing. ``made``: arrays that the tree names, though the
    manifest has only what they are made of.
    """
    tree = manifest.document.tree
    changes = changes or Changes()
    if rules is None and not migrations:
        return View(manifest, tree, made or {}, changes)
    state = Moves(manifest, [Leaf(path, path, node) for path, node in leaves(tree)], made or {})
    for migration in migrations:
        try:
            for rule in listed(migration.make_rules()):
                state.apply(rule, may_be_idle=True)
        except InvalidStateError as error:
            raise InvalidStateError(f"migration {migration}: {error}") from None
    for rule in listed(rules) if rules is not None else ():
        state.apply(rule)
    grown = regrow(tree, [(leaf.path, leaf.old, leaf.node) for leaf in state.leaves])
    return View(manifest, grown, state.made, changes, migrations)


def describe_rules(rules: Rules | None, view: View) -> str:
    """For the comparison between ranks. Functions cannot be compared, but what comes of them can."""
    if rules is None and not view.migrations:
        return "no rename"
    rename = [] if rules is None else listed(rules)
    migrated = f"migrations [{', '.join(map(str, view.migrations))}], " if view.migrations else ""
    return f"{migrated}rename=[{', '.join(map(shown, rename))[:300]}] (which comes to {view.digest()})"
