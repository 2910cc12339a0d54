"""The checkpoints of one training run: saving in spite of failures, finding the latest, removing what is old."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack

from cloudckpt import catalog
from cloudckpt._async import Coordination, ExecutorKind, async_save
from cloudckpt._fallback import Place, bring_back
from cloudckpt._flights import Flight, Flights, RunStatus
from cloudckpt._load import load
from cloudckpt._save import Layout, save
from cloudckpt._signals import StopSignals, chosen_signals
from cloudckpt._tries import MAX_RETRIES, RunPolicy
from cloudckpt._upkeep import Upkeep
from cloudckpt._write import Commit
from cloudckpt.background.pending import PendingSave
from cloudckpt.config import Config
from cloudckpt.errors import BusyError, CloudckptError, InvalidStateError, NotFoundError, StoreError
from cloudckpt.format.keys import PIN, parse_step, step_dir
from cloudckpt.plan.changes import Cast, Resizes
from cloudckpt.plan.history import SavedStep
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.retention import RetentionPolicy, make_policies
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.progress import Progress
from cloudckpt.pytorch.announce import Announcements
from cloudckpt.pytorch.group import make_group
from cloudckpt.pytorch.sharing import ExchangeMode, Groups, Scope
from cloudckpt.retention import pin, unpin
from cloudckpt.store.paths import mask

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ORDER = itertools.count()
"""Of the saves of this process, as they are called."""


class SaveArguments(TypedDict, total=False):
    """What `cloudckpt.save` takes, but for what a run is told once for all steps."""

    layout: Layout
    compression: Literal["zstd"] | None
    overwrite: bool
    incremental: bool
    rules: ShardingRules | None
    metadata: Mapping[str, Any] | None
    model_version: str | None
    values: Literal["check", "rank0"]
    allow_pickle: bool


class LoadArguments(TypedDict, total=False):
    """What `cloudckpt.load` takes, but for what a run is told once for all steps."""

    strict: bool
    cast: Cast
    exchange: ExchangeMode
    exchange_scope: Scope
    rules: ShardingRules | None
    rename: Rules | None
    model_version: str | None
    resize: Resizes | None
    groups: Groups | None
    allow_pickle: bool
    progress: Progress


class Checkpointer:
    """The steps below one root URL: ``<root>/step-00001000`` and so on.

    Made alike by every rank. ``save``, ``async_save``, ``load``, ``keep``, ``release`` and ``prune`` are collective
    over ``group``; ``latest``, ``steps`` and ``status`` are not.

    ``keep_last``, ``keep_every``, ``policies``: which steps stay. A step goes once none of them keeps it; without
    any of them all stay. The newest step never goes, nor do those that `keep` has pinned. Rank 0 removes, after each
    commit, in the background. ``orphan_age_s``: what dead saves have left goes after this, by the store's own clock;
    it must be more than a save can take.

    ``on_error="warn"``: a save that fails is logged and warned of, stands in ``status()``, and training goes on.
    ``retries``: how often it is tried again before that. ``fallback_url``, ``fallback_options``: the root of another
    run, such as a folder on the nodes' own disks. What still fails is saved there, and brought here after a later
    save, or before a load; of more than ``keep_last`` that wait there the oldest are given up. Background saves of
    several ranks then meet by "collectives" unless told otherwise; with "store" all ranks must see the same fallback.

    ``save_on_signal``: True for SIGTERM, or signals: see `save_due`.

    ``incremental``: as in `save`, for all steps. ``executor``, ``coordination``: as in `async_save`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        policies: Sequence[RetentionPolicy] = (),
        orphan_age_s: float = 86400.0,
        incremental: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
        retries: int = 0,
        fallback_url: str | os.PathLike[str] | None = None,
        fallback_options: Mapping[str, Any] | None = None,
        save_on_signal: bool | signal.Signals | Iterable[signal.Signals] = False,
        executor: ExecutorKind = "thread",
        coordination: Coordination | None = None,
        config: Config | None = None,
    ) -> None:
        _check(on_error, retries, orphan_age_s)
        self._config = config or Config()
        self._run = Place(_root(root), storage_options)
        fallback = None if fallback_url is None else Place(_root(fallback_url), fallback_options)
        if fallback is not None and fallback.url == self._run.url:
            raise InvalidStateError(f"fallback_url is the run itself: {mask(self._run.url)}")
        announcements = Announcements(group)
        self._policy = RunPolicy(retries, fallback, keep_last)
        self._group = group
        self._incremental = incremental
        self._warns = on_error == "warn"
        self._executor: ExecutorKind = executor
        if coordination is None and fallback is not None and executor == "thread" and not announcements.is_alone:
            coordination = "collectives"  # a store that is out of reach is no place to meet
        self._coordination: Coordination | None = coordination
        self._is_coordinator = announcements.rank == 0
        self._is_alone = announcements.is_alone
        self._flights = Flights()
        self._background: list[Flight] = []
        self._upkeep = Upkeep(
            self._run,
            make_policies(keep_last, keep_every, policies),
            orphan_age_s=orphan_age_s,
            config=self._config,
            busy=self._flights.directories,
        )
        self._signals = StopSignals(chosen_signals(save_on_signal), announcements)

    def __repr__(self) -> str:
        return f"Checkpointer({mask(self._run.url)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self, step: int, state: Any, *, progress: Progress = None, **options: Unpack[SaveArguments]
    ) -> Commit | None:
        """Save ``state`` as ``step``, and wait until it is durable. ``options``: as in `cloudckpt.save`.

        None if it failed and ``on_error`` is "warn". Otherwise raises what `cloudckpt.save` raises, or what an earlier
        `async_save` has failed with unseen; of several ranks once this step is durable.
        """
        flight, unseen = self._begin(step)
        try:
            commit = save(
                state,
                self._url(step),
                step=step,
                storage_options=self._run.storage_options,
                group=self._group,
                progress=progress if isinstance(progress, bool) else flight.watch(progress),
                config=self._config,
                policy=replace(self._policy, order=next(_ORDER)),
                **self._with_defaults(options),
            )
        except CloudckptError as error:
            self._failed(flight, error)
            if not self._warns:
                raise
            self._warn()
            return None
        finally:
            self._flights.end(flight)
        self._committed(flight, commit)
        self._raise(unseen)
        return commit

    def async_save(
        self, step: int, state: Any, *, progress: Progress = None, **options: Unpack[SaveArguments]
    ) -> PendingSave | None:
        """Save ``state`` as it is now, in the background. ``options``: as in `cloudckpt.save`.

        With ``on_error="warn"`` None if it could not even begin; what fails later is logged at once, stands in
        `status`, and is warned of by a later call. Otherwise the next save raises it, or `close`, or ``result()``. Of
        several ranks the next save is under way then: others may not know of the failure yet, and would wait in vain.
        """
        flight, unseen = self._begin(step)
        try:
            flight.pending = async_save(
                state,
                self._url(step),
                step=step,
                storage_options=self._run.storage_options,
                group=self._group,
                progress=progress,
                config=self._config,
                executor=self._executor,
                coordination=self._coordination,
                on_commit=lambda commit: self._committed(flight, commit),
                policy=replace(self._policy, order=next(_ORDER)),
                **self._with_defaults(options),
            )
        except CloudckptError as error:
            self._failed(flight, error)
            if not self._warns or isinstance(error, BusyError):
                raise
            self._warn()
            return None
        except BaseException:
            self._flights.end(flight)
            raise
        self._background.append(flight)
        flight.pending.when_failed(lambda error: self._failed(flight, error))
        self._raise(unseen)
        return flight.pending

    def load(self, state: Any, step: int | None = None, **options: Unpack[LoadArguments]) -> int:
        """Fill ``state`` from ``step``, by default the latest, and return which it was.

        Rank 0 finds the latest. ``options``: as in `cloudckpt.load`. Raises what that raises, and NotFoundError where
        there is no such step.
        """
        unseen = self._settle(wait=False)
        ranks = make_group(self._group, self._config.rank_timeout_s)
        if self._policy.fallback is not None:
            try:
                bring_back(ranks, self._run, self._policy.fallback, config=self._config)
            except CloudckptError as error:
                logger.warning("what waits in %s could not be brought here: %s", self._policy.fallback.url, error)

        def wanted() -> int | None:
            self._raise(unseen)  # so that the others hear of it
            return step

        saved = ranks.round(wanted, self._chosen)
        load(
            state,
            f"{self._run.url}/{saved.name}",
            storage_options=self._run.storage_options,
            group=self._group,
            config=self._config,
            **options,
        )
        return saved.step

    def latest(self) -> int | None:
        """The newest committed step, or None. Asks the store, and no other rank.

        After training has gone back to an earlier step and saved again, that save is newer than what was abandoned,
        whatever the numbers.
        """
        committed = self._find().committed
        return committed[0].step if committed else None

    def steps(self) -> list[int]:
        """All committed steps, ascending. Asks the store, and no other rank."""
        return sorted({saved.step for saved in self._find().committed})

    def keep(self, step: int) -> None:
        """Pin a step, which may be one that is being saved: retention leaves it there until `release`.

        Raises NotFoundError.
        """
        self._on_rank_0(lambda: self._pin(step))

    def release(self, step: int) -> None:
        """The reverse of `keep`; harmless for a step that is not pinned."""
        self._on_rank_0(lambda: self._unpin(step))

    def prune(self) -> list[int]:
        """Remove now what no policy keeps, and what dead saves have left. Returns the steps that went, oldest first.

        Warns of what could not be removed, naming keys.
        """
        removal = self._on_rank_0(self._upkeep.run)
        for complaint in removal.complaints():
            warnings.warn(complaint, stacklevel=2)
        return list(removal.steps)

    def status(self) -> RunStatus:
        """What this process knows. Asks nobody, and does not wait."""
        return self._flights.status()

    def save_due(self, step: int) -> bool:
        """Whether all ranks are to save ``step`` now, since one was told to stop. To be called after every step.

        True once for a signal, and at the same step on all ranks. The rank that has seen the signal tells the others
        through torch's rendezvous store, which every call asks once, and all save two steps later; a process alone
        saves at once.
        """
        return self._signals.due(step)

    @property
    def preempted(self) -> bool:
        """Whether `save_due` has been true: from the same step on, on all ranks."""
        return self._signals.was_due

    def close(self) -> None:
        """Wait for background saves and retention, and give signals back. Raises what a save has failed with unseen."""
        try:
            self._raise(self._settle(wait=True))
        finally:
            self._upkeep.close()
            self._signals.close()
            self._warn()

    def _url(self, step: int) -> str:
        return f"{self._run.url}/{step_dir(step)}"

    def _with_defaults(self, options: SaveArguments) -> SaveArguments:
        defaults: SaveArguments = {"incremental": self._incremental}
        return defaults | options

    def _begin(self, step: int) -> tuple[Flight, PendingSave | None]:
        """With an earlier save that has failed unseen, where that can be raised only once the new one is under way."""
        step_dir(step)  # refuses what is no step
        # Where a save has to wait for the one before anyway, all ranks see alike how that ended.
        unseen = self._settle(wait=self._config.max_pending_saves == 1 and self._config.when_busy == "wait")
        if self._is_alone:
            self._raise(unseen)
            unseen = None
        return self._flights.begin(step), unseen

    def _raise(self, unseen: PendingSave | None) -> None:
        if unseen is not None and (error := unseen.failure) is not None:
            raise error

    def _committed(self, flight: Flight, commit: Commit) -> None:
        self._flights.succeed(flight, commit)
        if self._is_coordinator and not commit.in_fallback:
            self._upkeep.ask()

    def _failed(self, flight: Flight, error: BaseException) -> None:
        """In any thread."""
        if self._warns and flight.pending is not None:
            flight.pending.failure  # noqa: B018  # counts as seen
        text = f"step {flight.step} was not saved to {mask(self._run.url)}: {type(error).__name__}: {error}"
        if self._flights.fail(flight, error, text) and self._warns:
            logger.warning("%s", text)

    def _warn(self) -> None:
        """Of what has gone wrong since the last call; in the caller's thread, where a warning may be an error."""
        texts = self._flights.take_texts()
        for text in (*(texts if self._warns else ()), *self._upkeep.take_complaints()):
            warnings.warn(text, stacklevel=4)

    def _settle(self, *, wait: bool) -> PendingSave | None:
        """Warn of what has failed in the background, or return one that has, unseen; with ``wait``, of all there."""
        background, self._background = self._background, []
        unseen: PendingSave | None = None
        for flight in background:
            pending = flight.pending
            assert pending is not None
            if wait:
                pending.wait()
            if unseen is not None or not pending.done():
                self._background.append(flight)
            elif pending.is_unseen and not self._warns:
                unseen = pending
                self._background.append(flight)  # until it has been raised
            elif self._warns and (error := pending.failure) is not None:
                # The save's own thread may be about to do this.
                self._failed(flight, error)
        self._warn()
        return unseen

    def _find(self) -> catalog.Steps:
        with self._run.open(self._config) as run:
            steps = catalog.find_steps(run)
        for name, fault in steps.faults.items():
            logger.warning("the manifest in %s cannot be read: %s", name, fault)
        return steps

    def _chosen(self, wanted: Sequence[int | None]) -> SavedStep:
        """On rank 0, from what all ranks ask for."""
        step = wanted[0]
        if any(other != step for other in wanted):
            raise InvalidStateError(f"load() was called with step={step} on rank 0, but not on all ranks")
        steps = self._find()
        for saved in steps.committed:
            if step is None or saved.step == step:
                return saved
        raise self._no_such(step, steps)

    def _no_such(self, step: int | None, steps: catalog.Steps) -> NotFoundError:
        there = sorted({saved.step for saved in steps.committed})
        others = (*steps.uncommitted, *steps.faults)
        what = "no step" if step is None else f"step {step} is not"
        text = f"{what} committed in {mask(self._run.url)}"
        if there:
            text += f", which has {len(there)} steps up to {there[-1]}: {', '.join(map(str, there[-5:]))}"
        if others:
            text += f"; not committed or not to be read: {', '.join(others[-5:])}"
        return NotFoundError(text)

    def _pin(self, step: int) -> None:
        # Retention must not be judging it meanwhile.
        with self._upkeep.turn, self._run.open(self._config) as run:
            steps = catalog.find_steps(run)
            names = [saved.name for saved in steps.committed if saved.step == step]
            if not names and step_dir(step) in self._flights.directories():
                names = [step_dir(step)]
            if not names:
                raise self._no_such(step, steps)
            for name in names:
                pin(run, name)

    def _unpin(self, step: int) -> None:
        with self._run.open(self._config) as run:
            # By what the directory is called, too: a save that was pinned may have failed.
            names = {name for name in catalog.step_dirs(run) if parse_step(name) == step}
            names.update(saved.name for saved in catalog.find_steps(run).committed if saved.step == step)
            for name in sorted(names):
                if (reason := unpin(run, name)) is not None:
                    raise StoreError(f"step {step} is still pinned: {reason}", key=f"{name}/{PIN}")

    def _on_rank_0(self, do: Callable[[], T]) -> T:
        ranks = make_group(self._group, self._config.rank_timeout_s)
        return ranks.round(lambda: None, lambda _: do(), is_last=True)


def _root(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url)
    return text if text.endswith("://") else text.rstrip("/") or "/"


def _check(on_error: str, retries: object, orphan_age_s: object) -> None:
    if on_error not in ("raise", "warn"):
        raise InvalidStateError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
    if type(retries) is not int or not 0 <= retries <= MAX_RETRIES:
        raise InvalidStateError(f"retries must be an int from 0 to {MAX_RETRIES}, not {retries!r}")
    if not isinstance(orphan_age_s, (int, float)) or not orphan_age_s > 0:
        raise InvalidStateError(f"orphan_age_s must be positive, not {orphan_age_s!r}")
