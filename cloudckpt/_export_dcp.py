"""DCP out: manifest -> flat keys and items -> streams of archives -> ``.metadata``, last."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cloudckpt import catalog
from cloudckpt._export import ExportFile, sending_config, write_files
from cloudckpt._rewrite import Place, fetch_chunks
from cloudckpt.config import Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, StoreError
from cloudckpt.format import values
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.tree import Node
from cloudckpt.interop.dcp_export import DcpPlan, plan_dcp
from cloudckpt.interop.dcp_metadata import METADATA_KEY
from cloudckpt.interop.foreign import Foreign
from cloudckpt.interop.hf_export import casts_by_pattern
from cloudckpt.interop.megatron import is_megatron
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.selection import Selection, select
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.group import make_group
from cloudckpt.pytorch.held import Held
from cloudckpt.pytorch.rounds import check_alike
from cloudckpt.store.base import Store

if TYPE_CHECKING:
    import torch.distributed as dist

_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


@dataclass(frozen=True)
class DcpReport:
    """What an export wrote. ``files``: beside `.metadata`; ``nbytes``: of them all. ``removed``: of an earlier one."""

    url: str
    files: list[str]
    num_tensors: int
    num_values: int
    nbytes: int
    removed: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Work:
    """What the coordinator tells the others."""

    manifest: Manifest
    plan: DcpPlan


def export_dcp(
    url: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    include: str | Iterable[str] | None = None,
    rename: Rules | None = None,
    cast: str | Mapping[str, str] | None = None,
    overwrite: bool = False,
    src_options: Mapping[str, Any] | None = None,
    dst_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress = None,
    config: Config | None = None,
) -> DcpReport:
    """Write the checkpoint at ``url`` as one of ``torch.distributed.checkpoint``. Collective over ``group``
    (all ranks).

    ``torch.distributed.checkpoint.load`` reads them back into a state dict of the same nesting, sharded in any way:
    flat keys and nesting are those that its planner gives to such a state. ``include``: patterns of stored dotted paths
    (``fnmatch``); ``rename``: rules for these, as for `load`; ``cast``: a dtype for all float tensors, or dtypes by
    pattern of flat keys. All that is no tensor is written as ``torch.save`` writes it. Tied tensors are written once.

    Files are streamed, by ranks that take whole files: about half of ``Config.memory_bytes`` is held. `.metadata` comes
    last; where ``dst`` has one already, ``overwrite`` deletes it first, so that none leads to files of two exports.

    Raises InvalidStateError and NotFoundError before anything is written where the state or a name does not fit,
    AlreadyCommittedError where another checkpoint is there, CorruptChunkError, StoreError.
    """
    config = config or Config()
    casts = casts_by_pattern(cast)
    included = include if include is None or isinstance(include, str) else [*include]
    ranks = make_group(group, config.rank_timeout_s)
    with ExitStack() as stack:
        stores: list[Store] = []
        stale: list[str] = []  # on the coordinator

        def begin() -> dict[str, Any]:
            for place, settings in (
                (Place(url, src_options), config),
                (Place(dst, dst_options), sending_config(config)),
            ):
                stores.append(stack.enter_context(contextlib.closing(place.open(settings))))
            return {
                "url": os.fspath(url),
                "dst": os.fspath(dst),
                "include": included,
                "cast": casts,
                "overwrite": overwrite,
            }

        def find(parts: Sequence[Mapping[str, Any]]) -> _Work:
            check_alike("export_dcp()", parts)
            source, target = stores
            manifest = catalog.read_manifest(source)
            selection = select(manifest, included, rename, keep_empty=True)
            load = partial(_loaded, source, selection, config)
            plan = plan_dcp(selection, casts, load, ranks.size)
            stale.extend(_prepare(target, plan, overwrite=overwrite))
            return _Work(manifest, plan)

        work = ranks.round(begin, find)
        source, target = stores
        plan = work.plan
        share = [file for rank, file in plan.files if rank == ranks.rank]
        mine = [ExportFile(file.key, file.nbytes, file.sources, file.render) for file in share]
        written: list[str] = []

        def send() -> None:
            total = sum(file.nbytes for file in mine)
            with start_progress(progress, "export dcp", total, show=ranks.rank == 0) as advance:
                write_files(
                    mine,
                    source,
                    Foreign(work.manifest),
                    target,
                    config=config,
                    cancel=ranks.cancel,
                    advance=advance,
                    written=written,
                )
            if ranks.rank == 0 and plan.values is not None:
                target.put(*plan.values)
                written.append(plan.values[0])

        def publish(_: Sequence[None]) -> DcpReport:
            target.put(METADATA_KEY, plan.metadata)
            _delete(target, stale)
            return _report(target, plan, stale)

        try:
            ranks.round(send, lambda _: None)
        except CloudckptError:
            with contextlib.suppress(CloudckptError):  # without .metadata nobody sees them
                target.delete(written)
            raise
        return ranks.round(lambda: None, publish, is_last=True)


def _report(target: Store, plan: DcpPlan, removed: Sequence[str]) -> DcpReport:
    plain = [] if plan.values is None else [plan.values]
    return DcpReport(
        url=target.url,
        files=[*(key for key, _ in plain), *(file.key for _, file in plan.files)],
        num_tensors=plan.num_tensors,
        num_values=plan.num_values,
        nbytes=sum(len(data) for _, data in plain) + sum(file.nbytes for _, file in plan.files),
        removed=[*removed],
    )


def _loaded(source: Store, selection: Selection, config: Config, key: str, node: Node) -> Any:
    """A value that holds tensors or arrays, such as a tuple of them: DCP has it as one item, in memory."""
    held = Held(selection.array, max_bytes=config.memory_bytes, text=key)
    value = values.decode(node, leaf=held.leaf)
    fetch_chunks(source, Foreign(selection.manifest), config, threading.Event())(held.targets())
    return value


def _prepare(target: Store, plan: DcpPlan, *, overwrite: bool) -> list[str]:
    """Make way for the new files; returns those of an earlier export that nothing will refer to."""
    there = {found.key: found.nbytes for found in target.list("")}
    if METADATA_KEY in there:
        if not overwrite:
            raise AlreadyCommittedError(
                f"{target.url} holds a DCP checkpoint; overwrite=True (--overwrite) replaces all of it"
            )
        if is_megatron(target, there):
            raise AlreadyCommittedError(
                f"{target.url} holds a checkpoint of Megatron, with files that would pass for parts of the new one: "
                "export to another place"
            )
        _delete(target, [METADATA_KEY])
    new = {file.key for _, file in plan.files} | ({plan.values[0]} if plan.values else set())
    return sorted(key for key in there.keys() - new if _DATA_FILE.fullmatch(key))


def _delete(target: Store, keys: Sequence[str]) -> None:
    failed = target.delete(keys)
    if failed:
        key, reason = next(iter(failed.items()))
        raise StoreError(f"cannot delete {key} of an earlier export at {target.url}: {reason}", key=key)
