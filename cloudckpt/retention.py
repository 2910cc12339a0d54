"""Removing what a run no longer needs: steps that no policy keeps, and what dead attempts have left.

Race-free beside saves that go on: a step becomes invisible first, and only then is looked at who uses its objects, or
what lies about. `cloudckpt.leases` has the other side of it, docs/adr/0016 the reasons.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cloudckpt import catalog, leases
from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.format.keys import (
    MANIFEST,
    PIN,
    clock_dir,
    is_pack,
    is_scratch,
    key_in_run,
    parse_attempt,
    parse_lease,
    parse_step,
    split_run_key,
)
from cloudckpt.format.manifest import decode_manifest
from cloudckpt.plan.history import SavedStep
from cloudckpt.plan.retention import RetentionPolicy, removable
from cloudckpt.store.base import ObjectInfo, Store

_PIN_TEXT = b"cloudckpt: retention does not remove this checkpoint while this object is here\n"


@dataclass(frozen=True)
class Removal:
    """What was removed from a run, or in a dry run would be.

    ``steps``: oldest first. ``num_objects``, ``nbytes``: theirs, and those of dead attempts. ``failed``: why objects
    could not be deleted, by key in the run; they are tried again later. ``faults``: manifests that cannot be read, by
    directory; since they may refer to anything, nothing at all is removed beside one.
    """

    steps: tuple[int, ...] = ()
    num_objects: int = 0
    nbytes: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

    def complaints(self) -> Iterator[str]:
        """What somebody has to look at."""
        for name, fault in self.faults.items():
            yield f"nothing is removed while the manifest in {name} cannot be read; upgrade, or delete it: {fault}"
        for key, reason in self.failed.items():
            yield f"{key} could not be deleted, and is left for a later sweep: {reason}"


def pin(run: Store, name: str) -> None:
    """Keep retention from removing a step's directory. The pin lies within it, so that it goes along with copies."""
    run.put(f"{name}/{PIN}", _PIN_TEXT)


def unpin(run: Store, name: str) -> str | None:
    """Returns why it could not be done."""
    return run.delete([f"{name}/{PIN}"]).get(f"{name}/{PIN}")


def is_pinned(run: Store, name: str) -> bool:
    try:
        run.size(f"{name}/{PIN}")
    except NotFoundError:
        return False
    return True


def remove_checkpoint(parent: Store, name: str) -> None:
    """Remove the checkpoint in directory ``name``, which no other refers to: a step of a run is for `Retention`.

    What has no manifest is no checkpoint, and is left alone. Raises StoreError.
    """
    try:
        parent.size(f"{name}/{MANIFEST}")
    except NotFoundError:
        return
    if (reason := catalog.withdraw(parent, name)) is not None:
        raise StoreError(f"{parent.url}/{name} could not be removed: {reason}", key=f"{name}/{MANIFEST}")
    _delete(parent, [key for key in _keys(parent, name) if parse_attempt(split_run_key(key)[1]) is not None])


def remove_replaced(parent: Store, name: str) -> None:
    """Remove the packs that the committed checkpoint in directory ``name`` has replaced, while nobody saves to it.

    Raises StoreError.
    """
    manifest = decode_manifest(parent.get(f"{name}/{MANIFEST}"), f"{parent.url}/{name}")
    used = {key_in_run(name, entry.key) for entry in manifest.objects}
    _delete(parent, [key for key in _keys(parent, name) if is_pack(split_run_key(key)[1]) and key not in used])


def _keys(parent: Store, name: str) -> list[str]:
    return [info.key for info in parent.list(name)]


def _delete(parent: Store, keys: Sequence[str]) -> None:
    for key, reason in parent.delete(keys).items():
        raise StoreError(f"{key} in {parent.url} could not be deleted: {reason}", key=key)


