"""The only code that makes a checkpoint visible or invisible: reading, writing, finding and removing manifests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import msgspec

from cloudckpt.errors import AlreadyCommittedError, FormatError, NoBucketError, NotFoundError, StoreError
from cloudckpt.format.keys import MANIFEST, MAX_STEP, parse_step, split_key
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.plan.history import SavedStep, newest_first
from cloudckpt.store.base import Store, byte_view

HEAD_BYTES = 512
"""Holds all that `Head` has; no manifest is shorter."""

_LOOKED_AT = 1000
"""Keys of a place without a manifest, to tell what else it is; one page of a listing."""

WEAK_SETTLE_S = 0.1
"""On stores that ignore conditions: the least time that a rival's put gets to show up before the read-back."""


def read_manifest_bytes(store: Store) -> bytes:
    """Raises NotFoundError where nothing was committed, telling an unfinished save from nothing at all."""
    try:
        return store.get(MANIFEST)
    except NoBucketError:
        raise
    except NotFoundError as error:
        if _holds_objects(store):
            raise NotFoundError(
                f"{store.url} holds objects but no manifest: the checkpoint was never committed{_hint(store)}"
            ) from error
        raise NotFoundError(f"no checkpoint at {store.url}") from error


def read_manifest(store: Store) -> Manifest:
    return decode_manifest(read_manifest_bytes(store), store.url)


@dataclass(frozen=True)
class Head:
    """What the beginning of a manifest tells, of a checkpoint of a run; its seal was not checked."""

    format: str
    version: str
    commit_id: str
    attempt: str
    step: int | None = None
    branch: int = 0
    model_version: str | None = None
    topology: str | None = None


