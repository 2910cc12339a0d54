"""Rewriting: what is stored -> renamed view -> windows of chunks, shared out among the ranks -> another checkpoint."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from cloudckpt import catalog
from cloudckpt._write import Commit, commit_of, remove_written
from cloudckpt.config import MIB, Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError
from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.keys import new_attempt
from cloudckpt.format.manifest import Manifest
from cloudckpt.interop.foreign import Foreign
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.rewrite import Rewrite, plan_rewrite
from cloudckpt.plan.view import View
from cloudckpt.plan.windows import Block, plan_windows
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.group import Group
from cloudckpt.pytorch.rounds import check_alike
from cloudckpt.pytorch.targets import ChunkPlaces, Targets
from cloudckpt.pytorch.windows import Fetch, WindowReader
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.download import download, effective_read_bytes
from cloudckpt.transfer.job import ArrayPlan, Blueprint, assemble, upload_job
from cloudckpt.transfer.upload import UploadReceipt, upload

MakeFetch: TypeAlias = Callable[[Store, Foreign, Config, threading.Event], Fetch]
"""What reads boxes of the arrays of a source, within ``Config.memory_bytes``, until the event is set."""

WINDOWS_PER_RANK = 4
"""At least, as far as there is enough to share out, so that the ranks end at about the same time."""


@dataclass(frozen=True, eq=False)
class Place:
    """A URL and the options of its store."""

    url: str | os.PathLike[str]
    options: Mapping[str, Any] | None = None

    def open(self, config: Config) -> Store:
        return resolve(self.url, self.options, config)


def fetch_chunks(store: Store, source: Foreign, config: Config, cancel: threading.Event) -> Fetch:
    """By planned ranged reads; `MakeFetch` of all sources whose bytes a manifest can name."""
    manifest = source.manifest
    chunks = StoredChunks.of(manifest)

    def fetch(targets: Targets) -> None:
        plan = plan_load(chunks, [targets.table], read_bytes=effective_read_bytes(config)).rank(0)
        places = ChunkPlaces(manifest, targets, plan.parts)
        download(
            store,
            manifest,
            plan.reads,
            places.open_sink,
            config=config,
            cancel=cancel,
            advance=lambda _: None,
            staged_bytes=places.staged_bytes,
        )

    return fetch


@dataclass(frozen=True, eq=False)
class Rewriting:
    """What is to be made of a source. The same on all ranks.

    ``read``: finds what there is, on the coordinator only. ``view``: of it, under the names that are wanted.
    ``casts``: see `plan_rewrite`. ``blueprint``: of the new checkpoint, but for its attempt, given the arrays and tree.
    """

    title: str
    read: Callable[[Store], Foreign]
    view: Callable[[Foreign, str], View]
    casts: Mapping[str, str]
    blueprint: Callable[[Foreign, Rewrite, str], Blueprint]
    make_fetch: MakeFetch = field(default=fetch_chunks)


def rewrite(
    ranks: Group,
    rewriting: Rewriting,
    src: Place,
    dst: Place,
    *,
    overwrite: bool,
    progress: Progress,
    config: Config,
) -> Commit:
    """Write what ``src`` holds as a checkpoint at ``dst``. Collective over ``ranks``, which write a part each.

    A rank holds at most ``Config.memory_bytes``, whatever the size of the tensors.
    """
    # One half of the budget for what the client library sends, the other for what has been read: two windows, the
    # reads for a third, and what of a window before them is still being sent.
    sending = replace(config, memory_bytes=max(1, config.memory_bytes // 2))
    reading = replace(config, memory_bytes=max(1, config.memory_bytes // 8))
    stores: list[Store] = []
    written: list[ObjectEntry] = []
    assembled: list[Manifest] = []  # on the coordinator
    prepared: list[_Prepared] = []
    with ExitStack() as stack:

        def begin() -> None:
            for place, settings in ((src, reading), (dst, sending)):
                stores.append(stack.enter_context(closing(place.open(settings))))

        def find(_: Sequence[None]) -> tuple[Foreign, str]:
            source, target = stores
            found = rewriting.read(source)
            rewriting.view(found, source.url)  # rules that do not fit are told before anything else
            catalog.check_absent(target, overwrite=overwrite)
            for note in found.notes:
                warnings.warn(note, stacklevel=2)
            return found, new_attempt()

        foreign, attempt = ranks.round(begin, find)
        source, target = stores

        def prepare() -> Mapping[str, Any]:
            prepared.append(_prepare(ranks, rewriting, foreign, attempt, source.url, config, reading.memory_bytes))
            told = {"src": source.url, "dst": target.url, "overwrite": overwrite}
            return {**told, **prepared[0].arguments, **asdict(config)}

        def send() -> UploadReceipt:
            return _send(ranks, rewriting, foreign, prepared[0], source, target, progress, reading, sending, written)

        def publish(_: Sequence[None]) -> Commit:
            catalog.commit(target, assembled[0], overwrite=overwrite)
            return commit_of(assembled[0], target.url, target.counts.requests)

        # Ranks that plan differently would write what does not belong together.
        ranks.round(prepare, partial(check_alike, rewriting.title))
        try:
            ranks.round(send, lambda receipts: assembled.append(assemble(prepared[0].blueprint, receipts)))
        except CloudckptError:
            remove_written(target, written)
            raise
        try:
            return ranks.round(lambda: None, publish, is_last=True)
        except AlreadyCommittedError:
            remove_written(target, written)
            raise


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A rank's part of a rewrite. ``arguments``: what led to it, and has to be equal on all ranks."""

    plan: Rewrite
    windows: Sequence[tuple[Block, ...]]
    blueprint: Blueprint
    arguments: Mapping[str, Any]


