"""What lies before a copy: which steps there are, and whether their places are free."""

from __future__ import annotations

from dataclasses import dataclass

from cloudckpt import catalog
from cloudckpt.errors import AlreadyCommittedError, FormatError, InvalidStateError, NoBucketError, NotFoundError
from cloudckpt.format.keys import MANIFEST, key_in_run
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.store.base import Store


@dataclass(frozen=True)
class CopyStep:
    """A checkpoint to copy. ``name``: its directory in the run, empty for a checkpoint by itself.

    ``nbytes``: of the objects that no step before it has.
    """

    name: str
    nbytes: int
    fault: FormatError | None = None


def survey(source: Store, target: Store, *, overwrite: bool) -> list[CopyStep]:
    """What is to be copied from the one URL to the other. Refuses what cannot be, before anything is."""
    if source.url == target.url:
        raise InvalidStateError(f"{source.url} cannot be copied onto itself")
    try:
        data = source.get(MANIFEST)
    except NoBucketError:
        raise
    except NotFoundError:
        return _survey_run(source, target, overwrite=overwrite)
    manifest = decode_manifest(data, source.url)
    if _run_at(target):
        raise InvalidStateError(
            f"{target.url} is a run: copy the checkpoint {source.url} to a step of it, such as step-00001000"
        )
    check_free(target, "", manifest, overwrite=overwrite)
    return [CopyStep("", sum(entry.nbytes for entry in manifest.objects))]


def _survey_run(source: Store, target: Store, *, overwrite: bool) -> list[CopyStep]:
    if committed(target, "") is not None:
        raise InvalidStateError(f"{target.url} is a checkpoint: the run {source.url} needs a place of its own")
    steps: list[CopyStep] = []
    seen: set[str] = set()
    for entry in catalog.list_steps(source):
        if entry.manifest is not None:
            check_free(target, entry.name, entry.manifest, overwrite=overwrite)
            sizes = {key_in_run(entry.name, o.key): o.nbytes for o in entry.manifest.objects}
            steps.append(CopyStep(entry.name, sum(n for key, n in sizes.items() if key not in seen)))
            seen.update(sizes)
        elif entry.fault is not None:
            steps.append(CopyStep(entry.name, 0, FormatError(entry.fault)))
    if not steps:
        raise NotFoundError(f"{source.url} is neither a checkpoint nor a run with a committed step")
    return steps


def _run_at(store: Store) -> bool:
    """Whether checkpoints lie below the URL, and none at it."""
    return committed(store, "") is None and next(catalog.list_steps(store), None) is not None


def committed(store: Store, name: str) -> bytes | None:
    """The manifest that stands at a URL, or in a directory below it."""
    try:
        return store.get(f"{name}/{MANIFEST}" if name else MANIFEST)
    except NotFoundError:
        return None


def check_free(target: Store, name: str, manifest: Manifest, *, overwrite: bool) -> None:
    """Raises AlreadyCommittedError where another checkpoint stands; a copy of the same one is none."""
    data = committed(target, name)
    if data is None or overwrite:
        return
    where = f"{target.url}/{name}" if name else target.url
    try:
        commit_id = decode_manifest(data, where).document.commit_id
    except FormatError as error:
        raise AlreadyCommittedError(f"a manifest that cannot be read is in the way of the copy: {error}") from error
    if commit_id != manifest.document.commit_id:
        raise AlreadyCommittedError(
            f"{where} already holds another checkpoint (commit id {commit_id}, not {manifest.document.commit_id}); "
            "copy to another URL, or pass overwrite=True"
        )