def read_head(run: Store, step_dir: str) -> Head:
    """Raises NotFoundError where the step is not committed, FormatError where its manifest is damaged."""
    key = f"{step_dir}/{MANIFEST}"
    try:
        data = b"".join(bytes(byte_view(part)) for part in run.stream(key, 0, HEAD_BYTES))
    except StoreError as error:
        if error.retryable:
            raise
        data = b""  # cut off, or ranges are refused: the whole tells
    scalars, found, _ = data.partition(b',"created":')
    if not found:  # of another writer, or with a very long model version
        scalars = run.get(key).strip()[:-1]
    try:
        head = msgspec.json.decode(scalars + b"}", type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{run.url}/{step_dir}: the manifest is damaged or cut off: {error}") from error
    if not 0 <= (head.step or 0) <= MAX_STEP or not 0 <= head.branch <= MAX_STEP:
        raise FormatError(f"{run.url}/{step_dir}: the manifest has an impossible step or branch")
    return head


def check_absent(store: Store, *, overwrite: bool) -> None:
    """Before any byte is written: is the URL free? Raises AlreadyCommittedError if not."""
    if overwrite:
        return
    try:
        store.size(MANIFEST)
    except NoBucketError:
        raise
    except NotFoundError:
        return
    except StoreError as error:
        # S3 refuses the question about an absent object if one may not list the bucket. The commit decides anyway.
        if error.retryable:
            raise
        return
    raise _already(store)


def commit(store: Store, manifest: Manifest, *, overwrite: bool) -> None:
    """Make the checkpoint exist; all its objects must be durable by now.

    Raises AlreadyCommittedError if another save was first. One put decides; a lost answer is
    settled by reading back whose commit id is there (docs/adr/0003).
    """
    commit_bytes(store, manifest.encode(), manifest.document.commit_id, overwrite=overwrite)


def commit_bytes(store: Store, data: bytes, commit_id: str, *, overwrite: bool) -> None:
    """`commit` of an encoded manifest: a copy keeps its bytes, also the fields that this version does not know."""
    if overwrite:
        try:
            store.put(MANIFEST, data)
        except StoreError as error:
            _settle(store, commit_id, error)
        return
    weak = not store.honours_conditions()
    start = time.monotonic()
    try:
        created = store.put_if_absent(MANIFEST, data)
    except StoreError as error:
        _settle(store, commit_id, error)
        return
    if created and not weak:
        return
    if created:
        put_s = time.monotonic() - start
        # A rival that also saw nothing there may have replaced ours: whoever is last wins, and all see who.
        time.sleep(max(WEAK_SETTLE_S, 4 * put_s))
    try:
        committed = _committed_id(store)
    except StoreError as error:
        raise _unknown(store, commit_id, error) from error
    if committed is None:
        raise _unknown(
            store, commit_id, StoreError(f"it was put and is not there: {store.url}/{MANIFEST}", retryable=True)
        )
    if committed != commit_id:
        raise _already(store)


class UnsettledError(StoreError):
    """The put of the manifest failed, and so did looking what came of it: ``commit_id`` may be there or not."""

    commit_id: str


def _settle(store: Store, commit_id: str, error: StoreError) -> None:
    """After a failed put: only what is there now tells whether it took effect."""
    try:
        committed = _committed_id(store)
    except StoreError:
        raise _unknown(store, commit_id, error) from error
    if committed != commit_id:
        raise error


def _committed_id(store: Store) -> str | None:
    """None where there is no manifest."""
    try:
        return read_manifest(store).document.commit_id
    except NotFoundError:
        return None
    except FormatError as error:
        # Garbage that was there before, or the answer to another request.
        raise StoreError(f"cannot read back what was committed: {error}", key=MANIFEST) from error


def _unknown(store: Store, commit_id: str, error: StoreError) -> UnsettledError:
    unsettled = UnsettledError(
        f"whether the checkpoint at {store.url} was committed is not known, look with `cloudckpt ls` before "
        f"saving it again: {error}",
        key=error.key,
        retryable=error.retryable,
    )
    unsettled.commit_id = commit_id
    return unsettled


def _already(store: Store) -> AlreadyCommittedError:
    return AlreadyCommittedError(
        f"{store.url} already holds a committed checkpoint; save to another URL, or pass overwrite=True"
    )


def _holds_objects(store: Store) -> bool:
    return next(iter(store.list("")), None) is not None


def _hint(store: Store) -> str:
    """At what is there instead of a checkpoint."""
    steps = [name for name in store.common_prefixes("") if parse_step(name) is not None]
    if steps:
        return f" (it looks like a run: its steps are {', '.join(steps[:5])})"
    keys = [info.key for info in islice(store.list(""), _LOOKED_AT) if "/" not in info.key]
    if ".metadata" in keys:
        return " (it looks like a checkpoint of torch DCP: see `cloudckpt import dcp`)"
    if any(key.endswith(".safetensors") for key in keys):
        return " (it has safetensors files: see load_hf and `cloudckpt import hf`)"
    return ""


@dataclass(frozen=True)
class StepEntry:
    """One directory of a run that is named like a step. ``manifest`` is None if it is not committed.

    ``nbytes``: what its own objects hold, those of an uncommitted one so far; ``fault`` is set for a manifest
    that cannot be read.
    """

    step: int
    name: str
    manifest: Manifest | None
    nbytes: int
    fault: str | None = None

    @property
    def nbytes_referenced(self) -> int:
        """Stored bytes of the chunks that lie in other steps."""
        return 0 if self.manifest is None else self.manifest.nbytes_referenced


def step_dirs(run: Store) -> list[str]:
    """The directories of a run that are named like steps, by number, committed or not."""
    found = [(step, name) for name in run.common_prefixes("") if (step := parse_step(name)) is not None]
    return [name for _, name in sorted(found)]


def list_steps(run: Store) -> Iterator[StepEntry]:
    """Every step of a run, by number. Names that are not steps are left alone."""
    for name in step_dirs(run):
        step = parse_step(name)
        assert step is not None
        try:
            manifest = decode_manifest(run.get(f"{name}/{MANIFEST}"), f"{run.url}/{name}")
        except NotFoundError:
            yield StepEntry(step, name, None, sum(o.nbytes for o in run.list(name)))
        except FormatError as error:
            yield StepEntry(step, name, None, sum(o.nbytes for o in run.list(name)), str(error))
        else:
            own = sum(entry.nbytes for entry in manifest.objects if split_key(entry.key)[0] is None)
            yield StepEntry(step, name, manifest, own)


@dataclass(frozen=True)
class Steps:
    """What stands in a run, in directories that are named like steps.

    ``committed``: newest first; ``uncommitted``: directories without a manifest; ``faults``: what is wrong with
    manifests that cannot be read, by directory.
    """

    committed: tuple[SavedStep, ...]
    uncommitted: tuple[str, ...]
    faults: Mapping[str, str]


def find_steps(run: Store, known: Mapping[str, SavedStep] | None = None) -> Steps:
    """The steps of a run by what their manifests say: one listing, and a short read of each manifest.

    ``known``: steps, by directory, that need not be read again.
    """
    known = known or {}
    names = step_dirs(run)
    faults: dict[str, str] = {}

    def find(name: str) -> SavedStep | None:
        try:
            return known.get(name) or read_step(run, name)
        except FormatError as error:
            faults[name] = str(error)
            return None

    with ThreadPoolExecutor(max_workers=run.num_streams, thread_name_prefix="cloudckpt") as pool:
        found = dict(zip(names, pool.map(find, names), strict=True))
    uncommitted = tuple(name for name, saved in found.items() if saved is None and name not in faults)
    return Steps(tuple(newest_first(saved for saved in found.values() if saved is not None)), uncommitted, faults)


def read_step(run: Store, name: str) -> SavedStep | None:
    """What the manifest in a step's directory says, None where there is none. Raises FormatError."""
    try:
        head = read_head(run, name)
    except NoBucketError:
        raise
    except NotFoundError:
        return None
    numbered = parse_step(name)
    step = head.step if head.step is not None else numbered
    assert step is not None
    return SavedStep(step, head.branch, name, head.commit_id)


def withdraw(run: Store, name: str) -> str | None:
    """Make the checkpoint in directory ``name`` invisible, whose objects may be deleted afterwards.

    Returns why it could not be done.
    """
    key = f"{name}/{MANIFEST}"
    return run.delete([key]).get(key)
