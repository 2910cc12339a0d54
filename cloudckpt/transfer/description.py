"""What a rank tells the coordinator of what it is about to save.

Its layout is all that it holds but bytes and plain values. It sends a digest of that, and the layout itself only where
it is asked for; values are sent on every save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import msgspec

from cloudckpt._cached import cached_property
from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values as plain
from cloudckpt.format.document import MeshEntry
from cloudckpt.plan.shard import PieceTable
from cloudckpt.plan.skeleton import SkeletonNode
from cloudckpt.plan.tree import LeafSpec, Tie
from cloudckpt.transfer.places import KeptSave


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """What all ranks must have called save() with alike. ``rules``: their digest."""

    url: str = ""
    step: int | None
    layout: str
    compression: str | None
    overwrite: bool
    values: str
    check_replicas: str
    chunk_bytes: int
    rules: str | None = None
    incremental: bool = False
    model_version: str | None = None


@dataclass(frozen=True, eq=False)
class RankLayout:
    """All that plans take of one rank's state. ``pieces`` are numbered as ``leaves``; ``matched``: numbers of rules."""

    skeleton: SkeletonNode
    leaves: tuple[LeafSpec, ...]
    pieces: PieceTable
    meshes: tuple[MeshEntry, ...]
    matched: tuple[int, ...] = ()

    def digest(self, options: SaveOptions) -> bytes:
        """Differs wherever another plan might come out, or another error."""
        planned = replace(options, url="", step=None, overwrite=False, incremental=False, model_version=None)
        found = blake2b(self.topology, digest_size=16)
        found.update(msgspec.json.encode([planned, self.matched]))
        return found.digest()

    @cached_property
    def topology(self) -> bytes:
        """A digest of what the rank holds, but for bytes and plain values."""
        found = blake2b(digest_size=16)
        leaves = [(*_leaf_fields(spec), spec.tie and _tie_fields(spec.tie)) for spec in self.leaves]
        found.update(msgspec.json.encode([self.skeleton, leaves, self.meshes]))
        for item in fields(PieceTable):
            column = getattr(self.pieces, item.name)
            found.update(msgspec.json.encode([item.name, None if column is None else column.shape]))
            if column is not None:
                found.update(column.astype("<i8").tobytes())
        return found.digest()


# The id is a function of the path, and exact where a path need not be JSON. Digests of content are no layout.
_leaf_fields = attrgetter(*[item.name for item in fields(LeafSpec) if item.name not in {"path", "tie"}])
_tie_fields = attrgetter(*[item.name for item in fields(Tie) if item.name != "digests"])


@dataclass(frozen=True, eq=False)
class Description:
    """A rank's part of the first round.

    ``values``: the plain values in tree order, as JSON each. ``ties``: what it holds of the arrays that are
    declared as tied, by leaf id. ``plans``: ids of the plans that the rank
    still has for its layout. ``layout``: None where the rank hopes that one of them will do.
    ``declared``: see `check_found`. ``kept``: the last save that an incremental one need not look up, see `reuse`.
    """

    options: SaveOptions
    digest: bytes
    values: tuple[bytes, ...]
    ties: Mapping[str, frozenset[Any]]
    metadata: plain.Node
    plans: tuple[str, ...]
    layout: RankLayout | None
    declared: Mapping[str, bool] = field(default_factory=dict)
    topology: bytes = b""
    kept: KeptSave | None = None

    def in_brief(self) -> Description:
        """Without the layout, if there is hope."""
        return replace(self, layout=None) if self.plans else self


def check_options(parts: Sequence[Description]) -> None:
    """Raises InvalidStateError unless all ranks were called alike."""
    options = parts[0].options
    for rank, part in enumerate(parts):
        if part.options != options:
            raise InvalidStateError(f"save() was called with {options} on rank 0 but {part.options} on rank {rank}")


def topology_of(parts: Sequence[Description]) -> str:
    """Equal where all ranks hold the same parts of the same tensors."""
    return blake2b(b"".join(part.topology for part in parts), digest_size=16).hexdigest()


def ties_of(parts: Sequence[Description]) -> dict[str, frozenset[Any]]:
    """What all ranks together hold of the arrays that are declared as tied."""
    found: dict[str, frozenset[Any]] = {}
    for part in parts:
        for name, digests in part.ties.items():
            found[name] = found.get(name, frozenset()) | digests
    return found
