"""Hugging Face out: manifest -> names and files -> streams of safetensors -> the index, last."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from cloudckpt import catalog
from cloudckpt._export import ExportFile, sending_config, share_out, write_files
from cloudckpt.config import Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, InvalidStateError, NotFoundError, StoreError
from cloudckpt.format.manifest import Manifest
from cloudckpt.interop.foreign import Foreign
from cloudckpt.interop.hf_export import HfFile, HfPlan, casts_by_pattern, plan_hf
from cloudckpt.plan.hf_shards import INDEX, SINGLE, Succession, of_export, parse_size, succeed
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.selection import select
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.group import Group, make_group
from cloudckpt.pytorch.rounds import check_alike
from cloudckpt.pytorch.runs import RunReader
from cloudckpt.store.base import Buffer, Store
from cloudckpt.store.paths import mask, parent, scheme_of
from cloudckpt.store.resolve import resolve, url_text
from cloudckpt.transfer.files import (
    SideFile,
    check_distinct,
    copy_file,
    differing,
    file_at,
    files_below,
    options_for,
)

if TYPE_CHECKING:
    import torch.distributed as dist

Url = str | os.PathLike[str]


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote. ``files``: those of weights, ``nbytes``: of their tensors.

    ``tied``: names that were left out, since another, their value, refers to the same stored tensor. ``copied``: other
    files, those included that were there already. ``removed``: what was deleted of an earlier export.
    """

    url: str
    files: list[str]
    num_tensors: int
    nbytes: int
    tied: dict[str, str] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Work:
    """What the coordinator tells the others."""

    manifest: Manifest
    plan: HfPlan


@dataclass(frozen=True, eq=False)
class _Lead:
    """What the coordinator keeps to itself. ``others``: files to copy, of ``copied``."""

    others: Sequence[SideFile]
    copied: Sequence[str]
    succession: Succession


def export_hf(
    url: Url,
    dst: Url,
    *,
    include: str | Iterable[str] | None = None,
    rename: Rules | None = None,
    dtype: Any = None,
    max_shard_bytes: int | str = 5_000_000_000,
    files: Url | Iterable[Url] = (),
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    src_options: Mapping[str, Any] | None = None,
    dst_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress = None,
    config: Config | None = None,
) -> ExportReport:
    """Write the tensors of the checkpoint at ``url`` as safetensors at ``dst``. Collective over ``group`` (all ranks).

    ``include``: patterns (``fnmatch``) of stored dotted paths; what is below a match comes with it. ``rename``: rules
    for these, as for `load`. ``dtype``: a float type for all floats, with the values of ``Tensor.to``, or types by
    pattern of new names. Everything that is included must be a tensor of a type that safetensors has. Of tied tensors
    the first name is written.

    One file, or, where it would hold more than ``max_shard_bytes`` (a number, or "5GB"), several and an index, cut as
    transformers cuts them. ``metadata``: texts for the head of each file, beside ``{"format": "pt"}``. ``files``:
    other files to copy, such as ``config.json``, or folders, of which all but weights are copied.

    Files are streamed, by ranks that take whole files: about half of ``Config.memory_bytes`` is held. The index (or
    the single file) comes last. Where ``dst`` holds weights already, ``overwrite`` replaces them all: a reader sees the
    old export, the new one, or none, at any time and after any crash. Every chunk that is read is verified.

    Raises InvalidStateError and NotFoundError before anything is written where the state, a name or a file does not
    fit, AlreadyCommittedError where weights are there, CorruptChunkError, StoreError.
    """
    config = config or Config()
    included = include if include is None or isinstance(include, str) else [*include]
    ranks = make_group(group, config.rank_timeout_s)
    with ExitStack() as stack:

        def opened(place: Url, options: Mapping[str, Any] | None, settings: Config) -> Store:
            return stack.enter_context(contextlib.closing(resolve(place, options, settings)))

        stores: list[Store] = []
        leads: list[_Lead] = []  # on the coordinator

        def begin() -> dict[str, Any]:
            stores.extend((opened(url, src_options, config), opened(dst, dst_options, sending_config(config))))
            return {
                "url": os.fspath(url),
                "dst": os.fspath(dst),
                "include": included,
                "dtype": dtype,
                "max_shard_bytes": max_shard_bytes,
                "overwrite": overwrite,
            }

        def find(parts: Sequence[Mapping[str, Any]]) -> _Work:
            check_alike("export_hf()", parts)
            source, target = stores
            manifest = catalog.read_manifest(source)
            about = {"format": "pt", **_texts(metadata)}
            selection = select(manifest, included, rename)
            plan = plan_hf(selection, casts_by_pattern(dtype), parse_size(max_shard_bytes), about)
            schemes = ((_scheme(url), src_options), (_scheme(dst), dst_options))
            others = [
                found
                for place in ([files] if isinstance(files, (str, os.PathLike)) else files)
                for found in _side_files(place, lambda p: opened(p, options_for(_scheme(p), *schemes), config))
            ]
            leads.append(_prepare(target, plan, others, overwrite=overwrite))
            return _Work(manifest, plan)

        work = ranks.round(begin, find)
        source, target = stores
        export = _Export(ranks, source, target, work, leads[0] if leads else None, config)
        export.write(progress)
        return export.publish()


