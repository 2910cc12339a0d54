"""Loading: manifest -> wanted boxes -> plan -> ranged reads -> verify, decode, place -> state."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import InvalidStateError, MismatchError
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.format.tree import TreePath, leaves, path_text
from cloudckpt.plan.changes import Cast, Changes, Resizes
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.rename import Rules, View, describe_rules, renamed
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.fill import Match, Problems, check_root, match_state
from cloudckpt.pytorch.group import Group, make_group
from cloudckpt.pytorch.targets import ChunkPlaces, Targets
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.download import download, effective_read_bytes

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class LoadReport:
    """What a load did, over all ranks.

    ``missing``: keys of the target that are not stored; ``unexpected``: stored keys that no rank
    asked for (dotted paths; both empty unless ``strict=False``). ``cast`` and ``resized``: dtypes and
    shapes that were changed on request, ``(stored, target)`` by dotted path. ``bytes_needed``: distinct stored
    bytes that the job wanted; ``bytes_fetched``: what it got from the store; ``bytes_sent``: what
    ranks passed on. ``num_requests`` counts the manifest's, too. ``seconds``: by stage, of the slowest rank.
    """

    step: int | None
    missing: list[str]
    unexpected: list[str]
    bytes_needed: int
    bytes_fetched: int
    bytes_sent: int
    num_requests: int
    seconds: dict[str, float] = field(default_factory=dict)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Wish:
    """One rank's part of the comparison. ``asked``: a bit for every stored leaf, in tree order."""

    asked: bytes
    problems: Problems
    arguments: tuple[str, bool, str, str]
    has_objects: bool
    cast: dict[str, tuple[str, str]]
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    patterns: frozenset[str]


@dataclass(frozen=True)
class _Verdict:
    """What ``strict=False`` forgives, what is changed on request, and whether any rank has objects to load into."""

    missing: list[str]
    unexpected: list[str]
    has_objects: bool
    cast: dict[str, tuple[str, str]]
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class _Result:
    """One rank's part of the reading. ``touched``: a bit for every chunk."""

    touched: bytes
    bytes_fetched: int
    num_requests: int
    seconds: dict[str, float]


def load(
    state: Any,
    url: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: Cast = False,
    exchange: Literal["auto", "none"] = "auto",
    rules: None = None,
    rename: Rules | None = None,
    resize: Resizes | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    allow_pickle: bool = False,
    progress: Progress = None,
    config: Config | None = None,
) -> LoadReport:
    """Fill ``state`` in place from the checkpoint at ``url``. Collective over ``group`` (default: all ranks).

    Tensors and arrays are filled where they are; plain values are replaced in their containers;
    objects get ``load_state_dict``. The layout of the targets need not be that of the job that
    saved. Everything is compared before anything is changed: MismatchError lists all differences
    over all ranks. ``strict=False`` forgives missing and unexpected keys, nothing else. Nothing is
    resized, broadcast or cast unasked.

    ``rename``: rules that turn the stored state into one of other names and other cuts, see
    `cloudckpt.plan.rename`. ``cast=True``: bfloat16, float16, float32 and float64 may become each
    other, with the values of ``Tensor.to``; names, such as ``"float8_e4m3fn"``, allow these types,
    too. ``resize``: by pattern, a fill value, None or a `Resize`: the stored tensor may have other
    extents. All three must be equal on all ranks.

    Every chunk that is read is verified. If reading fails half-way (StoreError, CorruptChunkError,
    RankError), tensors may have been filled in part, plain values not at all: do not train on it.
    """
    config = config or Config()
    ranks = make_group(group, config.rank_timeout_s)
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    opened: list[Store] = []

    def begin() -> None:
        _check_options(exchange, rules)
        check_root(state)
        opened.append(resolve(url, storage_options, config))

    try:
        data = ranks.round(begin, lambda _: catalog.read_manifest_bytes(opened[0]))
        store = opened[0]
        manifest = decode_manifest(data, store.url)
        seconds["manifest"] = time.perf_counter() - start
        views: list[View] = []
        matches: list[Match] = []

        def compare() -> _Wish:
            changes = Changes.of(cast, resize)
            view = renamed(manifest, rename, changes)
            match = match_state(
                state,
                manifest,
                rank=ranks.rank,
                world_size=ranks.size,
                allow_pickle=allow_pickle,
                view=view,
            )
            views.append(view)
            matches.append(match)
            asked = np.array([path in match.asked for path, _ in leaves(view.tree)], dtype=bool)
            return _Wish(
                np.packbits(asked).tobytes(),
                match.problems,
                (os.fspath(url), strict, str(changes), describe_rules(rename, view)),
                match.has_objects,
                match.cast,
                match.resized,
                frozenset(match.patterns),
            )

        def judge(wishes: Sequence[_Wish]) -> _Verdict:
            _check_alike(wishes, resize)
            return _judge(wishes, [path for path, _ in leaves(views[0].tree)], store.url, strict)

        verdict = ranks.round(compare, judge)
        report = _read(ranks, store, manifest, matches[0], progress, config, seconds)
        report = replace(
            report,
            missing=verdict.missing,
            unexpected=verdict.unexpected,
            cast=verdict.cast,
            resized=verdict.resized,
        )

        def finish() -> None:
            matches[0].finish()

        if verdict.has_objects:  # load_state_dict() may fail on one rank only
            return ranks.round(finish, lambda _: report)
        finish()
        return report
    finally:
        for store in opened:
            store.close()


