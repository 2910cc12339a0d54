"""Loading: manifest -> wanted boxes -> plan -> ranged reads -> verify, decode, place, pass on -> state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from cloudckpt import catalog
from cloudckpt._reading import Reading, ReadResult
from cloudckpt.config import Config
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.plan.changes import Cast, Resizes
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.plan.virtual import VirtualArray
from cloudckpt.progress import Progress
from cloudckpt.pytorch.compare import LoadCall, compare
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.fill import check_root
from cloudckpt.pytorch.group import Group, make_group
from cloudckpt.pytorch.ranks import Ranks
from cloudckpt.pytorch.sharing import ExchangeMode, Groups, Prepared, Scope, Shared, check_exchange, share
from cloudckpt.pytorch.ties import check_twins
from cloudckpt.pytorch.wishes import NOTHING_SHARED, Verdict, judge, unpack_bits
from cloudckpt.store.base import Store
from cloudckpt.store.closing import counted_and_closed
from cloudckpt.store.resolve import resolve, shown_url
from cloudckpt.telemetry import recorded, slowest
from cloudckpt.transfer.download import effective_read_bytes

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")


@dataclass(frozen=True)
class LoadReport:
    """What a load did, over all ranks.

    ``missing``: keys of the target that are not stored; ``unexpected``: stored keys that no rank
    asked for (dotted paths; both empty unless ``strict=False``). ``cast`` and ``resized``: dtypes and
    shapes that were changed on request, ``(stored, target)`` by dotted path. ``migrated``: the model versions that
    migrations led through, the stored one first; empty where none was needed. ``bytes_needed``: distinct stored
    bytes that the job wanted; ``bytes_fetched``: what it got from the store (a little more, since a read of
    neighbouring chunks takes the ZIP headers between them along); ``bytes_sent``: what ranks passed on.
    ``num_requests`` counts the manifest's, too. ``seconds``: by stage ("manifest", "compare", "plan", "read"), of the
    slowest rank.
    ``exchange``: how chunks were passed on ("none", "broadcast", "alltoall", "broadcast+alltoall"),
    ``exchange_reason``: and why.
    """

    step: int | None
    missing: list[str]
    unexpected: list[str]
    bytes_needed: int
    bytes_fetched: int
    bytes_sent: int
    num_requests: int
    seconds: dict[str, float] = field(default_factory=dict)
    exchange: str = "none"
    exchange_reason: str = ""
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    migrated: list[str | None] = field(default_factory=list)


@dataclass(frozen=True)
class Finder(Generic[K]):
    """How a stored state is found: ``read`` on the coordinator only, ``describe`` of what it gave on every rank.

    ``describe`` returns the manifest, and arrays that its tree names though it has only what they are made of.
    ``check`` raises InvalidStateError for targets that cannot be filled from there.
    """

    read: Callable[[Store], K]
    describe: Callable[[K, str], tuple[Manifest, Mapping[str, VirtualArray]]]
    check: Callable[[Any], None] = check_root


CHECKPOINT = Finder(catalog.read_manifest_bytes, lambda data, url: (decode_manifest(data, url), {}))


@dataclass(frozen=True, eq=False)
class _Source:
    """What a rank makes before it knows what is stored."""

    store: Store
    describer: Describer


def load(
    state: Any,
    url: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: Cast = False,
    exchange: ExchangeMode = "auto",
    exchange_scope: Scope = "world",
    rules: ShardingRules | None = None,
    rename: Rules | None = None,
    model_version: str | None = None,
    resize: Resizes | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    groups: Groups | None = None,
    allow_pickle: bool = False,
    progress: Progress = None,
    config: Config | None = None,
) -> LoadReport:
    """Fill ``state`` in place from the checkpoint at ``url``. Collective over ``group`` (default: all ranks).

    Tensors and arrays are filled where they are; plain values are replaced in their containers;
    objects get ``load_state_dict``. The layout of the targets need not be that of the job that
    saved; ``rules`` say which part of the whole plain targets are. Everything is compared before
    anything is changed: MismatchError lists all differences over all ranks. ``strict=False`` forgives
    missing and unexpected keys, nothing else. Nothing is resized, broadcast or cast unasked.

    ``rename``: rules that turn the stored state into one of other names and other cuts, see
    `cloudckpt.plan.rename`. ``model_version``: of the target; where the checkpoint was saved as another one,
    the rules of the migrations that lead from there to here (`cloudckpt.migration`) come first. ``cast=True``:
    bfloat16, float16, float32 and float64 may become each other, with the values of ``Tensor.to``; names, such as
    ``"float8_e4m3fn"``, allow these types, too. ``resize``: by pattern, a fill value, None or a `Resize`: the stored
    tensor may have other extents. All four must be equal on all ranks.

    ``exchange``: "auto" reads each stored byte from the store once, and passes it on to all ranks that
    want it, whole chunks to many ranks by broadcast, and parts one by one; "broadcast" and "alltoall"
    prefer the one or force the other; "none" lets every rank read what it wants. ``exchange_scope="node"``
    reads once per node instead, for links between nodes that are slower than the store. ``groups``: process
    groups by their global ranks that may be used; those of the targets' device meshes are known. Others that
    are needed are made, and destroyed at the end.

    Every chunk that is read is verified before it is passed on. If reading fails half-way (StoreError,
    CorruptChunkError, RankError), tensors may have been filled in part, plain values not at all: do not train on it.
    """
    config = config or Config()
    ranks = make_group(group, config.rank_timeout_s)
    call = LoadCall(
        state=state,
        url=shown_url(url),
        strict=strict,
        cast=cast,
        exchange=exchange,
        exchange_scope=exchange_scope,
        rules=rules,
        rename=rename,
        model_version=model_version,
        resize=resize,
        groups=groups,
        allow_pickle=allow_pickle,
        progress=progress,
        config=config,
    )
    return run_load(call, ranks, url, storage_options, CHECKPOINT)


def run_load(
    call: LoadCall,
    ranks: Group,
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    finder: Finder[K],
) -> LoadReport:
    """`load` of what ``finder`` finds at ``url``. Collective over ``ranks``."""
    config, opened = call.config, list[Store]()

    def begin() -> tuple[_Source, None]:
        check_exchange(call.exchange, call.exchange_scope)
        describer = Describer(call.rules, ranks.rank, ranks.size)
        finder.check(call.state)
        opened.append(resolve(url, storage_options, config))
        return _Source(opened[0], describer), None

    with (
        recorded("load", call.url, ranks.rank, ranks.size) as recorder,
        counted_and_closed(opened, recorder),
    ):
        with recorder.stage("manifest"):
            source, found = _round(ranks, begin, lambda own, _: finder.read(own.store))
            manifest, made = finder.describe(found, source.store.url)
        recorder.step = manifest.document.step
        with recorder.stage("compare"):
            compared, verdict = _round(
                ranks,
                lambda: compare(
                    call,
                    manifest,
                    source.store.url,
                    source.describer,
                    ranks,
                    read_bytes=effective_read_bytes(config),
                    made=made,
                ),
                lambda own, wishes: judge(
                    wishes,
                    own.stored,
                    source.store.url,
                    strict=call.strict,
                    rules=call.rules,
                    resize=call.resize,
                    check_twins=lambda twins: check_twins(source.store, manifest, twins),
                ),
            )
        assert compared.prepared is not None, "judge() raises where it is"
        with recorder.stage("plan"):
            shared = _share(call, ranks, compared.prepared, verdict)
        reading = Reading(config, call.progress, ranks, source.store, manifest, compared.prepared, shared)
        report = ranks.round(
            lambda: reading.run(recorder),
            lambda results: report_of(manifest, verdict, shared, results),
            is_last=not verdict.has_objects,
        )
        report = replace(report, migrated=compared.migrated)

        @recorder.stage("finish")
        def finish() -> None:
            compared.match.finish()

        if verdict.has_objects:  # load_state_dict() may fail on one rank only
            return ranks.round(finish, lambda _: report, is_last=True)
        finish()
        return report


def _round(ranks: Group, part: Callable[[], tuple[K, T]], combine: Callable[[K, Sequence[T]], R]) -> tuple[K, R]:
    """A round of which each rank keeps something for itself: the first of what ``part`` gives.

    ``combine`` gets what the coordinator keeps, too.
    """
    kept: list[K] = []

    def tell() -> T:
        own, told = part()
        kept.append(own)
        return told

    outcome = ranks.round(tell, lambda parts: combine(kept[0], parts))
    return kept[0], outcome


def _share(call: LoadCall, ranks: Group, prepared: Prepared, verdict: Verdict) -> Shared | None:
    """The plan to read each byte once; None where each rank reads what it wants."""
    if verdict.agreement is None:
        return None
    assert isinstance(ranks, Ranks)
    half = call.config.memory_bytes // 2
    return share(ranks, prepared, verdict.agreement, call.exchange, call.exchange_scope, buffer_bytes=half)


def report_of(manifest: Manifest, verdict: Verdict, shared: Shared | None, results: Sequence[ReadResult]) -> LoadReport:
    """On the coordinator."""
    num_chunks = manifest.document.chunks.count
    touched = np.zeros(num_chunks, dtype=bool)
    for result in results:
        touched |= unpack_bits(result.touched, num_chunks)
    reason = verdict.reason
    if verdict.agreement is not None:
        reason = NOTHING_SHARED if shared is None else "chunks are wanted by several ranks"
    return LoadReport(
        step=manifest.document.step,
        missing=verdict.missing,
        unexpected=verdict.unexpected,
        bytes_needed=int(manifest.columns.nbytes[touched].sum()),
        bytes_fetched=sum(r.bytes_fetched for r in results),
        bytes_sent=sum(r.bytes_sent for r in results),
        num_requests=sum(r.num_requests for r in results),
        seconds=slowest([result.seconds for result in results]),
        exchange="none" if shared is None else shared.plan.kind,
        exchange_reason=reason,
        cast=verdict.cast,
        resized=verdict.resized,
    )
