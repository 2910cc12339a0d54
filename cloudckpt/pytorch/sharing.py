"""What a rank must tell the others so that each stored byte is read once, and the plan that all make of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch.distributed as dist

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.manifest import Manifest
from cloudckpt.plan.exchange import MAX_GROUPS, ExchangePlan, plan_exchange
from cloudckpt.plan.reads import RankReads, StoredChunks, plan_load
from cloudckpt.plan.wants import Wants, decode_table, encode_table, table_digest
from cloudckpt.pytorch.connections import device_types
from cloudckpt.pytorch.group import Group
from cloudckpt.pytorch.links import Links, NamedSet, RankSet, offered_groups
from cloudckpt.pytorch.match import Match
from cloudckpt.pytorch.ranks import Ranks
from cloudckpt.pytorch.targets import Targets
from cloudckpt.pytorch.wishes import Agreement, Sharing, pack_bits

ExchangeMode = Literal["auto", "none", "broadcast", "alltoall"]
Scope = Literal["world", "node"]
Groups = Mapping[tuple[int, ...], dist.ProcessGroup]


FEW_CHUNKS = 2**15
"""Of so many, each rank tells which it wants, in 4 KiB: a load that shares nothing then needs no tables of wants."""


def check_exchange(exchange: str, scope: str) -> None:
    """Raises InvalidStateError for options that there are not."""
    if exchange not in ("auto", "none", "broadcast", "alltoall"):
        raise InvalidStateError(f"exchange must be 'auto', 'none', 'broadcast' or 'alltoall', not {exchange!r}")
    if scope not in ("world", "node"):
        raise InvalidStateError(f"exchange_scope must be 'world' or 'node', not {scope!r}")


@dataclass(frozen=True, eq=False)
class Prepared:
    """One rank's side of a load: what it fills, and what it would read by itself."""

    targets: Targets
    stored: StoredChunks
    alone: RankReads
    offered: Mapping[NamedSet, dist.ProcessGroup]


def prepare(manifest: Manifest, match: Match, ranks: Group, groups: Groups | None, *, read_bytes: int) -> Prepared:
    """``match`` must be without problems of shape, dtype or kind."""
    targets, stored = Targets(match.wants), StoredChunks.of(manifest)
    alone = plan_load(stored, [targets.table], read_bytes=read_bytes).rank(0)
    offered = offered_groups(match.meshes, groups, ranks.ranks) if isinstance(ranks, Ranks) else {}
    return Prepared(targets, stored, alone, offered)


def describe(prepared: Prepared, manifest: Manifest, ranks: Ranks) -> Sharing:
    """What the others must know of this rank."""
    owner = np.array([entry.rank for entry in manifest.objects], dtype=np.int64)
    chunks = np.unique(prepared.alone.parts.chunk)
    touched = np.zeros(len(prepared.stored.nbytes), dtype=bool)
    touched[chunks] = True
    written = np.nonzero(owner[manifest.columns.object] == ranks.rank)[0] if len(owner) else owner
    is_own = np.array_equal(written, chunks)
    nbytes: dict[str, int] = {}
    for field in prepared.targets.fields:
        nbytes[field.device.type] = nbytes.get(field.device.type, 0) + field.nbytes
    return Sharing(
        digest=table_digest(prepared.targets.table),
        touched=pack_bits(touched) if len(touched) <= FEW_CHUNKS else None,
        is_own=is_own and ranks.size == manifest.document.world_size,
        node=node_name(),
        device=max(nbytes, key=nbytes.__getitem__, default=None),
        serves=device_types(ranks.group()),
        groups=frozenset(prepared.offered),
    )


def node_name() -> str:
    """Equal for ranks of one node: what torchrun or Slurm says, else the name of the machine."""
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if name in os.environ:
            return f"{name}={os.environ[name]}"
    return socket.gethostname()


@dataclass(frozen=True, eq=False)
class Shared:
    """A plan with something to pass on, for the ranks of ``members``."""

    plan: ExchangePlan
    members: RankSet
    links: Links


def share(
    ranks: Ranks, prepared: Prepared, agreement: Agreement, mode: ExchangeMode, scope: Scope, *, buffer_bytes: int
) -> Shared | None:
    """Collective: tells every distinct table of wants once, and plans. None where no chunk is wanted twice."""
    told = ranks.round(
        lambda: encode_table(prepared.targets.table) if ranks.rank in agreement.tellers else None,
        lambda parts: [part for part in parts if part is not None],
    )
    planned: list[Shared | None] = []
    # In a round, since a rank that cannot plan must not leave the others waiting.
    ranks.round(
        lambda: planned.append(_planned(ranks, prepared, agreement, told, mode, scope, buffer_bytes)), lambda _: None
    )
    return planned[0]


def _planned(
    ranks: Ranks,
    prepared: Prepared,
    agreement: Agreement,
    told: Sequence[bytes],
    mode: ExchangeMode,
    scope: Scope,
    buffer_bytes: int,
) -> Shared | None:
    assert mode != "none"
    wants = Wants([decode_table(data) for data in told], np.array(agreement.table, dtype=np.int64))
    node = agreement.nodes[ranks.rank]
    members = tuple(rank for rank in range(ranks.size) if scope == "world" or agreement.nodes[rank] == node)
    everybody = tuple(range(ranks.size))
    device = agreement.device
    usable = sorted(item for item in agreement.groups if device in item[2])
    grouped = {own for own, _, _ in usable} | ({everybody} if device in device_types(ranks.group()) else set())
    if device != "cpu" and members not in grouped:
        device, usable, grouped = "cpu", [], set()  # a node without a group of its own on the device
    existing: dict[RankSet, dist.ProcessGroup] = {}
    for item in usable:
        if item in prepared.offered:
            existing.setdefault(item[0], prepared.offered[item])  # the first name counts, on every rank
    if everybody in grouped:
        existing[everybody] = ranks.group()
    # In numbers of the scope, which the plan uses. The same on all ranks, whether or not they are in a group.
    number = {rank: i for i, rank in enumerate(members)}
    free = {tuple(number[rank] for rank in own) for own in {*grouped, everybody} if set(own) <= set(members)}
    plan = plan_exchange(
        prepared.stored,
        wants.among(members),
        mode=mode,
        buffer_bytes=buffer_bytes,
        free_groups=free,
        max_groups=MAX_GROUPS if device == "cpu" else 0,
    )
    return Shared(plan, members, Links(ranks, device, existing)) if plan.num_rounds else None
