"""What running saves rely on, and so what of a run is in use: docs/format.md, "References".

Two sides of one agreement. A save that wants to refer to a committed checkpoint puts a lease first and looks afterwards
whether the checkpoint is still there. Whoever deletes takes manifests away first and looks for leases afterwards. So at
least one of the two sees the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from cloudckpt import catalog
from cloudckpt.errors import AlreadyCommittedError, FormatError, NotFoundError, StoreError
from cloudckpt.format.keys import MANIFEST, lease_key, parse_lease, split_key
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.store.base import Store

FORMAT = "cloudckpt-lease"


class _Document(msgspec.Struct, frozen=True):
    format: str
    step_dirs: tuple[str, ...]


class HeldLease:
    """The lease of one attempt, as the save has it. ``checkpoint``: where the attempt writes."""

    def __init__(self, checkpoint: Store, attempt: str) -> None:
        self._store = checkpoint
        self._key = lease_key(attempt)
        self._held = False

    def take(self, step_dirs: Iterable[str]) -> None:
        """Rely on these from now on, and on no others. What is in them must be looked at after this."""
        document = _Document(FORMAT, tuple(sorted(step_dirs)))
        self._held = True  # the answer to the put may be lost
        self._store.put(self._key, msgspec.json.encode(document))

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Around the put of the manifest. Raises StoreError if the lease was removed, as that of a dead attempt."""
        self._check()
        try:
            yield
        except AlreadyCommittedError:
            raise
        except BaseException:
            self._held = False  # it may have been committed all the same: the lease stays
            raise

    def _check(self) -> None:
        if not self._held:
            return
        try:
            self._store.size(self._key)
        except NotFoundError as error:
            raise StoreError(
                f"the lease {self._key} in {self._store.url} was removed while the save was running: the save passed "
                "for dead, and what it refers to may be gone; save again, and remove orphans at a greater age only",
                key=self._key,
                retryable=False,
            ) from error

    def release(self) -> None:
        """The outcome is known. What cannot be removed now is left to the sweep."""
        if self._held:
            self._held = False
            with contextlib.suppress(NotFoundError, StoreError):
                self._store.delete([self._key])


@dataclass(frozen=True)
class Lease:
    """One that stands in a run. ``modified_s``: by the store's clock. ``step_dirs``: None if it cannot be read."""

    step_dir: str
    attempt: str
    modified_s: float
    step_dirs: frozenset[str] | None

    @property
    def key(self) -> str:
        """Relative to the run."""
        return f"{self.step_dir}/{lease_key(self.attempt)}"


def live(run: Store) -> tuple[Lease, ...]:
    """All leases of a run, those of dead attempts that nobody has removed yet included. Lists all step directories."""
    found = []
    # One by one: what else lies in a run may be large, or not to be read, and a step may be a link to another disk.
    for step_dir in catalog.step_dirs(run):
        for info in run.list(step_dir):
            parsed = parse_lease(info.key)
            if parsed is None:
                continue
            try:
                step_dirs = _step_dirs(run.get(info.key))
            except NotFoundError:
                continue  # released since the listing
            except StoreError as error:
                if error.retryable:
                    raise
                step_dirs = None
            found.append(Lease(*parsed, info.modified_s, step_dirs))
    return tuple(found)


def _step_dirs(data: bytes) -> frozenset[str] | None:
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return frozenset(document.step_dirs) if document.format == FORMAT else None


def referenced(manifest: Manifest, step_dir: str) -> dict[str, set[str]]:
    """The objects that a manifest lists: keys, by the step directory that they lie in. ``step_dir``: its own."""
    found: dict[str, set[str]] = {}
    for entry in manifest.objects:
        sibling, below = split_key(entry.key)
        found.setdefault(sibling or step_dir, set()).add(below)
    return found


Uses = dict[tuple[str, str], Mapping[str, set[str]]]
"""By step directory and commit id: what `referenced` says."""


@dataclass(frozen=True)
class InUse:
    """``objects``: keys that committed manifests list, by step directory. ``step_dirs``: those that leases name.

    ``everything``: a lease or a manifest cannot be read, so that no object can be said to be in use by nobody.
    """

    objects: Mapping[str, set[str]]
    step_dirs: frozenset[str]
    everything: bool

    def holds(self, step_dir: str, key: str) -> bool:
        """Whether an object must stay. ``key``: below the step directory."""
        return self.everything or step_dir in self.step_dirs or key in self.objects.get(step_dir, ())


def in_use(
    run: Store,
    uses: Uses | None = None,
    *,
    without: Iterable[tuple[str, str]] = (),
    without_leases: Collection[str] = (),
) -> InUse:
    """What must not be deleted from a run. What is to go must have lost its manifest before this is called.

    ``uses``: of earlier calls for the same run, so that no manifest is read twice; it is brought up to date.
    ``without``: (step directory, commit id) of what would be in use by itself only, and ``without_leases``: keys of
    leases, to look ahead.
    """
    uses = {} if uses is None else uses
    before, faults_before = read_uses(run, uses)
    leases = live(run)
    after, faults_after = read_uses(run, uses)
    objects: dict[str, set[str]] = {}
    for use in (before | after).difference(without):
        for step_dir, keys in uses[use].items():
            objects.setdefault(step_dir, set()).update(keys)
    for gone in uses.keys() - after:
        del uses[gone]
    named = [lease.step_dirs for lease in leases if lease.key not in without_leases]
    return InUse(
        objects,
        frozenset(name for names in named for name in names or ()),
        everything=bool(faults_before or faults_after) or None in named,
    )


def read_uses(run: Store, uses: Uses) -> tuple[set[tuple[str, str]], dict[str, str]]:
    """The checkpoints that stand now, all of them in ``uses``; and what is wrong with manifests that cannot be read."""
    found = set()
    faults: dict[str, str] = {}
    for step_dir in catalog.step_dirs(run):
        try:
            use = (step_dir, catalog.read_head(run, step_dir).commit_id)
            if use not in uses:
                manifest = decode_manifest(run.get(f"{step_dir}/{MANIFEST}"), f"{run.url}/{step_dir}")
                use = (step_dir, manifest.document.commit_id)
                uses[use] = referenced(manifest, step_dir)
        except NotFoundError:
            continue
        except FormatError as error:
            faults[step_dir] = str(error)
            continue
        found.add(use)
    return found, faults
