"""What comes of comparing a target state with what is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from cloudckpt.format.tree import Node, TreePath, is_array, leaves, path_text
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.subclass import kind_text, stored_parts
from cloudckpt.pytorch.ties import Twins

Finish = Callable[[], Any]
"""Puts plain values in place below; returns what now stands here."""


@dataclass
class Problems:
    """Differences between target and checkpoint, by dotted path; ``(stored, target)`` for the last three."""

    missing: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def is_readable(self) -> bool:
        """Whether there is nothing that no option forgives."""
        return not (self.shapes or self.dtypes or self.kinds)


@dataclass(eq=False)
class Match:
    """``wants``: (number of a stored array, shard to fill); several where a target is made of several arrays or boxes.

    ``asked``: the leaves of the (renamed) stored tree that the target has a place for. ``cast`` and
    ``resized``: ``(stored, target)`` dtypes and shapes, by dotted path, where they differ and may;
    ``patterns``: those of ``resize`` that name something in the target. ``meshes``: of the DTensors in it.
    ``declared``: see `TrainingState.declared`. ``twins``: of what is wanted for memory that is filled already.
    """

    wants: list[tuple[int, LocalShard]] = field(default_factory=list)
    asked: set[TreePath] = field(default_factory=set)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    patterns: set[str] = field(default_factory=set)
    declared: dict[str, bool] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    meshes: set[DeviceMesh] = field(default_factory=set)
    twins: list[Twins] = field(default_factory=list)
    finish: Finish = lambda: None
    has_objects: bool = False
    """Whether ``finish`` calls code of the caller's (``load_state_dict``, containers), which may fail."""

    def ask(self, node: Node, path: TreePath) -> None:
        """What is below has a place in the target, be it of the wrong kind: it is not unexpected."""
        self.asked.update(below for below, _ in leaves(node, path))

    def refuse(self, node: Node, path: TreePath, kind: str) -> None:
        """The target has something of another ``kind`` here."""
        self.ask(node, path)
        self.problems.kinds[path_text(path)] = (_describe(node), kind)


def _describe(node: Node) -> str:
    if is_array(node):
        return str(node["$"])
    if isinstance(node, list):
        return "list"
    if isinstance(node, dict):
        parts = stored_parts(node)
        return kind_text(parts) if parts is not None else str(node.get("$", "dict"))
    return type(node).__name__
