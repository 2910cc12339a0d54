"""torch.distributed.checkpoint's loads, out of checkpoints of this library."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from cloudckpt import catalog
from cloudckpt._load import LoadReport, report_of
from cloudckpt._reading import Reading
from cloudckpt.config import Config
from cloudckpt.dcp.filling import Filling
from cloudckpt.dcp.keys import KeyPath, Notes, flat_items, keyed
from cloudckpt.dcp.place import checked_url, is_url
from cloudckpt.errors import InvalidStateError, StoreError
from cloudckpt.format import values
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import Node
from cloudckpt.plan.migrations import migrations_between
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.view import View, renamed
from cloudckpt.progress import Progress
from cloudckpt.pytorch.group import Alone, Group, make_group, members, round_number
from cloudckpt.pytorch.match import Match
from cloudckpt.pytorch.ranks import Ranks
from cloudckpt.pytorch.shards import torch_dtype
from cloudckpt.pytorch.sharing import ExchangeMode, Prepared, Scope, check_exchange, describe, prepare, share
from cloudckpt.pytorch.ties import split_twins
from cloudckpt.pytorch.wishes import Agreement, Sharing, Verdict, agree
from cloudckpt.store.base import Store
from cloudckpt.store.closing import counted_and_closed
from cloudckpt.store.resolve import resolve
from cloudckpt.telemetry import Recorder, recorded
from cloudckpt.transfer.download import effective_read_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

START_S = 60.0
"""How long a rank may take from DCP's planning to its reading."""


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the coordinator in its plan.

    ``rank``, ``size``: in the group that it could exchange with; ``round_number``: of that, see `Ranks.skip_to`.
    """

    commit_id: str
    rank: int = 0
    size: int = 1
    round_number: int = 0


@dataclass(frozen=True)
class _Decision:
    """What the coordinator tells every rank in its plan. ``round_number``: the highest of all ranks."""

    exchange: bool
    round_number: int


@dataclass(frozen=True, eq=False)
class _Source:
    """A checkpoint as DCP sees it."""

    url: str
    manifest: Manifest
    view: View
    keys: Mapping[str, tuple[KeyPath, Node]]
    notes: Notes


class StorageReader(TorchStorageReader):
    """What ``torch.distributed.checkpoint.load`` reads a checkpoint from, whether `save` or `StorageWriter` wrote it.

    ``url``: as for `cloudckpt.load`; ``checkpoint_id`` of torch's functions, where given, comes before it.
    ``storage_options``, ``rename``, ``model_version``, ``exchange_scope``, ``progress``, ``config``: as for
    `cloudckpt.load`. Keys are those that DCP makes of the stored tree: names joined by dots.

    ``exchange``: "auto" reads each stored byte from the store once, and passes it on, where the ranks of the load are
    just those of ``group`` (default: all ranks); else, and with "none", every rank reads what it wants.

    ``cast``: as with torch's readers, a target of another dtype gets the values of ``Tensor.copy_``; False makes that
    a MismatchError. ``allow_pickle``: without, pickled values that are asked for are a FormatError.

    ``report``: after a load, what all ranks together did. ``load_id``: of the load, for those who log it.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        cast: bool = True,
        exchange: ExchangeMode = "auto",
        exchange_scope: Scope = "world",
        rename: Rules | None = None,
        model_version: str | None = None,
        group: ProcessGroup | None = None,
        progress: Progress = None,
        config: Config | None = None,
    ) -> None:
        super().__init__()
        check_exchange(exchange, exchange_scope)
        self._url = None if url is None else checked_url(url, "StorageReader")
        self._storage_options = storage_options
        self._allow_pickle = allow_pickle
        self._cast = cast
        self._exchange: ExchangeMode = exchange
        self._scope: Scope = exchange_scope
        self._rename = rename
        self._model_version = model_version
        self._group = group
        self._progress = progress
        self._config = config or Config()
        self.report: LoadReport | None = None
        self.load_id = secrets.token_hex(8)
        self._source: _Source | None = None
        self._is_coordinator = False
        self._decision: _Decision | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        return self._url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._url = checked_url(checkpoint_id, "StorageReader")
        self.load_id = secrets.token_hex(8)
        self._source = self._decision = None

    def read_metadata(self, *args: Any, **others: Any) -> Metadata:  # noqa: ARG002  # DCP's
        """The checkpoint as DCP describes one: every tensor is one chunk to it. Raises what `cloudckpt.load` raises.

        (A parameter named ``kwargs`` would tell DCP that there is a checkpoint for each rank.)
        """
        url = checked_url(self._url, "StorageReader")
        with closing(resolve(url, self._storage_options, self._config)) as store:
            manifest = catalog.read_manifest(store)
            shown = store.url
        migrations = migrations_between(manifest.document.model_version, self._model_version, shown)
        view = renamed(manifest, self._rename, migrations=migrations)
        notes = Notes.of(manifest.document.metadata)
        keys = keyed(flat_items(view.tree, notes.whole), shown)
        self._source = _Source(shown, manifest, view, keys, notes)
        self._decision = self.report = None
        own = notes.planner_data
        return Metadata(
            state_dict_metadata={key: _described(view, key, node) for key, (_, node) in keys.items()},
            planner_data={key: path for key, (path, _) in keys.items()}
            if own is None
            else values.decode(own, allow_pickle=self._allow_pickle),
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=url, save_id=manifest.document.attempt, load_id=self.load_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **others: Any) -> None:  # noqa: ARG002  # DCP's
        self._is_coordinator = is_coordinator
        self._decision = None
        if self._source is None:  # the metadata came from elsewhere
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._source is not None
        commit_id = self._source.manifest.document.commit_id
        group = None if self._exchange == "none" else members(self._group)
        if group is None:
            return replace(plan, storage_data=_Offer(commit_id))
        offer = _Offer(commit_id, dist.get_rank(group), dist.get_world_size(group), round_number(group))
        return replace(plan, storage_data=offer)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator. Chunks are passed on where all ranks of the group, and no others, take part."""
        offers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Offer)]
        if len({offer.commit_id for offer in offers}) > 1:
            raise StoreError("the checkpoint was replaced while the ranks began to load it: load it again")
        sizes = {offer.size for offer in offers}
        everybody = sorted(offer.rank for offer in offers) == list(range(len(plans)))
        self._decision = _Decision(
            exchange=len(plans) > 1 and sizes == {len(plans)} and everybody,
            round_number=max((offer.round_number for offer in offers), default=0),
        )
        return [replace(plan, storage_data=self._decision) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Collective where chunks are passed on."""
        assert self._source is not None
        source, opened = self._source, list[Store]()
        ranks = self._ranks(plan)
        kept: list[tuple[Filling, Prepared]] = []

        def compare() -> Sharing | None:
            filling, prepared = self._prepare(source, plan, planner, ranks)
            opened.append(resolve(self._url or "", self._storage_options, self._config))
            kept.append((filling, prepared))
            return describe(prepared, source.manifest, ranks) if isinstance(ranks, Ranks) else None

        with (
            recorded("load", source.url, ranks.rank, ranks.size) as recorder,
            counted_and_closed(opened, recorder),
        ):
            recorder.step = source.manifest.document.step
            with recorder.stage("compare"):
                agreement, reason = ranks.round(compare, agree)
            if isinstance(ranks, Ranks):
                ranks.timeout_s = self._config.rank_timeout_s
            filling, prepared = kept[0]
            self.report = self._fill(source, ranks, opened[0], prepared, agreement, reason, recorder)
            with recorder.stage("finish"):
                filling.finish()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _ranks(self, plan: LoadPlan) -> Group:
        decision = self._decision if self._is_coordinator else plan.storage_data
        if isinstance(decision, _Decision) and not decision.exchange:
            return Alone()
        if self._exchange == "none" or members(self._group) is None:
            return Alone()
        if not isinstance(decision, _Decision):
            raise InvalidStateError(
                "the plan has lost its storage_data, with which storage tells the ranks whether to pass chunks on: "
                'finish_plan() of a planner must keep it, or pass exchange="none" to StorageReader on all ranks'
            )
        # DCP has just had all ranks meet. One that is not here soon has failed, and tells DCP, not us.
        ranks = make_group(self._group, min(START_S, self._config.rank_timeout_s))
        assert isinstance(ranks, Ranks)
        ranks.skip_to(decision.round_number)
        return ranks

    def _prepare(self, source: _Source, plan: LoadPlan, planner: LoadPlanner, ranks: Group) -> tuple[Filling, Prepared]:
        filling = Filling(
            plan.items,
            planner,
            source.view,
            source.keys,
            notes=source.notes,
            allow_pickle=self._allow_pickle,
            cast=self._cast,
            where=source.url,
        )
        wants, _ = split_twins(source.manifest, filling.wants)
        read_bytes = effective_read_bytes(self._config)
        return filling, prepare(source.manifest, Match(wants), ranks, None, read_bytes=read_bytes)

    def _fill(
        self,
        source: _Source,
        ranks: Group,
        store: Store,
        prepared: Prepared,
        agreement: Agreement | None,
        reason: str,
        recorder: Recorder,
    ) -> LoadReport:
        shared = None
        if agreement is not None:
            assert isinstance(ranks, Ranks)
            half = self._config.memory_bytes // 2
            with recorder.stage("plan"):
                shared = share(ranks, prepared, agreement, self._exchange, self._scope, buffer_bytes=half)
        reading = Reading(self._config, self._progress, ranks, store, source.manifest, prepared, shared)
        verdict = Verdict([], [], False, {}, {}, agreement, reason)
        return ranks.round(
            lambda: reading.run(recorder),
            lambda results: report_of(source.manifest, verdict, shared, results),
            is_last=True,
        )


def _described(view: View, key: str, node: Node) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(node, dict) or node.get("$") != "tensor":
        return BytesStorageMetadata()
    array = view.array(node)
    size = torch.Size(array.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(array.dtype, key)), size, [chunk])
