"""Steps that were saved beside their run, since its store was out of reach, are brought to where they belong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt import catalog
from cloudckpt.config import Config
from cloudckpt.errors import AlreadyCommittedError, NotFoundError
from cloudckpt.format.keys import MANIFEST, parse_attempt
from cloudckpt.format.manifest import Manifest
from cloudckpt.plan.history import SavedStep
from cloudckpt.pytorch.group import Group
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer.copying import ObjectCopy, Widths, copy_objects

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A root URL of a run and what it takes to reach it. Plain data."""

    url: str
    storage_options: Mapping[str, Any] | None = None

    @contextlib.contextmanager
    def open(self, config: Config, name: str = "") -> Iterator[Store]:
        """``name``: a step's directory, to be the root of the store."""
        store = resolve(f"{self.url}/{name}" if name else self.url, self.storage_options, config)
        try:
            yield store
        finally:
            store.close()


def bring_back(ranks: Group, run: Place, fallback: Place, *, config: Config) -> list[int]:
    """Copy what is committed in ``fallback`` to ``run``, and remove it there. Collective; returns the steps.

    The disks of nodes may differ: every rank copies what it finds on its own. A step of which some object is on no
    rank's disk is left as it is, with a warning. Raises what the stores raise; what is done by then stays done.
    """
    waiting = ranks.round(lambda: None, lambda _: _waiting(run, fallback, config))
    brought = []
    for saved, copies in waiting:
        if _bring(ranks, run, fallback, saved, copies, config):
            brought.append(saved.step)
    return brought


def give_up(ranks: Group, fallback: Place, num_waiting: int, *, config: Config) -> None:
    """Remove all but the newest steps of a fallback, whose disks are not to fill up. Collective."""

    def withdraw() -> list[str]:
        with fallback.open(config) as store:
            old = catalog.find_steps(store).committed[num_waiting:]
            return [saved.name for saved in old if catalog.withdraw(store, saved.name) is None]

    names = ranks.round(lambda: None, lambda _: withdraw())
    for name in names:
        with fallback.open(config, name) as checkpoint:
            _remove(checkpoint)
        if ranks.rank == 0:
            logger.warning("%s/%s will never be brought to its run: newer steps wait there", fallback.url, name)


Waiting = Sequence[tuple[SavedStep, Sequence[ObjectCopy]]]


def _waiting(run: Place, fallback: Place, config: Config) -> Waiting:
    """On the coordinator: the steps that are only in the fallback, oldest first, with their objects."""
    with fallback.open(config) as source, run.open(config) as target:
        committed = catalog.find_steps(source).committed
        found = []
        for saved in reversed(committed):
            there = catalog.read_step(target, saved.name)
            if there is not None and there.commit_id != saved.commit_id:
                logger.warning(
                    "%s/%s is not brought to %s, which has another checkpoint of that step; delete one of them",
                    *(source.url, saved.name, target.url),
                )
                continue
            with fallback.open(config, saved.name) as checkpoint:
                manifest = catalog.read_manifest(checkpoint)
            found.append((saved, [] if there is not None else _copies(manifest)))
        return found


def _copies(manifest: Manifest) -> list[ObjectCopy]:
    return [
        ObjectCopy(number, entry.key, entry.key, entry.nbytes, entry.crc32c)
        for number, entry in enumerate(manifest.objects)
    ]


def _bring(
    ranks: Group, run: Place, fallback: Place, saved: SavedStep, copies: Sequence[ObjectCopy], config: Config
) -> bool:
    with fallback.open(config, saved.name) as source, run.open(config, saved.name) as target:
        owners = ranks.round(lambda: _sizes(source, copies), lambda sizes: _owners(sizes, copies))
        missing = [copy.source for copy, owner in zip(copies, owners, strict=True) if owner is None]
        if missing:
            if ranks.rank == 0:
                logger.warning(
                    "%s cannot be brought to %s: %d of its objects are on no rank's disk, such as %s",
                    *(source.url, target.url, len(missing), missing[0]),
                )
            return False

        def send() -> None:
            mine = [copy for copy, owner in zip(copies, owners, strict=True) if owner == ranks.rank]
            if not mine:
                return
            sizes = {info.key: info.nbytes for info in target.list("")}
            widths = Widths.of([copy.nbytes for copy in mine], source.buffered_bytes, config)
            with run.open(widths.sending, saved.name) as narrow:
                copy_objects(
                    source,
                    narrow,
                    mine,
                    there=sizes,
                    trust_sizes=False,
                    widths=widths,
                    config=config,
                    advance=lambda _: None,
                )

        def commit(_: Sequence[None]) -> None:
            with contextlib.suppress(AlreadyCommittedError):  # in the meantime, by a copy of this job's
                catalog.commit(target, catalog.read_manifest(source), overwrite=False)
            source.delete([MANIFEST])
            logger.info("%s was brought to %s", source.url, target.url)

        ranks.round(send, commit)
        ranks.round(lambda: _remove(source), lambda _: None, is_last=True)
    return True


def _sizes(store: Store, copies: Sequence[ObjectCopy]) -> list[int | None]:
    """Of the objects that this rank can see."""

    def size(key: str) -> int | None:
        try:
            return store.size(key)
        except NotFoundError:
            return None

    return [size(copy.source) for copy in copies]


def _owners(sizes: Sequence[Sequence[int | None]], copies: Sequence[ObjectCopy]) -> list[int | None]:
    """The rank that copies each object: in turn, of those that see all of it."""
    owners: list[int | None] = []
    for number, copy in enumerate(copies):
        seen = [rank for rank, found in enumerate(sizes) if found[number] == copy.nbytes]
        owners.append(seen[number % len(seen)] if seen else None)
    return owners


def _remove(checkpoint: Store) -> None:
    """What this rank sees of a checkpoint whose manifest is gone."""
    keys = [info.key for info in checkpoint.list("") if parse_attempt(info.key) is not None]
    for key, reason in checkpoint.delete(keys).items():
        logger.warning("%s of %s was brought to the run, but could not be deleted: %s", key, checkpoint.url, reason)
