"""Rewriting: manifest -> renamed view -> windows of chunks -> another checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from cloudckpt import catalog
from cloudckpt._write import Commit, remove_written
from cloudckpt.checkpoint import Checkpoint, open_checkpoint
from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError, InvalidStateError
from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.keys import new_attempt
from cloudckpt.format.manifest import Manifest
from cloudckpt.plan.migrations import migrations_between
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.rewrite import Rewrite, plan_rewrite
from cloudckpt.plan.view import renamed
from cloudckpt.plan.windows import plan_windows
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.targets import ChunkPlaces, Targets
from cloudckpt.pytorch.windows import WindowReader
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.download import download, effective_read_bytes
from cloudckpt.transfer.job import ArrayPlan, Blueprint, assemble, upload_job
from cloudckpt.transfer.upload import upload


def migrate(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    model_version: str | None = None,
    rename: Rules | None = None,
    cast: str | Mapping[str, str] | None = None,
    overwrite: bool = False,
    src_options: Mapping[str, Any] | None = None,
    dst_options: Mapping[str, Any] | None = None,
    progress: Progress = None,
    config: Config | None = None,
) -> Commit:
    """Write the checkpoint at ``src`` anew at ``dst``, as a load with the same arguments would see it. Not collective.

    ``model_version``: what the new checkpoint is to be; the rules of the migrations that lead there (`migration`) come
    first, then ``rename``. ``cast``: a dtype for all float tensors, or dtypes by pattern of dotted paths (``fnmatch``,
    the first that matches counts). Step, metadata, ``PerRank`` values and the world size stay, and so do layout and
    compression. At most ``Config.memory_bytes`` are held, whatever the size of the tensors.

    Raises what `load` and `save` raise: MismatchError where no migrations lead to the version, AlreadyCommittedError.
    """
    config = config or Config()
    casts = {"*": cast} if isinstance(cast, str) else dict(cast or {})
    with open_checkpoint(src, storage_options=src_options, config=config) as checkpoint:
        manifest = checkpoint.manifest
        migrations = migrations_between(manifest.document.model_version, model_version, checkpoint.url)
        view = renamed(manifest, rename, migrations=migrations)
        rewrite = plan_rewrite(manifest, view, casts, chunk_bytes=config.chunk_bytes)
        blueprint = _blueprint(manifest, rewrite, model_version)
        return _write(checkpoint, blueprint, rewrite, dst, dst_options, overwrite, progress, config)


def _blueprint(manifest: Manifest, rewrite: Rewrite, model_version: str | None) -> Blueprint:
    document = manifest.document
    kinds = {entry.compression for entry in manifest.arrays}
    if len(kinds) > 1:
        raise InvalidStateError(
            f"a checkpoint whose arrays are compressed in different ways ({kinds}) is not rewritten"
        )
    arrays = ArrayPlan(rewrite.leaves, rewrite.names, rewrite.chunks, kinds.pop() if kinds else None)
    return Blueprint(
        attempt=new_attempt(),
        step=document.step,
        model_version=document.model_version if model_version is None else model_version,
        layout=document.layout,
        arrays=arrays,
        tree=rewrite.tree,
        meshes=document.meshes,
        metadata=document.metadata,
        world_size=document.world_size,
        topology=None,  # no ranks have held these
        branch=document.branch,
    )


def _write(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    rewrite: Rewrite,
    dst: str | os.PathLike[str],
    dst_options: Mapping[str, Any] | None,
    overwrite: bool,
    progress: Progress,
    config: Config,
) -> Commit:
    # One half of the budget for what the client library sends, the other for what has been read: two windows, the
    # reads for a third, and what of a window before them is still being sent.
    sending = replace(config, memory_bytes=max(1, config.memory_bytes // 2))
    reading = replace(config, memory_bytes=max(1, config.memory_bytes // 8))
    job = upload_job(blueprint.arrays, blueprint.attempt, 0)
    kinds = zip(rewrite.leaves, rewrite.arrays, strict=True)
    sizes = [max(dtype(leaf.dtype).itemsize, dtype(array.dtype).itemsize) for leaf, array in kinds]
    windows = plan_windows(rewrite.chunks.grids, sizes, reading.memory_bytes)
    written: list[ObjectEntry] = []
    cancel = threading.Event()

    def fetch(targets: Targets) -> None:
        manifest = checkpoint.manifest
        plan = plan_load(StoredChunks.of(manifest), [targets.table], read_bytes=effective_read_bytes(reading)).rank(0)
        places = ChunkPlaces(manifest, targets, plan.parts)
        download(
            checkpoint.store,
            manifest,
            plan.reads,
            places.open_sink,
            config=reading,
            cancel=cancel,
            advance=lambda _: None,
            staged_bytes=places.staged_bytes,
        )

    with (
        closing(resolve(dst, dst_options, sending)) as target,
        closing(WindowReader(rewrite, windows, fetch)) as reader,
    ):
        catalog.check_absent(target, overwrite=overwrite)
        total = sum(write.nbytes for write in job.writes)
        try:
            with start_progress(progress, "migrate", total, show=True) as advance:
                receipt = upload(
                    target,
                    job,
                    lambda write: reader.read(write.chunk),
                    layout=blueprint.layout,
                    config=sending,
                    cancel=cancel,
                    advance=advance,
                    written=written,
                )
            manifest = assemble(blueprint, [receipt])
            catalog.commit(target, manifest, overwrite=overwrite)
        except CloudckptError:
            cancel.set()
            remove_written(target, written)
            raise
        return Commit(
            url=target.url,
            commit_id=manifest.document.commit_id,
            step=manifest.document.step,
            nbytes=manifest.nbytes,
            num_chunks=len(manifest.columns),
            num_objects=len(manifest.objects),
            num_requests=target.counts.requests,
            nbytes_new=manifest.nbytes_new,
        )
