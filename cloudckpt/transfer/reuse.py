"""What an incremental save refers to: chosen by the coordinator, remembered by every rank for the next save."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cloudckpt import catalog
from cloudckpt.errors import FormatError, InvalidStateError, NotFoundError
from cloudckpt.format.keys import MANIFEST, parse_step
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.leases import HeldLease, referenced
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


@dataclass(frozen=True, eq=False)
class LastSave:
    """What one rank keeps of a committed save. ``places``: of its own chunks, with keys relative to the run.

    ``step_dirs``: all that the checkpoint relies on; known to the coordinator only.
    """

    save: KeptSave
    step_dir: str
    step: int | None
    places: Places
    step_dirs: frozenset[str]


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

    @property
    def kept(self) -> KeptSave | None:
        """The last save to the run, of which this rank knows the digests."""
        return None if self._last is None else self._last.save

    def choose(
        self, run: Store, lease: HeldLease, kept: Sequence[KeptSave | None], plan_id: str, arrays: ArrayPlan
    ) -> Base | None:
        """On the coordinator: a committed checkpoint of the run, which ``lease`` keeps from now on.

        It is the last save by this plan, if all ranks have kept that (``kept``: what they have); then nothing but the
        head of its manifest is read. Otherwise it is the run's newest checkpoint. None where there is none, or none
        with digests.
        """
        last = self._last
        if (
            last is not None
            and last.step_dir != self.step_dir
            and last.save.plan_id == plan_id
            and all(save == last.save for save in kept)
        ):
            lease.take(last.step_dirs)
            if _stands(run, last.step_dir, last.save.commit_id):
                return Base(last.step_dir, last.step, None)
        for name in reversed(catalog.step_dirs(run)):
            # What the URL itself holds is about to be replaced.
            manifest = None if name == self.step_dir else _read(run, name)
            if manifest is None:
                continue
            if manifest.columns.digest is None:
                break
            lease.take(_step_dirs_of(manifest, name))
            if _stands(run, name, manifest.document.commit_id):
                return Base(name, manifest.document.step, _places(manifest, arrays).in_run(name))
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
        step_dirs = frozenset() if manifest is None else _step_dirs_of(manifest, self.step_dir)
        places = receipt.places().in_run(self.step_dir)
        self._kept.keep(self.run, LastSave(save, self.step_dir, step, places, step_dirs))


def _step_dirs_of(manifest: Manifest, step_dir: str) -> frozenset[str]:
    """What a save that refers to a checkpoint relies on: where its manifest is, and where its objects are."""
    return frozenset({step_dir, *referenced(manifest, step_dir)})


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