class Retention:
    """Removes from the run whose root ``run`` is. For one thread at a time.

    ``orphan_age_s``: what belongs to no commit counts as dead once nothing of its attempt was written for so long,
    by the store's own clock. No save may take longer for one of its objects.
    """

    def __init__(self, run: Store, policies: Collection[RetentionPolicy], *, orphan_age_s: float) -> None:
        self._run = run
        self._policies = policies
        self._orphan_age_s = orphan_age_s
        self._uses: leases.Uses = {}
        self._left: dict[str, int] = {}
        """Objects of removed steps, with their sizes, that are still there: used by others, or not to be deleted."""

    def run(self, *, busy: Collection[str] = (), sweep: bool = True, dry_run: bool = False) -> Removal:
        """Remove what no policy keeps and, if ``sweep``, what dead attempts have left. Raises StoreError.

        ``busy``: directories that this process is saving to, which are left alone.
        """
        found = catalog.find_steps(self._run)
        steps = found.committed
        if not (sweep or self._left or removable(steps, self._policies, busy=busy)):
            return Removal(faults=found.faults)
        # Found while every step is still there.
        _, faults = leases.read_uses(self._run, self._uses)
        if faults:
            return Removal(faults=faults)
        failed: dict[str, str] = {}
        candidates = dict(self._left)
        victims = []
        for saved, objects in self._victims(steps, busy):
            if not dry_run and (reason := catalog.withdraw(self._run, saved.name)) is not None:
                failed[f"{saved.name}/{MANIFEST}"] = reason
                continue
            victims.append(saved)
            candidates.update(objects)
            if not dry_run:
                self._left.update(objects)
        dead: list[str] = []
        if sweep:
            orphans = dict(self._orphans(steps, busy, dry_run=dry_run))
            candidates.update(orphans)
            # Before it is looked at who uses what: a dead attempt's lease would protect even itself.
            dead = [key for key in orphans if parse_lease(key) is not None]
            if not dry_run:
                failed.update(self._run.delete(dead))
        unused = self._unused(candidates, victims if dry_run else (), dead if dry_run else ())
        if not dry_run:
            failed.update(self._run.delete(unused))
            self._left = {key: nbytes for key, nbytes in self._left.items() if key in failed or key not in unused}
        gone = [candidates[key] for key in unused if key not in failed]
        return Removal(tuple(saved.step for saved in victims), len(gone), sum(gone), failed)

    def _victims(self, steps: Sequence[SavedStep], busy: Collection[str]) -> Iterator[tuple[SavedStep, dict[str, int]]]:
        """What goes, each with all objects that it lists, by their keys in the run."""
        for saved in removable(steps, self._policies, busy=busy):
            if is_pinned(self._run, saved.name):
                continue
            try:
                manifest = decode_manifest(self._run.get(f"{saved.name}/{MANIFEST}"), f"{self._run.url}/{saved.name}")
            except NotFoundError:
                continue  # another process was faster
            # Another save may have replaced it: then this is not what the policies have judged.
            if manifest.document.commit_id == saved.commit_id:
                objects = {key_in_run(saved.name, entry.key): entry.nbytes for entry in manifest.objects}
                # Whatever a manifest claims to be its own: other files in a step's directory are somebody else's.
                yield saved, {key: n for key, n in objects.items() if parse_attempt(split_run_key(key)[1]) is not None}

    def _unused(self, candidates: Collection[str], unseen: Collection[SavedStep], dead: Collection[str]) -> set[str]:
        """What no committed step uses, but for ``unseen``, and no running save relies on.

        ``dead``: leases that do not count.
        """
        if not candidates:
            return set()
        without = [(saved.name, saved.commit_id) for saved in unseen]
        used = leases.in_use(self._run, self._uses, without=without, without_leases=dead)
        return {key for key in candidates if not used.holds(*split_run_key(key))}

    def _orphans(
        self, committed: Sequence[SavedStep], busy: Collection[str], *, dry_run: bool
    ) -> Iterator[tuple[str, int]]:
        """Objects of attempts in which nothing has happened for long, but for those that ``committed`` list."""
        listed: dict[str, set[str]] = defaultdict(set)
        for saved in committed:
            for name, keys in self._uses.get((saved.name, saved.commit_id), {}).items():
                listed[name] |= keys
        try:
            now_s = self._store_time_s()
        except StoreError:
            if not dry_run:
                raise
            now_s = time.time()  # who may only read may ask all the same what would go
        leftovers = defaultdict(list)
        for info in self._run.leftovers(""):
            leftovers[split_run_key(info.key)[0]].append(info)
        for name in {*self._run.common_prefixes(""), *leftovers}:
            if name in busy or (parse_step(name) is None and not is_scratch(name)):
                continue
            for infos in _by_attempt([*self._run.list(name), *leftovers[name]]):
                times_s = [info.modified_s for info in infos]
                if min(times_s) > 0 and now_s - max(times_s) > self._orphan_age_s:
                    yield from (
                        (info.key, info.nbytes) for info in infos if split_run_key(info.key)[1] not in listed[name]
                    )

    def _store_time_s(self) -> float:
        """What time it is where the objects are: the clocks of nodes may be wrong. 0 where the store does not tell."""
        name = clock_dir()
        self._run.put(f"{name}/now", b"?")
        try:
            return max((info.modified_s for info in self._run.list(name)), default=0.0)
        finally:
            self._run.delete([f"{name}/now"])


def _by_attempt(infos: Sequence[ObjectInfo]) -> Iterator[Sequence[ObjectInfo]]:
    """What a save makes, attempt by attempt, and scratch objects one by one. All else is not this library's."""
    attempts: dict[str, list[ObjectInfo]] = defaultdict(list)
    for info in infos:
        attempt = parse_attempt(split_run_key(info.key)[1])
        if attempt is not None:
            attempts[attempt].append(info)
        elif is_scratch(info.key):
            yield [info]
    yield from attempts.values()
