"""Migrating: a checkpoint is written anew under other names, cuts or dtypes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cloudckpt import catalog
from cloudckpt._rewrite import Place, Rewriting, array_plan, casts_of, rewrite
from cloudckpt._write import Commit
from cloudckpt.config import Config
from cloudckpt.errors import InvalidStateError
from cloudckpt.interop.foreign import Foreign
from cloudckpt.plan.migrations import migrations_between
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.rewrite import Rewrite
from cloudckpt.plan.view import View, renamed
from cloudckpt.progress import Progress
from cloudckpt.pytorch.group import Alone
from cloudckpt.transfer.job import Blueprint


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

    def view(source: Foreign, url: str) -> View:
        stored_version = source.manifest.document.model_version
        return renamed(source.manifest, rename, migrations=migrations_between(stored_version, model_version, url))

    rewriting = Rewriting(
        title="migrate",
        read=lambda store: Foreign(catalog.read_manifest(store)),
        view=view,
        casts=casts_of(cast),
        blueprint=lambda source, plan, attempt: _blueprint(source, plan, attempt, model_version),
    )
    return rewrite(
        Alone(),
        rewriting,
        Place(src, src_options),
        Place(dst, dst_options),
        overwrite=overwrite,
        progress=progress,
        config=config or Config(),
    )


def _blueprint(source: Foreign, plan: Rewrite, attempt: str, model_version: str | None) -> Blueprint:
    document = source.manifest.document
    kinds = {entry.compression for entry in document.arrays}
    if len(kinds) > 1:
        raise InvalidStateError(
            f"a checkpoint whose arrays are compressed in different ways ({kinds}) is not rewritten"
        )
    return Blueprint(
        attempt=attempt,
        step=document.step,
        model_version=document.model_version if model_version is None else model_version,
        layout=document.layout,
        arrays=array_plan(plan, kinds.pop() if kinds else None),
        tree=plan.tree,
        meshes=document.meshes,
        metadata=document.metadata,
        world_size=document.world_size,
        topology=None,  # no ranks have held these
        branch=document.branch,
    )
