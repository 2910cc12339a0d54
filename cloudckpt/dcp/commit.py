"""The end of a save, on the coordinator: from what all ranks have written to the manifest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt import catalog
from cloudckpt._write import Commit, commit_of, remove_written
from cloudckpt.dcp.keys import NOTES, KeyPath, Notes, is_walked, nested_paths, tree_of
from cloudckpt.dcp.plain import dotted_keys
from cloudckpt.dcp.writing import RankReport, join_late
from cloudckpt.errors import (
    AlreadyCommittedError,
    CloudckptError,
    FormatError,
    InvalidStateError,
    NoBucketError,
    NotFoundError,
    StoreError,
)
from cloudckpt.format import values
from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.keys import MANIFEST, parse_attempt, plain_root, split_key
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.format.tree import Node
from cloudckpt.store.base import Store
from cloudckpt.telemetry import slowest
from cloudckpt.transfer.job import ArrayPlan, Blueprint, assemble


@dataclass(frozen=True, eq=False)
class Draft:
    """What is known of a checkpoint before anything of it is written."""

    attempt: str
    arrays: ArrayPlan
    num_ranks: int
    step: int | None
    layout: str
    model_version: str | None
    metadata: Mapping[str, Any]

    def manifest(self, metadata: Metadata, reports: Sequence[RankReport], *, allow_pickle: bool) -> Manifest:
        """Raises InvalidStateError for chunks and values that are missing, or there twice."""
        if [report.attempt for report in reports] != [self.attempt] * self.num_ranks:
            raise InvalidStateError(
                f"of {self.num_ranks} ranks {len(reports)} have written, for attempts "
                f"{sorted({report.attempt for report in reports})}, not {self.attempt}"
            )
        nodes = _nodes(self.arrays, reports)
        keys = list(dict.fromkeys([*metadata.state_dict_metadata, *nodes]))
        if absent := [key for key in keys if key not in nodes]:
            raise InvalidStateError(f"no rank has written {dotted_keys(absent)}, of which the planner's metadata tell")
        nested = nested_paths(keys, metadata.planner_data)
        paths: Mapping[str, KeyPath] = {key: (key,) for key in keys} if nested is None else nested
        raw: frozenset[str] = frozenset().union(*(report.raw for report in reports))
        streams: frozenset[str] = frozenset().union(*(report.streams for report in reports))
        own = None
        if nested is None and metadata.planner_data is not None:
            own = values.encode(metadata.planner_data, allow_pickle=allow_pickle, path=("planner_data",))
        notes = Notes(
            whole=[paths[key] for key in keys if key not in raw and is_walked(nodes[key])],
            raw=[paths[key] for key in raw],
            streams=[paths[key] for key in streams],
            planner_data=own,
        ).encode()
        told = values.encode(dict(self.metadata), path=("metadata",))
        if notes is not None:
            assert isinstance(told, dict)
            told = {**told, NOTES: notes} if "$" not in told else {**told, "items": [*told["items"], [NOTES, notes]]}
        arrays, receipts = join_late(self.arrays, reports)
        blueprint = Blueprint(
            attempt=self.attempt,
            step=self.step,
            model_version=self.model_version,
            layout=self.layout,
            arrays=arrays,
            tree=tree_of({paths[key]: nodes[key] for key in keys}),
            meshes=(),
            metadata=told,
            world_size=self.num_ranks,
            topology=None,  # DCP does not tell which ranks held the parts that it keeps once
        )
        return assemble(blueprint, receipts)


def _nodes(arrays: ArrayPlan, reports: Sequence[RankReport]) -> dict[str, Node]:
    found: dict[str, Node] = {
        leaf.id: {"$": "tensor", "array": name} for leaf, name in zip(arrays.leaves, arrays.names, strict=True)
    }
    for rank, report in enumerate(reports):
        for key, node in report.nodes.items():
            if found.setdefault(key, node) != node:
                raise InvalidStateError(
                    f"{key!r}: rank {rank} has saved another value than a rank before it, or a tensor is there, too"
                )
    return found


def commit_draft(
    store: Store,
    draft: Draft,
    metadata: Metadata,
    reports: Sequence[RankReport],
    *,
    replaced: Sequence[str],
    overwrite: bool,
    allow_pickle: bool,
) -> Commit:
    """Put the manifest, and then remove ``replaced``. What was written for nothing is removed before an error."""
    began = time.perf_counter()
    written: list[ObjectEntry] = [entry for report in reports for entry in report.receipt.objects]
    try:
        manifest = draft.manifest(metadata, reports, allow_pickle=allow_pickle)
    except CloudckptError:
        remove_written(store, written)
        raise
    try:
        catalog.commit(store, manifest, overwrite=overwrite)
    except AlreadyCommittedError:
        remove_written(store, written)
        raise
    _remove(store, replaced)
    num_requests = sum(report.num_requests for report in reports) + store.counts.requests
    spent = slowest([*(report.seconds for report in reports), {"commit": time.perf_counter() - began}])
    return commit_of(manifest, store.url, num_requests, spent)


def replaceable(store: Store, *, is_step: bool, overwrite: bool) -> Sequence[str]:
    """The objects of a checkpoint that will be replaced, and that nobody needs then.

    Other steps of a run may refer to those of a step: they are left to those who know. Raises AlreadyCommittedError
    where there is a checkpoint, and ``overwrite`` is not asked for.
    """
    catalog.check_absent(store, overwrite=overwrite)
    if not overwrite or is_step:
        return ()
    try:
        manifest = decode_manifest(store.get(MANIFEST), store.url)
    except NoBucketError:
        raise
    except (NotFoundError, FormatError):
        return ()
    except StoreError as error:
        # S3 refuses the question about an absent object if one may not list the bucket.
        if error.retryable:
            raise
        return ()
    # Whatever a manifest claims to be its own: other files beside it are somebody else's.
    return [entry.key for entry in manifest.objects if _is_own(entry.key)]


def _is_own(key: str) -> bool:
    step_dir, below = split_key(key)
    return step_dir is None and parse_attempt(below) is not None


def sweep(store: Store, attempt: str) -> None:
    """Remove what an attempt has left that nobody works for any more, as far as the store lets it be."""
    with contextlib.suppress(StoreError, NotFoundError):
        _remove(store, list(_left(store, attempt)))


def _left(store: Store, attempt: str) -> Iterator[str]:
    for prefix in (attempt, plain_root(attempt)):
        yield from (info.key for info in store.list(prefix))


def _remove(store: Store, keys: Sequence[str]) -> None:
    with contextlib.suppress(StoreError):
        if keys:
            store.delete(keys)
