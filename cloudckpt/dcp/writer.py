"""torch.distributed.checkpoint's saves, written as checkpoints of this library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cloudckpt._write import Commit, remove_written
from cloudckpt.config import Config
from cloudckpt.dcp.commit import Draft, commit_draft, replaceable, sweep
from cloudckpt.dcp.handover import ask_attempt, ask_share, tell_attempt, tell_shares
from cloudckpt.dcp.keys import NOTES
from cloudckpt.dcp.layout import Share, lay_out, shares
from cloudckpt.dcp.place import checked_url, is_url, step_of
from cloudckpt.dcp.writing import RankReport, write_share
from cloudckpt.errors import CloudckptError, InvalidStateError
from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.keys import new_attempt, step_dir
from cloudckpt.plan.migrations import check_version
from cloudckpt.progress import Progress
from cloudckpt.pytorch.pause import paused_gc
from cloudckpt.pytorch.rounds import packed, unpacked
from cloudckpt.store.closing import counted_and_closed
from cloudckpt.store.resolve import resolve, shown_url
from cloudckpt.telemetry import recorded


@dataclass(frozen=True)
class Told:
    """What the coordinator puts into a rank's plan. ``share``: the packed `Share`, None where it is told elsewhere."""

    attempt: str
    rank: int
    share: bytes | None


_TAKEN: set[str] = set()
"""Attempts that this process has written for. A plan with one of them is one that a planner has kept."""