class _Export:
    """The part of an export that writes. ``lead``: on the coordinator."""

    def __init__(
        self, ranks: Group, source: Store, target: Store, work: _Work, lead: _Lead | None, config: Config
    ) -> None:
        self._ranks = ranks
        self._source = source
        self._target = target
        self._work = work
        self._lead = lead
        self._config = config

    def write(self, progress: Progress) -> None:
        """All files of weights: a round. A single one is what makes the export visible, so that others come before."""
        plan = self._work.plan
        share = share_out([file.data_nbytes for file in plan.files], self._ranks.size)[self._ranks.rank]
        mine = [self._file(plan.files[number]) for number in share]
        written: list[str] = []

        def send() -> None:
            with start_progress(
                progress, "export", sum(file.nbytes for file in mine), show=self._ranks.rank == 0
            ) as advance:
                write_files(
                    mine,
                    self._source,
                    Foreign(self._work.manifest),
                    self._target,
                    config=self._config,
                    cancel=self._ranks.cancel,
                    advance=advance,
                    written=written,
                )

        try:
            self._ranks.round(send, lambda _: None)
        except CloudckptError:
            if plan.index is not None:  # without an index nobody sees them
                with contextlib.suppress(CloudckptError):
                    self._target.delete(written)
            raise

    def publish(self) -> ExportReport:
        """The index, and the end of an earlier export: the last round."""

        def conclude(_: Sequence[None]) -> ExportReport:
            lead, plan, target = self._lead, self._work.plan, self._target
            assert lead is not None
            if plan.index is not None:
                self._bring_others()
                target.put(INDEX, plan.index)
            for keys in lead.succession.last:
                _delete(target, keys)
            made = {*(file.key for file in plan.files), *(() if plan.index is None else (INDEX,))}
            return ExportReport(
                url=target.url,
                files=[file.key for file in plan.files],
                num_tensors=plan.num_tensors,
                nbytes=plan.data_nbytes,
                tied=plan.tied,
                copied=[*lead.copied],
                removed=[key for key in lead.succession.removed if key not in made],
            )

        return self._ranks.round(lambda: None, conclude, is_last=True)

    def _file(self, file: HfFile) -> ExportFile:
        def render(reader: RunReader) -> Iterator[Buffer]:
            return chain([file.header], reader.blocks())

        finish = self._bring_others if self._work.plan.index is None else None
        return ExportFile(file.key, len(file.header) + file.data_nbytes, file.sources, render, finish)

    def _bring_others(self) -> None:
        """The other files, on the coordinator: just before the new export becomes visible."""
        assert self._lead is not None, "share_out() gives a single file to the first rank"
        for key in self._lead.succession.before_files:
            _delete(self._target, [key])
        for file in self._lead.others:
            copy_file(file, self._target)


def _texts(metadata: Mapping[str, str] | None) -> dict[str, str]:
    found: dict[Any, Any] = dict(metadata or {})
    if not all(isinstance(key, str) and isinstance(text, str) for key, text in found.items()):
        raise InvalidStateError(
            f"metadata must be a dict of strings: safetensors takes nothing else, not {found!r:.200}"
        )
    return found


def _scheme(url: Url) -> str | None:
    scheme = scheme_of(url_text(url))
    return None if scheme in ("file", "local") else scheme


def _side_files(url: Url, open_store: Any) -> list[SideFile]:
    """A file, or what is in a folder."""
    text = url_text(url)
    folder, name = parent(text)
    if folder and name:
        with contextlib.suppress(NotFoundError):
            return [file_at(open_store(folder), name)]
    found = files_below(open_store(text))
    if not found:
        raise NotFoundError(f"files: there is no file {mask(text)}, and no folder with files that are no weights")
    return found


def _prepare(target: Store, plan: HfPlan, others: Sequence[SideFile], *, overwrite: bool) -> _Lead:
    """Find out what is in the way, and delete what has to go before anything else."""
    check_distinct(others)
    there = {found.key: found.nbytes for found in target.list("")}
    new = [file.key for file in plan.files]
    taken = sorted(of_export([file.key for file in others], ()))
    if taken:
        raise InvalidStateError(f"files: {', '.join(taken)} would be taken for weights of this export")
    indexed = _indexed(target) if INDEX in there else set()
    old = sorted(of_export(there, indexed or ()))
    if old and not overwrite:
        shown = ", ".join(old[:5]) + (f" and {len(old) - 5} more" if len(old) > 5 else "")
        raise AlreadyCommittedError(
            f"{target.url} holds another export: {shown}; overwrite=True (--overwrite) replaces all of it"
        )
    changed = differing(others, target, there)
    _check_writable(target, must_delete=bool(old))
    succession = succeed(
        old,
        new,
        indexed=() if SINGLE in old else indexed,
        replaces_files=any(file.key in there for file in changed),
    )
    for key in succession.first:
        _delete(target, [key])
    return _Lead(changed, [file.key for file in others], succession)


def _indexed(target: Store) -> set[str] | None:
    """The files that the index of an earlier export leads to, None where it cannot be told."""
    try:
        return {*json.loads(target.get(INDEX))["weight_map"].values()}
    except (NotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _check_writable(target: Store, *, must_delete: bool) -> None:
    """What may not be written here is to be told before gigabytes are read."""
    key = f".cloudckpt-probe-{secrets.token_hex(8)}"
    target.put(key, b"probe")
    failed = target.delete([key])
    if failed and must_delete:
        raise StoreError(
            f"{target.url} lets objects be written, but not deleted ({failed[key]}), so that the export that is there "
            "cannot be replaced: export to another place",
            key=key,
        )


def _delete(target: Store, keys: Sequence[str]) -> None:
    failed = target.delete(keys)
    if failed:
        key, reason = next(iter(failed.items()))
        raise StoreError(f"cannot delete {key} of an earlier export at {target.url}: {reason}", key=key)
