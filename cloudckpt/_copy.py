"""Copying: manifest -> objects, checked while they flow -> manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import (
    CloudckptError,
    CorruptChunkError,
    FormatError,
    NotFoundError,
    StoreError,
)
from cloudckpt.format.keys import PIN, key_in_run, new_attempt, parse_step, split_key
from cloudckpt.format.manifest import Manifest, decode_manifest, with_objects
from cloudckpt.leases import HeldLease
from cloudckpt.plan.copies import moved_objects
from cloudckpt.progress import Advance, Progress, start_progress
from cloudckpt.store.base import Store
from cloudckpt.store.paths import parent
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.copying import DamagedObjectError, ObjectCopy, Widths, copy_objects
from cloudckpt.transfer.survey import CopyStep, check_free, committed, survey
from cloudckpt.verify import check_objects


@dataclass(frozen=True)
class CopyReport:
    """What a copy did.

    ``steps``: of the checkpoints that it committed (None for one that was saved without a step), ``steps_present``:
    of those that were there already. ``num_objects``, ``nbytes``: sent; ``nbytes_present``: of objects that were
    there already.
    """

    url: str
    steps: list[int | None] = field(default_factory=list)
    steps_present: list[int | None] = field(default_factory=list)
    num_objects: int = 0
    nbytes: int = 0
    nbytes_present: int = 0


def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    trust_sizes: bool = False,
    src_options: Mapping[str, Any] | None = None,
    dst_options: Mapping[str, Any] | None = None,
    progress: Progress = None,
    config: Config | None = None,
) -> CopyReport:
    """Copy a checkpoint, or all committed steps of a run, to any other store. Not collective.

    Every object is compared with its size and CRC-32C while it flows, and durable before the manifest is put, last
    and only if absent. What a copy that was broken off has left is used again once it was read and compared;
    ``trust_sizes`` takes objects of the right size without reading them. A checkpoint that is there
    already is left alone, but what it lacks of its objects is sent.

    The copy of one checkpoint stands by itself: objects of other steps that it refers to become its own. In the copy
    of a run references stay what they are, since what they lead to is copied as well.

    ``src_options``, ``dst_options``: storage_options of the two stores. ``overwrite``: replace other
    checkpoints at the destination, which is AlreadyCommittedError otherwise. Raises CorruptChunkError and
    FormatError where the source is damaged (of a run the other steps are copied all the same), NotFoundError
    and StoreError.
    """
    places = _Places(src, dst, src_options, dst_options, config or Config())
    with closing(places.source()) as source, closing(places.target()) as target:
        steps = survey(source, target, overwrite=overwrite)
        done = _Done(target.url)
    faults: list[CloudckptError] = []
    with start_progress(progress, "copy", sum(step.nbytes for step in steps), show=True) as advance:
        for step in steps:
            try:
                if step.fault is not None:
                    raise step.fault
                _copy_step(places, step, done, overwrite=overwrite, trust_sizes=trust_sizes, advance=advance)
            except (CorruptChunkError, FormatError) as error:
                faults.append(error)
    if len(faults) > 1:
        raise FormatError(f"{len(faults)} of {len(steps)} steps could not be copied:\n" + "\n".join(map(str, faults)))
    if faults:
        raise faults[0]
    return done.report()


@dataclass(frozen=True)
class _Places:
    """Where to copy from and to. Steps of a run are stores of their own, as they are for a load."""

    src: str | os.PathLike[str]
    dst: str | os.PathLike[str]
    src_options: Mapping[str, Any] | None
    dst_options: Mapping[str, Any] | None
    config: Config

    def source(self, name: str = "") -> Store:
        return resolve(_below(self.src, name), self.src_options, self.config)

    def target(self, name: str = "", config: Config | None = None) -> Store:
        return resolve(_below(self.dst, name), self.dst_options, config or self.config)

    def target_step_dir(self, name: str) -> str | None:
        """The step directory that a checkpoint is copied to; None where it is no step of a run."""
        found = name or parent(os.fspath(self.dst))[1]
        return found if parse_step(found) is not None else None


@dataclass
class _Done:
    """What is at the destination for certain. ``objects``: keys below the run, or below the one checkpoint."""

    url: str
    objects: set[str] = field(default_factory=set)
    steps: list[int | None] = field(default_factory=list)
    present: list[int | None] = field(default_factory=list)
    num_sent: int = 0
    nbytes_sent: int = 0
    nbytes_present: int = 0

    def report(self) -> CopyReport:
        return CopyReport(self.url, self.steps, self.present, self.num_sent, self.nbytes_sent, self.nbytes_present)


def _below(url: str | os.PathLike[str], name: str) -> str | os.PathLike[str]:
    return f"{os.fspath(url).rstrip('/')}/{name}" if name else url


def _copy_step(
    places: _Places, step: CopyStep, done: _Done, *, overwrite: bool, trust_sizes: bool, advance: Advance
) -> None:
    with closing(places.source(step.name)) as source:
        try:
            data = catalog.read_manifest_bytes(source)
        except NotFoundError:
            if not step.name:
                raise
            return  # the run's retention has removed it in the meantime
        manifest = decode_manifest(data, source.url)
        entries = manifest.objects if step.name else moved_objects(manifest)
        if entries != manifest.objects:
            data = with_objects(data, entries)
            decode_manifest(data, f"the copy of {source.url}")
        wanted = [
            ObjectCopy(number, old.key, new.key, old.nbytes, old.crc32c)
            for number, (old, new) in enumerate(zip(manifest.objects, entries, strict=True))
        ]
        copies = [copy for copy in wanted if key_in_run(step.name, copy.target) not in done.objects]
        widths = Widths.of([copy.nbytes for copy in copies], source.buffered_bytes, places.config)
        with closing(places.target(step.name, widths.sending)) as target:
            check_free(target, "", manifest, overwrite=overwrite)
            present = committed(target, "")
            is_present = present == data
            # What a committed manifest lists needs no lease, and what is no step of a run no retention will touch.
            step_dir = None if is_present else places.target_step_dir(step.name)
            lease = HeldLease(target, new_attempt())
            try:
                if step_dir is not None:
                    lease.take({step_dir, *(split_key(copy.target)[0] or step_dir for copy in wanted)})
                sent = _send(
                    source, target, manifest, copies, widths, places.config, trust_sizes or is_present, advance
                )
                # Also one that was put since an earlier copy.
                _copy_pin(source, target)
                if not is_present:
                    _check_sizes(target, wanted)
                    with lease.committing():
                        commit_id = manifest.document.commit_id
                        catalog.commit_bytes(target, data, commit_id, overwrite=present is not None)
            finally:
                lease.release()
    done.objects.update(key_in_run(step.name, copy.target) for copy in copies)
    (done.present if is_present else done.steps).append(manifest.document.step)
    nbytes_sent = sum(copy.nbytes for copy in sent)
    done.num_sent += len(sent)
    done.nbytes_sent += nbytes_sent
    done.nbytes_present += sum(copy.nbytes for copy in copies) - nbytes_sent


def _send(
    source: Store,
    target: Store,
    manifest: Manifest,
    copies: Sequence[ObjectCopy],
    widths: Widths,
    config: Config,
    trust_sizes: bool,
    advance: Advance,
) -> list[ObjectCopy]:
    try:
        return copy_objects(
            source,
            target,
            copies,
            there=_sizes(target, copies),
            trust_sizes=trust_sizes,
            widths=widths,
            config=config,
            advance=advance,
        )
    except DamagedObjectError as error:
        raise _explained(source, manifest, error, config) from error


def _sizes(target: Store, copies: Sequence[ObjectCopy]) -> dict[str, int]:
    """Of the objects that the target has. Objects of siblings are asked for one by one: there are few."""
    sizes = {found.key: found.nbytes for found in target.list("")}
    for copy in copies:
        if split_key(copy.target)[0] is not None:
            try:
                sizes[copy.target] = target.size(copy.target)
            except NotFoundError:
                continue
    return sizes


def _check_sizes(target: Store, copies: Sequence[ObjectCopy]) -> None:
    """A slow copy can be taken for a dead save's leavings by who sweeps the destination: look before the commit."""
    sizes = _sizes(target, copies)
    lost = [copy.target for copy in copies if sizes.get(copy.target) != copy.nbytes]
    if lost:
        raise StoreError(
            f"{target.url}: {len(lost)} objects, such as {lost[0]}, were removed or changed while the others were "
            "copied; copy again",
            key=lost[0],
            retryable=True,
        )


def _copy_pin(source: Store, target: Store) -> None:
    """Before the commit, so that no retention ever sees the copy without its pin."""
    try:
        pin = source.get(PIN)
    except NotFoundError:
        return
    target.put(PIN, pin)


def _explained(source: Store, manifest: Manifest, error: DamagedObjectError, config: Config) -> CloudckptError:
    """What `verify` says of an object that was not what it should be."""
    faults = check_objects(source, manifest, [error.number], config)
    if not faults:
        return StoreError(f"{source.url}: {error}, but it is right when read again", key=error.key, retryable=True)
    fault = faults[0]
    text = f"cannot copy {source.url}: {fault}"
    if fault.path is None or fault.box is None:
        return FormatError(text)
    box = (fault.box.offset, fault.box.shape)
    return CorruptChunkError(text, array=fault.path, box=box, key=fault.key, byte_offset=fault.byte_offset)