class StorageWriter(TorchStorageWriter):
    """A place for ``torch.distributed.checkpoint.save`` and ``async_save``; what is written there is a checkpoint.

    ``url``: as for `cloudckpt.save`; ``checkpoint_id`` of torch's functions, where given, comes before it. ``step``:
    recorded in the checkpoint; None takes it from a URL that ends in ``step-<number>``. ``storage_options``,
    ``layout``, ``compression``, ``metadata``, ``model_version``, ``progress``, ``config``: as for `cloudckpt.save`.

    ``overwrite``: as with torch's writers, a checkpoint at the same URL is replaced: it stays whole until the new one
    is, and changes into it in one step. False: AlreadyCommittedError before anything is written.

    ``allow_pickle``: values that are no plain data are pickled; without, they are an InvalidStateError.

    ``commit``: after a save, on the coordinator, what it has written; None on other ranks. ``save_id``: there, the
    attempt. An error on any rank is in the ``CheckpointException`` that torch raises on all of them; nothing is
    committed then.

    One object is for one save at a time, and can be used again. All ranks must make theirs alike.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        layout: Literal["packed", "zarr"] = "packed",
        compression: Literal["zstd"] | None = None,
        overwrite: bool = True,
        metadata: Mapping[str, Any] | None = None,
        model_version: str | None = None,
        allow_pickle: bool = False,
        progress: Progress = None,
        config: Config | None = None,
    ) -> None:
        super().__init__()
        if layout not in ("packed", "zarr"):
            raise InvalidStateError(f"layout must be 'packed' or 'zarr', not {layout!r}")
        if compression not in (None, "zstd"):
            raise InvalidStateError(f"compression must be None or 'zstd', not {compression!r}")
        if step is not None:
            step_dir(step)  # refuses what cannot name a step
        check_version(model_version)
        self._url = None if url is None else checked_url(url, "StorageWriter")
        self._step = step
        self._storage_options = storage_options
        self._layout = layout
        self._compression = compression
        self._overwrite = overwrite
        self._metadata = dict(metadata or {})
        if NOTES in self._metadata:
            raise InvalidStateError(f"metadata: the key {NOTES!r} is taken")
        self._model_version = model_version
        self._allow_pickle = allow_pickle
        self._progress = progress
        self._config = config or Config()
        self.commit: Commit | None = None
        self._rank = 0
        self._num_ranks = 0
        self.save_id: str | None = None
        self._attempt: str | None = None
        """On the coordinator: of a save that was begun, and not committed so far."""
        self._draft: Draft | None = None
        self._replaced: Sequence[str] = ()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        return self._url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._sweep()
        if checkpoint_id is not None:
            self._url = checked_url(checkpoint_id, "StorageWriter")

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._url, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002  # DCP's
        """The name ``kwargs`` is what DCP looks for before it tells the rank."""
        checked_url(self._url, "StorageWriter")
        self._sweep()
        if not kwargs.get("use_collectives", True):
            raise InvalidStateError(
                "with use_collectives=False every rank would commit a checkpoint of its own part at the same URL; "
                "leave it True, or save on one rank with no_dist=True"
            )
        self._rank = kwargs.get("rank") or 0
        self.commit = self._draft = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator. Nothing is written before it is known that this URL is free, or may be replaced."""
        url = checked_url(self._url, "StorageWriter")
        with closing(resolve(url, self._storage_options, self._config)) as store:
            self._replaced = replaceable(store, is_step=step_of(url) is not None, overwrite=self._overwrite)
        self._num_ranks = len(plans)
        self.save_id = self._attempt = attempt = new_attempt()
        if all(getattr(plan, "usable", True) for plan in plans):
            told = [packed(share) for share in self._plan(plans)]
            return [replace(p, storage_data=Told(attempt, r, told[r])) for r, p in enumerate(plans)]
        # The planner has kept plans, and only it knows them: in write_data() we have it at hand.
        if len(plans) > 1:
            tell_attempt(url, attempt)
        return [replace(plan, storage_data=Told(attempt, rank, None)) for rank, plan in enumerate(plans)]

    def _plan(self, plans: Sequence[SavePlan]) -> list[Share]:
        assert self._url is not None
        assert self._attempt is not None
        with paused_gc():
            arrays = lay_out(plans, chunk_bytes=self._config.chunk_bytes, compression=self._compression)
            self._draft = Draft(
                attempt=self._attempt,
                arrays=arrays,
                num_ranks=len(plans),
                step=step_of(self._url) if self._step is None else self._step,
                layout=self._layout,
                model_version=self._model_version,
                metadata=self._metadata,
            )
            return shares(arrays, self._url, self._attempt, len(plans))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        url = checked_url(self._url, "StorageWriter")
        share = self._share(plan, planner)
        _TAKEN.add(share.attempt)
        if share.url != url:
            raise InvalidStateError(
                f"rank {share.rank} saves to {shown_url(url)}, but rank 0 to {shown_url(share.url)}"
            )
        written: list[ObjectEntry] = []
        store = resolve(url, self._storage_options, self._config)
        with (
            recorded("save", store.url, share.rank, share.num_ranks) as recorder,
            counted_and_closed([store], recorder),
        ):
            try:
                report = write_share(
                    store,
                    share,
                    plan,
                    planner,
                    recorder,
                    layout=self._layout,
                    allow_pickle=self._allow_pickle,
                    progress=self._progress,
                    config=self._config,
                    written=written,
                )
            except BaseException:
                remove_written(store, written)
                raise
        future: Future[list[WriteResult]] = Future()
        nbytes = sum(entry.nbytes for entry in report.receipt.objects)
        # One for all items: what lies where is told by arrays of numbers.
        future.set_result([WriteResult(MetadataIndex(share.attempt), nbytes, packed(report))])
        return future

    def _share(self, plan: SavePlan, planner: SavePlanner) -> Share:
        told = plan.storage_data if isinstance(plan.storage_data, Told) else None
        if self._attempt is not None and self._draft is None:
            return self._planned_late(planner)
        if told is not None and told.share is not None and told.attempt not in _TAKEN:
            share = unpacked(told.share)
        else:
            attempt = told.attempt if told is not None and told.attempt not in _TAKEN else ask_attempt(self._url or "")
            if attempt is None or attempt in _TAKEN:
                raise InvalidStateError(
                    "the plan has lost its storage_data, with which storage tells the ranks what to write: "
                    "finish_plan() of a planner must keep it"
                )
            rank = self._rank if told is None else told.rank
            share = ask_share(attempt, rank, self._config.rank_timeout_s)
        assert isinstance(share, Share)
        return share

    def _planned_late(self, planner: SavePlanner) -> Share:
        """On the coordinator, where the planner has kept plans: it knows those of all ranks."""
        assert self._attempt is not None
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        try:
            plans = getattr(planner, "global_plan", None)
            if not plans or len(plans) != self._num_ranks:
                raise InvalidStateError(
                    f"{type(planner).__qualname__} gave plans that are not usable, without the plans of all ranks in "
                    "its global_plan, where DefaultSavePlanner has them"
                )
            found = self._plan(plans)
        except CloudckptError as error:
            tell_shares(self._attempt, dict.fromkeys(others, error))
            raise
        tell_shares(self._attempt, {rank: found[rank] for rank in others})
        return found[self._rank]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: the manifest is put, if all that belongs to it is there."""
        assert self._draft is not None
        url = checked_url(self._url, "StorageWriter")
        self._attempt = None  # from here on it may be committed, whatever comes back: nobody may sweep it
        reports = [unpacked(result.storage_data) for rank in results for result in rank]
        assert all(isinstance(report, RankReport) for report in reports)
        with closing(resolve(url, self._storage_options, self._config)) as store:
            self.commit = commit_draft(
                store,
                self._draft,
                metadata,
                reports,
                replaced=self._replaced,
                overwrite=self._overwrite,
                allow_pickle=self._allow_pickle,
            )
        metadata.storage_meta = StorageMeta(checkpoint_id=url, save_id=self._draft.attempt)
        self._draft = None

    def _sweep(self) -> None:
        """Remove what a save has left that was not committed; DCP does not tell when one fails elsewhere."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None and self._url is not None:
            with closing(resolve(self._url, self._storage_options, self._config)) as store:
                sweep(store, attempt)
