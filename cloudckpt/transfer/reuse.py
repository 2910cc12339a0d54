"""What an incremental save refers to: chosen by the coordinator, remembered by every rank for the next save."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloudckpt import catalog
from cloudckpt.errors import FormatError, InvalidStateError, NotFoundError
from cloudckpt.format.keys import MANIFEST, key_in_run, parse_step
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.leases import HeldLease
from cloudckpt.plan.incremental import match_chunks
from cloudckpt.store.base import Store
from cloudckpt.store.paths import mask, parent
from cloudckpt.transfer.job import ArrayPlan
from cloudckpt.transfer.places import Base, KeptSave, Places
from cloudckpt.transfer.planning import Assignment
from cloudckpt.transfer.upload import UploadReceipt

RUNS_KEPT = 4
"""Per group of ranks: a job may save to several runs in turn."""

_FLOATS = ("bfloat", "float", "complex")


Needed = Mapping[str, Mapping[str, int]]
"""Sizes of objects by their keys in the run, by step directory."""


@dataclass(frozen=True, eq=False)
class LastSave:
    """What one rank keeps of a committed save. ``places``: of its own chunks, with keys relative to the run.

    ``needed``: all that the checkpoint relies on, see `_needed`; known to the coordinator only.
    """

    save: KeptSave
    step_dir: str
    step: int | None
    places: Places
    needed: Needed


class LastSaves:
    """The last save to each run, of one group of ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_run: OrderedDict[str, LastSave] = OrderedDict()

    def get(self, run: str) -> LastSave | None:
        with self._lock:
            return self._by_run.get(run)

    def keep(self, run: str, last: LastSave) -> None:
        with self._lock:
            self._by_run[run] = last
            self._by_run.move_to_end(run)
            while len(self._by_run) > RUNS_KEPT:
                self._by_run.popitem(last=False)


class Reuse:
    """One incremental save, as one rank has it."""

    def __init__(self, url: str | os.PathLike[str], kept: LastSaves) -> None:
        """Raises InvalidStateError where the URL is not that of a step in a run."""
        self.run, self.step_dir = _split_url(url)
        self._kept = kept
        self._last = kept.get(self.run)
        self._assignment: Assignment | None = None
        self._damage: str | None = None

    @property
    def kept(self) -> KeptSave | None:
        """The last save to the run, of which this rank knows the digests."""
        return None if self._last is None else self._last.save

    def choose(
        self, run: Store, lease: HeldLease, kept: Sequence[KeptSave | None], plan_id: str, arrays: ArrayPlan
    ) -> Base | None:
        """On the coordinator: a committed checkpoint of the run, which ``lease`` keeps from now on.

        It is the last save by this plan, if all ranks have kept that (``kept``: what they have); then nothing but the
        head of its manifest is read. Otherwise it is the run's newest checkpoint. None where there is none, or it has
        no digests, or lacks objects: damage must not be passed on from step to step.
        """
        last = self._last
        if (
            last is not None
            and last.step_dir != self.step_dir
            and last.save.plan_id == plan_id
            and all(save == last.save for save in kept)
        ):
            lease.take(last.needed)
            if _stands(run, last.step_dir, last.save.commit_id) and _missing(run, last.needed) is None:
                return Base(last.step_dir, last.step, None)
        for saved in catalog.find_steps(run).committed:  # newest first, also after the run has gone back to a step
            name = saved.name
            # What the URL itself holds is about to be replaced.
            manifest = None if name == self.step_dir else _read(run, name)
            if manifest is None:
                continue
            if manifest.columns.digest is None:
                break
            needed = _needed(manifest, name)
            lease.take(needed)
            if not _stands(run, name, manifest.document.commit_id):
                continue
            missing = _missing(run, needed)
            if missing is None:
                return Base(name, manifest.document.step, _places(manifest, arrays).in_run(name))
            self._damage = (
                f"{missing}, which {name} needs, is missing or cut off in {run.url}: that step cannot be loaded, and "
                f"{self.step_dir} is written in full; step directories must not be deleted while others refer to them"
            )
            break
        lease.release()
        return None

    def accept(self, assignment: Assignment) -> Places:
        """What need not be written, with keys as the new checkpoint has them."""
        self._assignment = assignment
        base = assignment.base
        if base is None:
            return Places.none()
        if base.places is not None:
            return base.places.seen_from(self.step_dir)
        assert self._last is not None, "the coordinator saw that all ranks have kept it"
        return self._last.places.seen_from(self.step_dir)

    def notes(self, manifest: Manifest) -> Iterator[str]:
        """On the coordinator: what the caller should be warned of."""
        if self._damage is not None:
            yield self._damage
        base = None if self._assignment is None else self._assignment.base
        if base is not None and not _has_trained(manifest):
            yield (
                f"all floating-point tensors of step {manifest.document.step} equal those of step {base.step}: "
                "is the optimizer stepping, and is this the state that is trained?"
            )

    def remember(self, commit_id: str, step: int | None, receipt: UploadReceipt, manifest: Manifest | None) -> None:
        """The save was committed. ``receipt``: this rank's. ``manifest``: None but on the coordinator."""
        assert self._assignment is not None
        save = KeptSave(self._assignment.plan_id, commit_id)
        needed = {} if manifest is None else _needed(manifest, self.step_dir)
        places = receipt.places().in_run(self.step_dir)
        self._kept.keep(self.run, LastSave(save, self.step_dir, step, places, needed))


