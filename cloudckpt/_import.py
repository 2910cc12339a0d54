"""Importing: states in files of other formats become checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cloudckpt._rewrite import MakeFetch, Place, Rewriting, array_plan, casts_of, fetch_chunks, rewrite
from cloudckpt._write import Commit
from cloudckpt.config import MIB, Config
from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.keys import step_dir
from cloudckpt.interop import hf_index, torch_file
from cloudckpt.interop.dcp_files import open_dcp
from cloudckpt.interop.foreign import Foreign, Origin, file_in
from cloudckpt.interop.hf_files import open_hf
from cloudckpt.interop.zarr_fetch import fetch_tiles
from cloudckpt.interop.zarr_source import open_zarr_source
from cloudckpt.plan.migrations import check_version
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.rewrite import Rewrite
from cloudckpt.plan.view import renamed
from cloudckpt.progress import Progress
from cloudckpt.pytorch.group import make_group
from cloudckpt.transfer.job import Blueprint

if TYPE_CHECKING:
    import torch.distributed as dist

Layout = Literal["packed", "zarr"]

DEFAULT_MEMORY_BYTES = 256 * MIB
"""Half of what a save or load may hold: an import often runs beside something else, and is not faster with more."""


@dataclass(frozen=True)
class Kind:
    """How files of one format are read. ``suffixes``: of URLs that name a file; others name a folder."""

    open: Callable[[Origin], Foreign]
    suffixes: tuple[str, ...] = ()
    make_fetch: MakeFetch = fetch_chunks


KINDS: dict[str, Kind] = {
    "dcp": Kind(open_dcp),
    "hf": Kind(open_hf, hf_index.SUFFIXES),
    "torch": Kind(torch_file.open_torch, torch_file.SUFFIXES),
    "zarr": Kind(open_zarr_source, make_fetch=fetch_tiles),
}


@dataclass(frozen=True)
class _About:
    """What the new checkpoint is told to be; what is None is as the source has it."""

    step: int | None
    layout: Layout
    compression: Literal["zstd"] | None
    metadata: Mapping[str, Any] | None
    model_version: str | None

    def check(self) -> None:
        if self.layout not in ("packed", "zarr"):
            raise InvalidStateError(f"layout must be 'packed' or 'zarr', not {self.layout!r}")
        if self.compression not in (None, "zstd"):
            raise InvalidStateError(f"compression must be None or 'zstd', not {self.compression!r}")
        check_version(self.model_version)
        if self.step is not None:
            step_dir(self.step)  # refuses what cannot name a step

    def blueprint(self, source: Foreign, plan: Rewrite, attempt: str) -> Blueprint:
        document = source.manifest.document
        return Blueprint(
            attempt=attempt,
            step=document.step if self.step is None else self.step,
            model_version=self.model_version,
            layout=self.layout,
            arrays=array_plan(plan, self.compression),
            tree=plan.tree,
            meshes=(),
            metadata=document.metadata if self.metadata is None else values.encode(dict(self.metadata)),
            world_size=1,
            topology=None,  # no ranks have held these
        )


def import_from(
    kind: Literal["hf", "dcp", "torch", "zarr"],
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    step: int | None = None,
    rename: Rules | None = None,
    cast: str | Mapping[str, str] | None = None,
    layout: Layout = "packed",
    compression: Literal["zstd"] | None = None,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    model_version: str | None = None,
    allow_pickle: bool = False,
    src_options: Mapping[str, Any] | None = None,
    dst_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress = None,
    config: Config | None = None,
) -> Commit:
    """Make a checkpoint at ``dst`` of what is at ``src``. Collective over ``group`` (default: all ranks).

    ``kind``: "hf" for safetensors files, a folder of them or a single one; "dcp" for what
    ``torch.distributed.checkpoint`` writes, Megatron's ``torch_dist`` included; "torch" for a file of ``torch.save``;
    "zarr" for a zarr array or group. Names and nesting are those of the source unless ``rename`` says otherwise (as for
    `load`). ``cast``: a dtype for all float tensors, or dtypes by pattern (``fnmatch``). ``allow_pickle``: take over
    values that are not plain as pickles, which means to execute what the source says; without it nothing is executed.
    All ranks write a part, and hold at most ``Config.memory_bytes``, without a config 256 MiB, whatever the size of the
    tensors.

    What the source lacks or has wrong is found before anything is written: FormatError, NotFoundError. Raises
    AlreadyCommittedError, InvalidStateError and StoreError as `save` does.
    """
    config = config or Config(memory_bytes=DEFAULT_MEMORY_BYTES)
    about = _About(step, layout, compression, metadata, model_version)
    about.check()
    if kind not in KINDS:
        raise InvalidStateError(f"kind must be one of {sorted(KINDS)}, not {kind!r}")
    how = KINDS[kind]
    folder, name = file_in(src, how.suffixes)
    rewriting = Rewriting(
        title=f"import {kind}",
        read=lambda store: how.open(Origin(store, name, config, allow_pickle)),
        view=lambda source, _: renamed(source.manifest, rename, made=source.made),
        casts=casts_of(cast),
        blueprint=about.blueprint,
        make_fetch=how.make_fetch,
    )
    ranks = make_group(group, config.rank_timeout_s)
    source, target = Place(folder, src_options), Place(dst, dst_options)
    return rewrite(ranks, rewriting, source, target, overwrite=overwrite, progress=progress, config=config)
