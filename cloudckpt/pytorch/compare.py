"""The first half of a load, on one rank: its target is compared with what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cloudckpt.config import Config
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import TreePath, leaves
from cloudckpt.plan.changes import Cast, Changes, Resizes
from cloudckpt.plan.migrations import migrations_between
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.plan.view import describe_rules, renamed
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.progress import Progress
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.fill import match_state
from cloudckpt.pytorch.group import Group
from cloudckpt.pytorch.match import Match
from cloudckpt.pytorch.ranks import Ranks
from cloudckpt.pytorch.sharing import ExchangeMode, Groups, Prepared, Scope, describe, prepare
from cloudckpt.pytorch.wishes import Wish, pack_bits


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadCall:
    """What load() was called with. ``ties``: as for `match_state`."""

    state: Any
    url: str
    strict: bool
    cast: Cast
    exchange: ExchangeMode
    exchange_scope: Scope
    rules: ShardingRules | None
    rename: Rules | None
    model_version: str | None
    resize: Resizes | None
    groups: Groups | None
    allow_pickle: bool
    progress: Progress
    config: Config
    ties: bool = False


@dataclass(frozen=True, eq=False)
class Compared:
    """What a rank keeps of the comparison. ``stored``: all leaves, under the names that the target has.

    ``prepared``: None where something differs that no option forgives.
    """

    match: Match
    stored: Sequence[TreePath]
    migrated: list[str | None]
    prepared: Prepared | None


def compare(
    call: LoadCall,
    manifest: Manifest,
    where: str,
    describer: Describer,
    ranks: Group,
    *,
    read_bytes: int,
    made: Mapping[str, VirtualArray] | None = None,
) -> tuple[Compared, Wish]:
    """What this rank's target asks for, and what the others must know of it. Nothing is changed.

    ``made``: arrays that the manifest's tree names, though it has only what they are made of.
    """
    stored_version = manifest.document.model_version
    changes = Changes.of(call.cast, call.resize)
    migrations = migrations_between(stored_version, call.model_version, where)
    view = renamed(manifest, call.rename, changes, migrations, made)
    match = match_state(
        call.state,
        manifest,
        rank=ranks.rank,
        world_size=ranks.size,
        allow_pickle=call.allow_pickle,
        describer=describer,
        view=view,
        ties=call.ties,
    )
    prepared, sharing = None, None
    if match.problems.is_readable:
        prepared = prepare(manifest, match, ranks, call.groups, read_bytes=read_bytes)
        if call.exchange != "none" and isinstance(ranks, Ranks):
            sharing = describe(prepared, manifest, ranks)
    alike = {
        "url": call.url,
        "strict": call.strict,
        "exchange": call.exchange,
        "exchange_scope": call.exchange_scope,
        "rules": None if call.rules is None else call.rules.digest,
        "changes": str(changes),
        "rename": describe_rules(call.rename, view),
        **asdict(call.config),
    }
    stored = [path for path, _ in leaves(view.tree)]
    wish = Wish(
        asked=pack_bits(np.array([path in match.asked for path in stored], dtype=bool)),
        problems=match.problems,
        arguments=alike,
        has_objects=match.has_objects,
        matched=tuple(sorted(describer.matched)),
        patterns=frozenset(match.patterns),
        cast=match.cast,
        resized=match.resized,
        sharing=sharing,
        declared=match.declared,
        twins=match.twins,
    )
    migrated = [stored_version, *(step.to_version for step in migrations)] if migrations else []
    return Compared(match, stored, migrated, prepared), wish