def _needed(manifest: Manifest, step_dir: str) -> Needed:
    """What a save that refers to a checkpoint relies on: where its manifest is, and all objects that it lists."""
    found: dict[str, dict[str, int]] = {step_dir: {}}
    for entry in manifest.objects:
        key = key_in_run(step_dir, entry.key)
        found.setdefault(key.partition("/")[0], {})[key] = entry.nbytes
    return found


def _missing(run: Store, needed: Needed) -> str | None:
    """An object that is not there, or not in its size."""
    for step_dir, objects in needed.items():
        sizes = {info.key: info.nbytes for info in run.list(step_dir)} if objects else {}
        for key, nbytes in objects.items():
            if sizes.get(key) != nbytes:
                return key
    return None


def _split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    run, name = parent(os.fspath(url))
    if not run or parse_step(name) is None:
        raise InvalidStateError(
            "incremental=True refers to other steps of the same run: the URL must be that of a step in a run, "
            f"such as .../run/step-00001000, and not {mask(os.fspath(url))}"
        )
    return run, name


def _read(run: Store, step_dir: str) -> Manifest | None:
    try:
        return decode_manifest(run.get(f"{step_dir}/{MANIFEST}"), f"{run.url}/{step_dir}")
    except (NotFoundError, FormatError):
        return None  # not committed, or of no use here


def _stands(run: Store, step_dir: str, commit_id: str) -> bool:
    try:
        return catalog.read_head(run, step_dir).commit_id == commit_id
    except (NotFoundError, FormatError):
        return False


def _places(manifest: Manifest, plan: ArrayPlan) -> Places:
    dtypes = [spec.dtype for spec in plan.leaves]
    return Places.of_base(manifest, match_chunks(plan.names, dtypes, plan.chunks.grids, plan.compression, manifest))


def _has_trained(manifest: Manifest) -> bool:
    """Whether this save wrote any chunk of a floating-point tensor, or there is none to write."""
    is_new = manifest.is_new[manifest.columns.object]
    floats = [
        is_new[entry.first_chunk : entry.first_chunk + grid.num_chunks]
        for entry, grid in zip(manifest.arrays, manifest.grids, strict=True)
        if entry.dtype.startswith(_FLOATS)
    ]
    found = np.concatenate([np.zeros(0, dtype=bool), *floats])
    return bool(found.any()) or not len(found)
