"""One save from what the ranks hold to the commit: plan -> upload -> receipts -> manifest."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, RankError, StoreError
from cloudckpt.format import values as plain
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.manifest import Manifest
from cloudckpt.leases import HeldLease
from cloudckpt.plan.names import check_found
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.digest import Digests, compare_digests, shard_digests
from cloudckpt.pytorch.group import Group
from cloudckpt.pytorch.pause import paused_gc
from cloudckpt.pytorch.scratch import Scratch
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.pytorch.state import RankState
from cloudckpt.store.base import Store
from cloudckpt.store.closing import counted_and_closed
from cloudckpt.store.resolve import resolve, shown_url
from cloudckpt.telemetry import Recorder, recorded, slowest
from cloudckpt.transfer.description import Description, RankLayout, SaveOptions, check_options
from cloudckpt.transfer.job import ArrayPlan, Blueprint, assemble
from cloudckpt.transfer.places import Places
from cloudckpt.transfer.planning import Assignment, Planner, RankPlan
from cloudckpt.transfer.reuse import LastSaves, Reuse
from cloudckpt.transfer.upload import ChunkWrite, UploadReceipt, upload


@dataclass(frozen=True)
class Commit:
    """A checkpoint that exists. ``nbytes``: stored bytes of its chunks; ``num_requests``: those of all ranks.

    ``nbytes_new``: stored bytes of the chunks that this save wrote; the others were there in other steps.
    ``in_fallback``: a `Checkpointer` could not reach its run's store, and has it wait elsewhere.
    ``seconds``: by stage, of the slowest rank. "describe": taking the state apart, and planning; "stage": the private
    copy of a background save; "upload"; "commit"; "wait": for other ranks.
    """

    url: str
    commit_id: str
    step: int | None
    nbytes: int
    num_chunks: int
    num_objects: int
    num_requests: int = 0
    nbytes_new: int = 0
    in_fallback: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What one rank puts into a save. All but the memory of ``state.shards`` is plain data of its own.

    ``values``: the plain values of the state, in the order of ``layout.skeleton``. ``seconds``: what was spent on it
    before the save was run, by stage.
    """

    options: SaveOptions
    state: RankState
    layout: RankLayout
    values: Sequence[plain.Node]
    metadata: plain.Node
    rules: ShardingRules | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Lead:
    """What the coordinator has of a save beside its own part. ``run``: of an incremental save."""

    blueprint: Blueprint
    lease: HeldLease
    run: Store | None


@dataclass(frozen=True, eq=False)
class _Report:
    """One rank's part of the second round."""

    receipt: UploadReceipt
    digests: Digests
    num_requests: int


def run_save(
    ranks: Group,
    prepare: Callable[[], Prepared],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None,
    progress: Progress,
    config: Config,
    find_branch: Callable[[], int] = lambda: 0,
) -> Commit:
    """Write what every rank has prepared, and commit it. Collective over ``ranks``.

    ``prepare`` runs in the first round, so that its failure on one rank is heard by all. The memory of the
    shards must not change before this returns. ``find_branch``: for the manifest; asked on the coordinator.
    Raises what `cloudckpt.save` raises.
    """
    with recorded("save", shown_url(url), ranks.rank, ranks.size) as recorder:
        return _run(
            ranks,
            prepare,
            url,
            recorder,
            storage_options=storage_options,
            progress=progress,
            config=config,
            find_branch=find_branch,
        )


def _run(
    ranks: Group,
    prepare: Callable[[], Prepared],
    url: str | os.PathLike[str],
    recorder: Recorder,
    *,
    storage_options: Mapping[str, Any] | None,
    progress: Progress,
    config: Config,
    find_branch: Callable[[], int],
) -> Commit:
    planner, last_saves = ranks.kept(Planner), ranks.kept(LastSaves)
    opened: list[Store] = []
    held: list[tuple[Prepared, Description]] = []
    reuses: list[Reuse] = []  # of an incremental save
    leads: list[_Lead] = []  # on the coordinator

    @recorder.stage("describe")
    def describe() -> Description:
        opened.append(resolve(url, storage_options, config))
        prepared = prepare()
        options = replace(prepared.options, url=os.fspath(url))
        with paused_gc():
            description = planner.describe(options, prepared.layout, prepared.values, prepared.metadata)
        description = replace(description, declared=prepared.state.declared)
        if options.incremental:
            reuses.append(Reuse(url, last_saves))
            description = replace(description, kept=reuses[0].kept)
        recorder.step, recorder.earlier = options.step, prepared.seconds
        held.append((prepared, description))
        return description.in_brief()

    @recorder.stage("describe")
    def assign(parts: Sequence[Description]) -> Assignment | None:
        options, rules = held[0][1].options, held[0][0].rules
        check_options(parts)
        catalog.check_absent(opened[0], overwrite=options.overwrite)
        found = planner.assign(parts, rules)
        if found is None:
            return None
        check_found(part.declared for part in parts)
        assignment, blueprint = found
        for note in blueprint.notes:
            warnings.warn(note, stacklevel=2)
        lease = HeldLease(opened[0], assignment.attempt)
        blueprint = replace(blueprint, branch=find_branch())
        if not reuses:
            leads.append(_Lead(blueprint, lease, None))
            return assignment
        run = resolve(reuses[0].run, storage_options, config)
        opened.append(run)
        leads.append(_Lead(blueprint, lease, run))
        kept = [part.kept for part in parts]
        return replace(assignment, base=reuses[0].choose(run, lease, kept, assignment.plan_id, blueprint.arrays))

    with counted_and_closed(opened, recorder), _released(leads):
        # The second time is for ranks that hoped for a plan which others cannot use.
        with recorder.stage("wait"):
            assignment = ranks.round(describe, assign) or ranks.round(lambda: held[0][1], assign)
        assert assignment is not None
        prepared, description = held[0]
        plan = planner.accept(assignment, description.digest, ranks.rank)
        return _write(
            ranks,
            opened[0],
            plan,
            prepared.state,
            description.options,
            recorder,
            lead=leads[0] if leads else None,
            reuse=reuses[0] if reuses else None,
            base=reuses[0].accept(assignment) if reuses else None,
            progress=progress,
            config=config,
        )


