"""Loading: manifest -> wanted boxes -> plan -> ranged reads -> verify, decode, place, pass on -> state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import InvalidStateError
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.format.tree import TreePath, leaves
from cloudckpt.plan.changes import Cast, Changes, Resizes
from cloudckpt.plan.exchange import ROUND_BYTES
from cloudckpt.plan.migrations import migrations_between
from cloudckpt.plan.reads import RangeRead
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.plan.view import describe_rules, renamed
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.describe import Describer
from cloudckpt.pytorch.exchange import run_exchange
from cloudckpt.pytorch.fill import check_root, match_state
from cloudckpt.pytorch.group import Group, make_group
from cloudckpt.pytorch.match import Match
from cloudckpt.pytorch.ranks import Ranks
from cloudckpt.pytorch.sharing import ExchangeMode, Groups, Prepared, Scope, Shared, describe, prepare, share
from cloudckpt.pytorch.targets import ChunkPlaces
from cloudckpt.pytorch.wishes import NOTHING_SHARED, Verdict, Wish, judge, pack_bits, unpack_bits
from cloudckpt.store.base import Store
from cloudckpt.store.closing import counted_and_closed
from cloudckpt.store.paths import mask
from cloudckpt.store.resolve import resolve
from cloudckpt.telemetry import Recorder, recorded, slowest
from cloudckpt.transfer.download import Admit, OpenSink, download, effective_read_bytes

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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    """What load() was called with."""

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


@dataclass(frozen=True, eq=False)
class _Source:
    """What a rank makes before it knows what is stored."""

    store: Store
    describer: Describer


@dataclass(frozen=True, eq=False)
class _Compared:
    """What a rank keeps of the comparison. ``stored``: all leaves, under the names that the target has.

    ``prepared``: None where something differs that no option forgives.
    """

    match: Match
    stored: Sequence[TreePath]
    migrated: list[str | None]
    prepared: Prepared | None


@dataclass(frozen=True)
class _Result:
    """One rank's part of the reading. ``touched``: a bit for every chunk."""

    touched: bytes
    bytes_fetched: int
    bytes_sent: int
    num_requests: int
    seconds: dict[str, float]


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
    request = _Request(
        state=state,
        url=os.fspath(url),
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
    opened: list[Store] = []

    def begin() -> tuple[_Source, None]:
        _check_options(exchange, exchange_scope)
        describer = Describer(rules, ranks.rank, ranks.size)
        check_root(state)
        opened.append(resolve(url, storage_options, config))
        return _Source(opened[0], describer), None

    with (
        recorded("load", mask(request.url), ranks.rank, ranks.size) as recorder,
        counted_and_closed(opened, recorder),
    ):
        with recorder.stage("manifest"):
            source, data = _round(ranks, begin, lambda own, _: catalog.read_manifest_bytes(own.store))
            manifest = decode_manifest(data, source.store.url)
        recorder.step = manifest.document.step
        with recorder.stage("compare"):
            compared, verdict = _round(
                ranks,
                lambda: _compare(request, ranks, source, manifest),
                lambda own, wishes: judge(
                    wishes, own.stored, source.store.url, strict=strict, rules=rules, resize=resize
                ),
            )
        assert compared.prepared is not None, "judge() raises where it is"
        with recorder.stage("plan"):
            shared = _share(request, ranks, compared.prepared, verdict)
        read = _read(request, ranks, source.store, manifest, compared.prepared, shared, recorder, verdict)
        report = replace(read, migrated=compared.migrated)

        @recorder.stage("finish")
        def finish() -> None:
            compared.match.finish()

        if verdict.has_objects:  # load_state_dict() may fail on one rank only
            return ranks.round(finish, lambda _: report, is_last=True)
        finish()
        return report


def _check_options(exchange: str, scope: str) -> None:
    if exchange not in ("auto", "none", "broadcast", "alltoall"):
        raise InvalidStateError(f"exchange must be 'auto', 'none', 'broadcast' or 'alltoall', not {exchange!r}")
    if scope not in ("world", "node"):
        raise InvalidStateError(f"exchange_scope must be 'world' or 'node', not {scope!r}")


def _round(ranks: Group, part: Callable[[], tuple[K, T]], combine: Callable[[K, Sequence[T]], R]) -> tuple[K, R]:
    """A round of which each rank keeps something for itself: the first of what ``part`` gives.

    ``combine`` gets what the coordinator keeps, too.
    """
    kept: list[K] = []

    def told() -> T:
        own, told = part()
        kept.append(own)
        return told

    outcome = ranks.round(told, lambda parts: combine(kept[0], parts))
    return kept[0], outcome


def _compare(request: _Request, ranks: Group, source: _Source, manifest: Manifest) -> tuple[_Compared, Wish]:
    """What this rank's target asks for, and what the others must know of it. Nothing is changed."""
    config, rules = request.config, request.rules
    stored_version = manifest.document.model_version
    changes = Changes.of(request.cast, request.resize)
    migrations = migrations_between(stored_version, request.model_version, source.store.url)
    view = renamed(manifest, request.rename, changes, migrations)
    match = match_state(
        request.state,
        manifest,
        rank=ranks.rank,
        world_size=ranks.size,
        allow_pickle=request.allow_pickle,
        describer=source.describer,
        view=view,
    )
    prepared, sharing = None, None
    if match.problems.is_readable:
        prepared = prepare(manifest, match, ranks, request.groups, read_bytes=effective_read_bytes(config))
        if request.exchange != "none" and isinstance(ranks, Ranks):
            sharing = describe(prepared, manifest, ranks)
    alike = {
        "url": request.url,
        "strict": request.strict,
        "exchange": request.exchange,
        "exchange_scope": request.exchange_scope,
        "rules": None if rules is None else rules.digest,
        "changes": str(changes),
        "rename": describe_rules(request.rename, view),
        **asdict(config),
    }
    stored = [path for path, _ in leaves(view.tree)]
    wish = Wish(
        asked=pack_bits(np.array([path in match.asked for path in stored], dtype=bool)),
        problems=match.problems,
        arguments=tuple(alike.items()),
        has_objects=match.has_objects,
        matched=tuple(sorted(source.describer.matched)),
        patterns=frozenset(match.patterns),
        cast=match.cast,
        resized=match.resized,
        sharing=sharing,
        declared=match.declared,
    )
    migrated = [stored_version, *(step.to_version for step in migrations)] if migrations else []
    return _Compared(match, stored, migrated, prepared), wish


def _share(request: _Request, ranks: Group, prepared: Prepared, verdict: Verdict) -> Shared | None:
    """The plan to read each byte once; None where each rank reads what it wants."""
    if verdict.agreement is None:
        return None
    assert isinstance(ranks, Ranks)
    half = request.config.memory_bytes // 2
    return share(ranks, prepared, verdict.agreement, request.exchange, request.exchange_scope, buffer_bytes=half)


def _read(
    request: _Request,
    ranks: Group,
    store: Store,
    manifest: Manifest,
    prepared: Prepared,
    shared: Shared | None,
    recorder: Recorder,
    verdict: Verdict,
) -> LoadReport:
    """Fill all tensors, and tell what that took on all ranks."""
    num_chunks = manifest.document.chunks.count

    def fetch() -> _Result:
        before = store.counts
        with recorder.stage("read"):
            sent = _fill(request, ranks, store, manifest, prepared, shared)
        counts = store.counts
        touched = np.zeros(num_chunks, dtype=bool)
        touched[prepared.alone.parts.chunk] = True
        fetched = counts.bytes_fetched - before.bytes_fetched
        return _Result(pack_bits(touched), fetched, sent, counts.requests, recorder.seconds)

    def summarise(results: Sequence[_Result]) -> LoadReport:
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

    return ranks.round(fetch, summarise, is_last=not verdict.has_objects)


def _fill(
    request: _Request,
    ranks: Group,
    store: Store,
    manifest: Manifest,
    prepared: Prepared,
    shared: Shared | None,
) -> int:
    """Returns the bytes that were passed on."""
    config = request.config
    transfer = partial(_transfer, store, manifest, ranks=ranks, progress=request.progress)
    if shared is None:
        places = ChunkPlaces(manifest, prepared.targets, prepared.alone.parts)
        transfer(prepared.alone.reads, places.open_sink, config=config, staged_bytes=places.staged_bytes)
        return 0
    # One half of the budget for what is being read, the other for what is being passed on.
    half = replace(config, memory_bytes=max(1, config.memory_bytes // 2))
    return run_exchange(
        manifest,
        prepared.targets,
        shared,
        lambda it: transfer(it.reads, it.open_sink, config=half, admit=it.admit, staged_bytes=it.places.staged_bytes),
        # Reads end with their rounds: several a round, so that enough are in flight.
        read_bytes=min(ROUND_BYTES // 2, effective_read_bytes(half)),
    )


def _transfer(
    store: Store,
    manifest: Manifest,
    reads: Sequence[RangeRead],
    open_sink: OpenSink,
    *,
    ranks: Group,
    progress: Progress,
    config: Config,
    staged_bytes: Callable[[Sequence[int]], int],
    admit: Admit | None = None,
) -> None:
    total = sum(read.nbytes for read in reads)
    with start_progress(progress, "load", total, show=ranks.rank == 0) as advance:
        download(
            store,
            manifest,
            reads,
            open_sink,
            config=config,
            cancel=ranks.cancel,
            advance=advance,
            admit=admit,
            staged_bytes=staged_bytes,
        )
