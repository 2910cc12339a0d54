"""Saving a step of a run in spite of failures: once more, or somewhere else until its store is back."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from cloudckpt import catalog
from cloudckpt._fallback import Place, bring_back, give_up
from cloudckpt._write import Commit, Prepared, commit_of, run_save
from cloudckpt.config import Config
from cloudckpt.errors import (
    AlreadyCommittedError,
    CloudckptError,
    FormatError,
    InvalidStateError,
    MismatchError,
    NotFoundError,
    StoreError,
)
from cloudckpt.format.keys import parse_step
from cloudckpt.plan.history import SavedStep, next_branch
from cloudckpt.progress import Progress
from cloudckpt.pytorch.group import Group
from cloudckpt.store.paths import parent
from cloudckpt.store.resolve import url_text

logger = logging.getLogger(__name__)

MAX_RETRIES = 32

Meet = Callable[[str | os.PathLike[str], Mapping[str, Any] | None, int], AbstractContextManager[Group]]
"""The ranks that save to a URL with its storage options, in the try of this number: some meet in the store itself."""


@dataclass(frozen=True)
class RunPolicy:
    """How the steps of a run are saved. Plain data, for whoever carries a save out.

    ``retries``: how often a save that failed is tried again. ``fallback``: another root for what still fails; where
    nodes have disks of their own, each rank finds its part of it there. ``num_waiting``: how many steps may wait there;
    older ones are given up. ``order``: which of this process's saves was called first, for saves that overlap are not
    carried out in the order in which they were called; None: this one is the last so far.
    """

    retries: int = 0
    fallback: Place | None = None
    num_waiting: int | None = None
    order: int | None = None


def run_tries(
    meet: Meet,
    prepare: Callable[[], Prepared],
    url: str | os.PathLike[str],
    *,
    policy: RunPolicy | None,
    storage_options: Mapping[str, Any] | None,
    progress: Progress,
    config: Config,
) -> Commit:
    """`run_save` as the policy says; without one, just that. Collective over the ranks that ``meet`` gives.

    Raises the last error of the run's own store if the fallback fails, too. ``Commit.url`` tells where it went.
    """
    if policy is None:
        with meet(url, storage_options, 0) as ranks:
            return run_save(ranks, prepare, url, storage_options=storage_options, progress=progress, config=config)
    url = url_text(url)
    root, name = parent(url)
    tries = meetings(url, storage_options, policy)
    save = _StepSave(prepare, Place(root, storage_options), name, policy, progress, config)
    failures: list[CloudckptError] = []
    for number in range(1 + policy.retries):
        try:
            with meet(*tries[number]) as ranks:
                commit = save.to_run(ranks, failures)
                save.bring_back(ranks)
                return commit
        except CloudckptError as error:
            failures.append(error)
            if isinstance(error, _HOPELESS):
                raise
            logger.warning("try %d of %d to save %s failed: %s", number + 1, 1 + policy.retries, url, error)
            if isinstance(error, NotFoundError) or (isinstance(error, StoreError) and not error.retryable):
                break
    if policy.fallback is None:
        raise failures[-1]
    try:
        fallback = policy.fallback
        with meet(*tries[-1]) as ranks:
            commit = save.to_fallback(ranks)
            if policy.num_waiting is not None:
                give_up(ranks, fallback, policy.num_waiting, config=config)
    except CloudckptError as error:
        failures[-1].add_note(f"and the fallback failed, too: {error}")
        raise failures[-1] from error
    logger.warning("%s was saved to %s instead", url, commit.url)
    return replace(commit, in_fallback=True)


def meetings(
    url: str, storage_options: Mapping[str, Any] | None, policy: RunPolicy | None
) -> list[tuple[str, Mapping[str, Any] | None, int]]:
    """What `Meet` is asked for, one after the other while tries fail; that of a fallback is the last."""
    policy = policy or RunPolicy()
    found = [(url, storage_options, number) for number in range(1 + policy.retries)]
    if policy.fallback is not None:
        found.append((f"{policy.fallback.url}/{parent(url)[1]}", policy.fallback.storage_options, len(found)))
    return found


_HOPELESS = (InvalidStateError, AlreadyCommittedError, MismatchError, FormatError)
"""What comes out the same wherever and however often it is tried."""


@dataclass(frozen=True)
class _StepSave:
    prepare: Callable[[], Prepared]
    run: Place
    name: str
    policy: RunPolicy
    progress: Progress
    config: Config

    @property
    def fallback(self) -> Place | None:
        return self.policy.fallback

    def to_run(self, ranks: Group, failures: Sequence[CloudckptError]) -> Commit:
        try:
            return self._save(ranks, self.run, self.prepare)
        except AlreadyCommittedError:
            # By an earlier try, whose outcome nobody could learn?
            tried = [error.commit_id for error in failures if isinstance(error, catalog.UnsettledError)]
            if tried:
                with self.run.open(self.config, self.name) as store:
                    manifest = catalog.read_manifest(store)
                    if manifest.document.commit_id in tried:
                        return commit_of(manifest, store.url, store.counts.requests)
            raise

    def to_fallback(self, ranks: Group) -> Commit:
        """Whole, for there is nothing beside it there to refer to."""
        assert self.fallback is not None

        def prepare() -> Prepared:
            prepared = self.prepare()
            return replace(prepared, options=replace(prepared.options, incremental=False, overwrite=True))

        return self._save(ranks, self.fallback, prepare)

    def bring_back(self, ranks: Group) -> None:
        """What has had to wait. If it cannot be done now, there will be another save."""
        if self.fallback is None:
            return
        try:
            bring_back(ranks, self.run, self.fallback, config=self.config)
        except CloudckptError as error:
            if ranks.rank == 0:
                logger.warning("what waits in %s could not be brought to the run: %s", self.fallback.url, error)

    def _save(self, ranks: Group, place: Place, prepare: Callable[[], Prepared]) -> Commit:
        history = ranks.kept(_Histories).of(self.run.url)
        begun: list[_Saving] = []

        def find_branch() -> int:
            # Where the run cannot be reached, what was known of it must do.
            for root in (place, self.fallback):
                if root is not None:
                    history.look(root, self.config)
            begun.append(history.begin(self.name, self.policy.order))
            return begun[0].branch

        try:
            return run_save(
                ranks,
                prepare,
                f"{place.url}/{self.name}",
                storage_options=place.storage_options,
                progress=self.progress,
                config=self.config,
                find_branch=find_branch,
            )
        finally:
            history.end(self.name, begun)


@dataclass(frozen=True)
class _Saving:
    """A step that is being saved."""

    branch: int
    step: int
    order: int | None


class _History:
    """The steps of one run as the coordinator knows them, those that it is saving included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, SavedStep]] = {}
        self._running: list[_Saving] = []
        self._orders: dict[str, int | None] = {}

    def look(self, root: Place, config: Config) -> None:
        """Only what is new is read: what this job replaces is forgotten at the end of its save."""
        with self._lock:
            known = dict(self._known.get(root.url, {}))
        with root.open(config) as run:
            steps = catalog.find_steps(run, known)
        with self._lock:
            self._known[root.url] = {saved.name: saved for saved in steps.committed}

    def begin(self, name: str, order: int | None) -> _Saving:
        """The step that is now being saved. Of this process's, only those that were called before it count."""
        step = parse_step(name)
        assert step is not None

        def is_later(other: int | None) -> bool:
            return order is not None and other is not None and other > order

        with self._lock:
            earlier = [
                (saved.branch, saved.step)
                for steps in self._known.values()
                for saved in steps.values()
                if not is_later(self._orders.get(saved.name))
            ]
            earlier += [(other.branch, other.step) for other in self._running if not is_later(other.order)]
            saving = _Saving(next_branch(step, earlier), step, order)
            self._running.append(saving)
            self._orders[name] = order
            return saving

    def end(self, name: str, begun: Sequence[_Saving]) -> None:
        with self._lock:
            for saving in begun:
                self._running.remove(saving)
            for steps in self._known.values():
                steps.pop(name, None)


class _Histories:
    """Of one group of ranks, by the URL of the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_run: dict[str, _History] = {}

    def of(self, run: str) -> _History:
        with self._lock:
            return self._by_run.setdefault(run, _History())