def _check_options(exchange: str, rules: object) -> None:
    if exchange not in ("auto", "none"):
        raise InvalidStateError(f"exchange must be 'auto' or 'none' in this version, not {exchange!r}")
    if rules is not None:
        raise InvalidStateError("rules are not supported by this version")


def _check_alike(wishes: Sequence[_Wish], resize: Resizes | None) -> None:
    """On the coordinator: all ranks were called alike, and every pattern names something on one of them."""
    for rank, wish in enumerate(wishes):
        if wish.arguments != wishes[0].arguments:
            raise InvalidStateError(
                f"load() was called with {wishes[0].arguments} on rank 0 but {wish.arguments} on rank {rank}"
            )
    idle = [pattern for pattern in resize or () if not any(pattern in wish.patterns for wish in wishes)]
    if idle:
        raise InvalidStateError(f"resize: nothing in the target matches {', '.join(map(repr, idle))}")


def _judge(wishes: Sequence[_Wish], stored: list[TreePath], where: str, strict: bool) -> _Verdict:
    """On the coordinator: all ranks' differences at once."""
    asked = np.zeros(len(stored), dtype=bool)
    problems = Problems()
    for wish in wishes:
        asked |= _unpack(wish.asked, len(stored))
        problems.missing.extend(wish.problems.missing)
        problems.shapes.update(wish.problems.shapes)
        problems.dtypes.update(wish.problems.dtypes)
        problems.kinds.update(wish.problems.kinds)
    problems.missing = list(dict.fromkeys(problems.missing))
    unexpected = [path_text(path) for path, was_asked in zip(stored, asked, strict=True) if not was_asked]
    forgiven = not strict and not (problems.shapes or problems.dtypes or problems.kinds)
    if forgiven or not (problems.missing or unexpected or problems.shapes or problems.dtypes or problems.kinds):
        return _Verdict(
            problems.missing,
            unexpected,
            any(wish.has_objects for wish in wishes),
            {path: dtypes for wish in wishes for path, dtypes in wish.cast.items()},
            {path: shapes for wish in wishes for path, shapes in wish.resized.items()},
        )
    raise _mismatch(problems, unexpected, where, strict)


def _mismatch(problems: Problems, unexpected: list[str], where: str, strict: bool) -> MismatchError:
    lines = [f"the target does not fit the checkpoint at {where}:"]
    if strict or problems.missing or unexpected:
        lines += [f"  missing (asked for, not stored): {path}" for path in problems.missing]
        lines += [f"  unexpected (stored, not asked for): {path}" for path in unexpected]
    for what, found in (("shape", problems.shapes), ("dtype", problems.dtypes), ("kind", problems.kinds)):
        lines += [
            f"  {what}: {path} is {stored} in the checkpoint, {own} in the target"
            for path, (stored, own) in found.items()
        ]
    shown = lines[:60] + ([f"  ... and {len(lines) - 60} more"] if len(lines) > 60 else [])
    return MismatchError(
        "\n".join(shown),
        missing=problems.missing,
        unexpected=unexpected,
        shapes=problems.shapes,
        dtypes=problems.dtypes,
        kinds=problems.kinds,
    )


def _unpack(bits: bytes, count: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count).astype(bool)


def _read(
    ranks: Group,
    store: Store,
    manifest: Manifest,
    match: Match,
    progress: Progress,
    config: Config,
    seconds: dict[str, float],
) -> LoadReport:
    num_chunks = manifest.document.chunks.count

    def fetch() -> _Result:
        start = time.perf_counter()
        targets = Targets(match.wants)
        plan = plan_load(StoredChunks.of(manifest), [targets.table], read_bytes=effective_read_bytes(config))
        reads = plan.rank(0)
        places = ChunkPlaces(manifest, targets, reads.parts)
        seconds["plan"] = time.perf_counter() - start
        total = sum(read.nbytes for read in reads.reads)
        before = store.counts
        with start_progress(progress, "load", total, show=ranks.rank == 0) as advance:
            download(
                store, manifest, reads.reads, places.open_sink, config=config, cancel=ranks.cancel, advance=advance
            )
        seconds["read"] = time.perf_counter() - start - seconds["plan"]
        counts = store.counts
        touched = np.zeros(num_chunks, dtype=bool)
        touched[reads.parts.chunk] = True
        fetched = counts.bytes_fetched - before.bytes_fetched
        return _Result(np.packbits(touched).tobytes(), fetched, counts.requests, seconds)

    def summarise(results: Sequence[_Result]) -> LoadReport:
        touched = np.zeros(num_chunks, dtype=bool)
        for result in results:
            touched |= _unpack(result.touched, num_chunks)
        stages = {stage: max(r.seconds[stage] for r in results) for stage in results[0].seconds}
        return LoadReport(
            step=manifest.document.step,
            missing=[],
            unexpected=[],
            bytes_needed=int(manifest.columns.nbytes[touched].sum()),
            bytes_fetched=sum(r.bytes_fetched for r in results),
            bytes_sent=0,
            num_requests=sum(r.num_requests for r in results),
            seconds=stages,
        )

    return ranks.round(fetch, summarise)