def _prepare(
    ranks: Group, rewriting: Rewriting, foreign: Foreign, attempt: str, url: str, config: Config, window_bytes: int
) -> _Prepared:
    view = rewriting.view(foreign, url)
    plan = plan_rewrite(
        foreign.manifest,
        view,
        rewriting.casts,
        chunk_bytes=config.chunk_bytes,
        window_bytes=None if foreign.is_cut else window_bytes,
    )
    plan, windows = _share_out(plan, ranks, window_bytes)
    blueprint = rewriting.blueprint(foreign, plan, attempt)
    arguments = {
        "rename": f"rules that come to {view.digest()}",
        "cast": dict(rewriting.casts),
        "step": blueprint.step,
        "layout": blueprint.layout,
        "compression": blueprint.arrays.compression,
        "model_version": blueprint.model_version,
    }
    blueprint = replace(blueprint, world_size=max(blueprint.world_size, ranks.size))
    return _Prepared(plan, windows, blueprint, arguments)


def _send(
    ranks: Group,
    rewriting: Rewriting,
    foreign: Foreign,
    prepared: _Prepared,
    source: Store,
    target: Store,
    progress: Progress,
    reading: Config,
    sending: Config,
    written: list[ObjectEntry],
) -> UploadReceipt:
    blueprint = prepared.blueprint
    job = upload_job(blueprint.arrays, blueprint.attempt, ranks.rank)
    fetch = rewriting.make_fetch(source, foreign, reading, ranks.cancel)
    total = sum(write.nbytes for write in job.writes)
    with (
        closing(WindowReader(prepared.plan, prepared.windows, fetch)) as reader,
        start_progress(progress, rewriting.title, total, show=ranks.rank == 0) as advance,
    ):
        return upload(
            target,
            job,
            lambda write: reader.read(write.chunk),
            layout=blueprint.layout,
            config=sending,
            cancel=ranks.cancel,
            advance=advance,
            written=written,
        )


def _share_out(plan: Rewrite, ranks: Group, window_bytes: int) -> tuple[Rewrite, list[tuple[Block, ...]]]:
    """The plan with an owner for every chunk, and the windows that are this rank's: neighbours, so that it reads less.

    Chunks of the source that lie in two windows are read for both.
    """
    kinds = zip(plan.leaves, plan.arrays, strict=True)
    sizes = [max(dtype(leaf.dtype).itemsize, dtype(array.dtype).itemsize) for leaf, array in kinds]
    grids = plan.chunks.grids
    total = sum(int(grid.stored_elements.sum()) * size for grid, size in zip(grids, sizes, strict=True))
    share = max(4 * MIB, -(-total // (WINDOWS_PER_RANK * ranks.size)))
    windows = plan_windows(grids, sizes, min(window_bytes, share))
    nbytes = np.array([sum(b.box.num_elements * sizes[b.array] for b in window) for window in windows], dtype=np.int64)
    middle = np.cumsum(nbytes) - nbytes / 2
    holder = np.minimum(middle * ranks.size // max(1, int(nbytes.sum())), ranks.size - 1).astype(np.int32)
    owner = np.zeros_like(plan.chunks.owner)
    for rank, window in zip(holder.tolist(), windows, strict=True):
        for block in window:
            first = int(plan.chunks.first_chunks[block.array])
            owner[first + block.start : first + block.stop] = rank
    mine = [window for rank, window in zip(holder.tolist(), windows, strict=True) if rank == ranks.rank]
    return replace(plan, chunks=replace(plan.chunks, owner=owner)), mine


def array_plan(plan: Rewrite, compression: str | None) -> ArrayPlan:
    return ArrayPlan(plan.leaves, plan.names, plan.chunks, compression)


def casts_of(cast: str | Mapping[str, str] | None) -> dict[str, str]:
    """Dtypes by pattern."""
    return {"*": cast} if isinstance(cast, str) else dict(cast or {})