@contextlib.contextmanager
def _released(leads: Sequence[_Lead]) -> Iterator[None]:
    """Leases are given back, however the block is left."""
    try:
        yield
    finally:
        for lead in leads:
            lead.lease.release()


def _write(
    ranks: Group,
    store: Store,
    plan: RankPlan,
    state: RankState,
    options: SaveOptions,
    recorder: Recorder,
    *,
    lead: _Lead | None,
    reuse: Reuse | None,
    base: Places | None,
    progress: Progress,
    config: Config,
) -> Commit:
    """``lead``: on the coordinator. ``reuse``, ``base``: of an incremental save."""
    arrays = plan.arrays
    written: list[ObjectEntry] = []
    receipts: list[UploadReceipt] = []  # this rank's
    assembled: list[tuple[Manifest, int]] = []  # on the coordinator

    @recorder.stage("upload")
    def send() -> _Report:
        numbers = arrays.numbers
        shards = {numbers[i]: shard for i, shard in state.shards.items() if i in numbers}
        digests = shard_digests({number: shards[number] for number in plan.checked if number in shards})
        scratch = Scratch()
        total = sum(write.nbytes for write in plan.job.writes)
        with start_progress(progress, "save", total, show=ranks.rank == 0) as advance:
            receipt = upload(
                store,
                plan.job,
                lambda write: _read_chunk(arrays, shards, write, scratch),
                layout=options.layout,
                config=config,
                cancel=ranks.cancel,
                advance=advance,
                written=written,
                base=base,
            )
        receipts.append(receipt)
        return _Report(receipt, digests, store.counts.requests)

    def check(reports: Sequence[_Report]) -> None:
        assert lead is not None
        compare_digests([report.digests for report in reports], arrays.leaves)
        manifest = assemble(lead.blueprint, [report.receipt for report in reports])
        for note in reuse.notes(manifest) if reuse else ():
            warnings.warn(note, stacklevel=2)
        assembled.append((manifest, sum(report.num_requests for report in reports)))

    def publish(spent: Sequence[Mapping[str, float]]) -> Commit:
        assert lead is not None
        manifest, num_requests = assembled[0]
        before = store.counts.requests
        with recorder.stage("commit"), lead.lease.committing():
            catalog.commit(store, manifest, overwrite=options.overwrite)
        num_requests += store.counts.requests - before + (lead.run.counts.requests if lead.run else 0)
        return commit_of(manifest, store.url, num_requests, slowest([*spent, recorder.seconds]))

    try:
        with recorder.stage("wait"):
            ranks.round(send, check)
    except CloudckptError:
        remove_written(store, written)
        raise
    try:
        with recorder.stage("wait"):
            commit = ranks.round(lambda: recorder.seconds, publish, is_last=True)
    except AlreadyCommittedError:
        remove_written(store, written)
        raise
    if reuse is not None:
        manifest = assembled[0][0] if assembled else None
        reuse.remember(commit.commit_id, commit.step, receipts[0], manifest)
    return commit


def commit_of(manifest: Manifest, url: str, num_requests: int, seconds: Mapping[str, float] | None = None) -> Commit:
    document = manifest.document
    return Commit(
        url=url,
        commit_id=document.commit_id,
        step=document.step,
        nbytes=manifest.nbytes,
        num_chunks=document.chunks.count,
        num_objects=len(document.objects),
        num_requests=num_requests,
        nbytes_new=manifest.nbytes_new,
        seconds=dict(seconds or {}),
    )


def _read_chunk(arrays: ArrayPlan, shards: Mapping[int, LocalShard], write: ChunkWrite, scratch: Scratch) -> Bytes1D:
    array, number = arrays.locate(write.chunk)
    grid = arrays.chunks.grids[array]
    return shards[array].read(grid.box(number), grid.stored_shape(number), scratch)


def remove_written(store: Store, written: Sequence[ObjectEntry]) -> None:
    """Objects of a save that was not committed serve nobody. What cannot be removed now is left to the sweep."""
    keys = [entry.key for entry in written]
    with contextlib.suppress(StoreError, RankError):
        # Where the store is down every key would wait for its deadline: the first one tells.
        if keys and not store.delete(keys[:1]):
            store.delete(keys[1:])
