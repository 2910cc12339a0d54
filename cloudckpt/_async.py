"""Saving without waiting: a private copy is made now, and everything else happens in the background."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cloudckpt._save import Layout, prepare
from cloudckpt._tries import RunPolicy
from cloudckpt._write import Commit, Prepared
from cloudckpt.background.job import Job, give_up
from cloudckpt.background.pending import PendingSave, Running, check_time
from cloudckpt.background.process import ProcessExecutor
from cloudckpt.background.threads import ThreadExecutor
from cloudckpt.config import Config
from cloudckpt.errors import BusyError, CloudckptError, InvalidStateError
from cloudckpt.plan.rules import ShardingRules
from cloudckpt.progress import Progress
from cloudckpt.pytorch.arena import Arena
from cloudckpt.pytorch.group import Group
from cloudckpt.pytorch.rounds import foreign
from cloudckpt.pytorch.seats import table_of
from cloudckpt.pytorch.staging import Staged, StagingPool
from cloudckpt.store.resolve import url_text
from cloudckpt.transfer.description import SaveOptions

if TYPE_CHECKING:
    import torch.distributed as dist

ExecutorKind = Literal["thread", "process"]
Coordination = Literal["store", "collectives", "none"]


def async_save(
    state: Any,
    url: str | os.PathLike[str],
    *,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "packed",
    compression: Literal["zstd"] | None = None,
    overwrite: bool = False,
    incremental: bool = False,
    rules: ShardingRules | None = None,
    metadata: Mapping[str, Any] | None = None,
    model_version: str | None = None,
    values: Literal["check", "rank0"] = "check",
    allow_pickle: bool = False,
    progress: Progress = None,
    config: Config | None = None,
    executor: ExecutorKind = "thread",
    coordination: Coordination | None = None,
    on_commit: Callable[[Commit], object] | None = None,
    policy: RunPolicy | None = None,
) -> PendingSave:
    """Save ``state`` as it is now, and return as soon as there is a private copy of it. Collective over ``group``.

    The options are those of `save`. Its errors come out of `PendingSave.result`, but for those of this rank's own
    state and options, which are raised here, too; the other ranks then hear of them from theirs. The call waits for
    no other rank, the first one of a group apart, but for buffers: while ``config.max_pending_saves`` of this
    process are running it waits for one to end, or raises BusyError, as ``config.when_busy`` says.

    ``executor``: "thread" works in this process; "process" in a helper of its own, which shares the copy's memory,
    takes none of the interpreter's time here, and ends what it has begun even if this process is killed.
    Either way a process that ends waits for its saves first.

    ``coordination``: how the ranks meet in the background. "store" (default): by small objects beside the
    checkpoint, which are gone in the end; "collectives": by a gloo group of their own, made by the first call ("thread"
    only); "none": for a job of one process.

    ``on_commit`` is called with the `Commit`, in a thread of this process.
    """
    config = config or Config()
    table = table_of(group)
    coordination = coordination or ("store" if table.size > 1 else "none")
    alone = table.size == 1
    pending = PendingSave(url_text(url), step)
    seat, ranks = None, None
    if coordination == "collectives" and not alone:
        ranks = table.own_ranks(config.rank_timeout_s)
    elif not alone:  # also where it will be refused: the others may not refuse it, and wait
        seat = table.next_seat(f"{pending.url} {step}", config.rank_timeout_s)
    options = SaveOptions(
        step=step,
        layout=layout,
        compression=compression,
        overwrite=overwrite,
        incremental=incremental,
        values=values,
        check_replicas=config.check_replicas,
        chunk_bytes=config.chunk_bytes,
        model_version=model_version,
    )

    def prepared() -> Prepared:
        return prepare(
            state,
            options,
            rules=rules,
            metadata=metadata,
            allow_pickle=allow_pickle,
            rank=table.rank,
            size=table.size,
            defer_pickles=True,
        )

    try:
        _check(executor, coordination, table.size)
        check_time()
        lane = _LANES[executor]
        copied, staged = lane.stage(prepared, config)
    except BaseException as error:
        if not alone:
            cause = error if isinstance(error, CloudckptError) else foreign(error)
            job = Job(cause, pending.url, storage_options, config, seat, policy)
            _submit(_LANES.threads, job, Running(pending, is_known=True), None, ranks)
        raise

    def end() -> None:
        staged.release()
        lane.leave()

    job = Job(copied, pending.url, storage_options, config, seat, policy)
    running = Running(pending, progress=progress, show=table.rank == 0, on_commit=on_commit, on_end=end)
    _submit(lane.executor, job, running, staged.arena, ranks)
    return pending


def _submit(
    executor: ThreadExecutor | ProcessExecutor, job: Job, running: Running, arena: Arena | None, ranks: Group | None
) -> None:
    try:
        executor.submit(job, running, arena=arena, ranks=ranks)
    except RuntimeError as error:
        running.refuse()
        refused = CloudckptError(f"no thread can be started for the background save to {job.url}: {error}")
        with suppress(CloudckptError):
            give_up(job, refused)
        raise refused from error


def _check(executor: str, coordination: str, size: int) -> None:
    for name, value, allowed in (
        ("executor", executor, ("thread", "process")),
        ("coordination", coordination, ("store", "collectives", "none")),
    ):
        if value not in allowed:
            raise InvalidStateError(f"{name} must be one of {allowed}, not {value!r}")
    if coordination == "none" and size > 1:
        raise InvalidStateError(f"coordination='none' is for one process, but {size} ranks save together")
    if coordination == "collectives" and executor == "process":
        raise InvalidStateError("coordination='collectives' needs executor='thread': the helper is in no process group")


class _Lane:
    """One way to do background saves in this process: its buffers, its executor, and how many are running."""

    def __init__(self, executor: ThreadExecutor | ProcessExecutor, pool: StagingPool) -> None:
        self.executor = executor
        self._pool = pool
        self._running = 0
        self._changed = threading.Condition()

    def stage(self, prepare: Callable[[], Prepared], config: Config) -> tuple[Prepared, Staged]:
        """A copy of what is to be saved. The caller leaves the lane once its buffers are free again."""
        seconds: dict[str, float] = {}
        with _timed(seconds, "wait"):
            self._enter(config)
        try:
            with _timed(seconds, "describe"):
                prepared = prepare()
            self._pool.max_bytes = config.staging_bytes
            timeout_s = config.rank_timeout_s if config.when_busy == "wait" else 0.0
            with _timed(seconds, "stage"):
                staged = self._pool.stage(prepared.state.shards, timeout_s=timeout_s)
        except BaseException:
            self.leave()
            raise
        return replace(prepared, state=replace(prepared.state, shards=staged.shards), seconds=seconds), staged

    def _enter(self, config: Config) -> None:
        with self._changed:
            if self._running >= config.max_pending_saves and config.when_busy == "raise":
                raise BusyError(
                    f"{self._running} background saves are still running, and max_pending_saves is "
                    f"{config.max_pending_saves}; save less often, raise it, or use when_busy='wait'"
                )
            self._changed.wait_for(lambda: self._running < config.max_pending_saves)
            self._running += 1

    def leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


class _Lanes:
    """Those of this process, each made when it is first used. A forked child begins with none."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, _Lane] = {}
        self.threads = ThreadExecutor()

    def __getitem__(self, executor: ExecutorKind) -> _Lane:
        with self._lock:
            if executor not in self._found:
                pool = StagingPool(shared=executor == "process", max_bytes=None)
                self._found[executor] = _Lane(self.threads if executor == "thread" else ProcessExecutor(pool), pool)
            return self._found[executor]


_LANES = _Lanes()
os.register_at_fork(after_in_child=_LANES.begin)
