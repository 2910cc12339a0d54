"""Saves in a helper process: this side starts it, hands it jobs, and waits for their ends."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass

from cloudckpt._write import Commit
from cloudckpt.background.job import Job, give_up
from cloudckpt.background.pending import Running, close_at_exit
from cloudckpt.background.wire import BEAT_S, Ended, Logged, NewArena, Note, Pipe, Recorded, Save, Warned
from cloudckpt.errors import CloudckptError, HelperError
from cloudckpt.pytorch.arena import Arena, arena_dumps
from cloudckpt.pytorch.group import Group
from cloudckpt.pytorch.staging import StagingPool
from cloudckpt.telemetry import emit

log = logging.getLogger("cloudckpt")

EXIT_S = 10.0
"""How long a helper without work may take to end."""

START_S = 300.0
"""How long one may take until its first sign of life: it imports torch, on a busy machine or from a slow disk."""

# Not by multiprocessing: it would run the user's script once more, which need not be written for that.
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from cloudckpt.background.helper import main
main(int(sys.argv[1]))
"""


class ProcessExecutor:
    """One helper, started by the first save and again by the first one after its death."""

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool
        self._helper: _Helper | None = None
        self._lock = threading.Lock()
        close_at_exit(self.close)

    def submit(self, job: Job, running: Running, *, arena: Arena | None = None, ranks: Group | None = None) -> None:
        """Returns at once. ``arena``: where the tensors of the job lie; ``ranks`` are for threads only."""
        assert ranks is None, "a helper is in no process group"
        name = f"cloudckpt-save-{job.url}"
        threading.Thread(target=self._run, args=(job, running, arena), name=name, daemon=False).start()

    def close(self) -> None:
        """End the helper, which has nothing to do any more."""
        with self._lock:
            if self._helper is not None:
                self._helper.close()
                self._helper = None

    def _run(self, job: Job, running: Running, arena: Arena | None) -> None:
        try:
            outcome = self._carry(job, running, arena)
        except BaseException as error:  # noqa: BLE001  # handed to whoever waits for the result
            running.fail(error)
        else:
            running.succeed(outcome)

    def _carry(self, job: Job, running: Running, arena: Arena | None) -> Commit:
        try:
            ended = self._begin(job.finished(), running, arena)
        except CloudckptError as error:
            give_up(job, error)
            raise
        outcome = ended.get()
        if isinstance(outcome, HelperError):
            give_up(job, outcome)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _begin(self, job: Job, running: Running, arena: Arena | None) -> queue.SimpleQueue[Commit | BaseException]:
        with self._lock:
            if self._helper is None or not self._helper.is_alive():
                self._helper = _Helper()
            # Those that the state has outgrown. The job's own is lent, and so among them.
            alive = frozenset(arena.number for arena in self._pool.arenas)
            return self._helper.begin(job, arena, alive, running.note, job.config.rank_timeout_s)


@dataclass(frozen=True, eq=False)
class _Waiting:
    note: Callable[[int, int], None]
    timeout_s: float
    ended: queue.SimpleQueue[Commit | BaseException]


class _Helper:
    """The other process, as long as it lives."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=_environment(),
                    # Signals for the training's process group are not for it: it ends by itself.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise HelperError(f"no helper process could be started for a background save: {error}") from error
        self._pipe = Pipe(ours)
        self._numbers = itertools.count()
        self._known: set[int] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._is_gone = False
        self._was_heard = False
        self._was_silent = False
        threading.Thread(target=self._listen, name="cloudckpt-helper", daemon=True).start()

    def is_alive(self) -> bool:
        return not self._is_gone and self._process.poll() is None

    def begin(
        self,
        job: Job,
        arena: Arena | None,
        alive: AbstractSet[int],
        note: Callable[[int, int], None],
        timeout_s: float,
    ) -> queue.SimpleQueue[Commit | BaseException]:
        """Hand over a job, whose outcome will be in the queue. From one thread at a time.

        ``alive``: numbers of the arenas that a job may lie in; others that the helper has mapped are let go.
        ``timeout_s``: a helper that shows no sign of life for so long, such as one that was stopped, is killed.
        """
        data = arena_dumps(job, () if arena is None else (arena,))
        waiting, number = _Waiting(note, timeout_s, queue.SimpleQueue()), next(self._numbers)
        with self._lock:
            self._waiting[number] = waiting
        try:
            if arena is not None and arena.number not in self._known:
                assert arena.fd is not None, "the helper maps shared arenas only"
                self._pipe.send(pickle.dumps(NewArena(arena.number, arena.nbytes)), (arena.fd,))
                self._known.add(arena.number)
            gone = self._known - alive
            self._known -= gone
            self._pipe.send(pickle.dumps(Save(number, data, tuple(gone))))
        except OSError as error:
            self._end_all(HelperError(f"the helper process is gone: {error}"))
        return waiting.ended

    def close(self) -> None:
        self._pipe.finish()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        while self._await_sign():
            try:
                data, _ = self._pipe.receive()
            except (EOFError, OSError):
                break
            try:
                self._take(pickle.loads(data))
            except BaseException:  # a warning that is to be an error, a logging handler of the user's
                with suppress(BaseException):
                    log.exception("what the helper process has said could not be passed on")
        self._is_gone = True
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if self._was_silent:
            how = "gave no sign of life, and was killed"
        self._end_all(HelperError(f"the helper process (pid {self._process.pid}) {how} in the middle of the save"))
        self._pipe.close()

    def _await_sign(self) -> bool:
        """False once the helper has been silent for too long. Its first words may be late: it imports torch before."""
        heard_s = time.monotonic()
        while not self._pipe.wait(BEAT_S):
            with self._lock:
                timeouts_s = [waiting.timeout_s for waiting in self._waiting.values()]
            if timeouts_s and time.monotonic() - heard_s > max(
                *timeouts_s, 10 * BEAT_S if self._was_heard else START_S
            ):
                self._was_silent = True
                self._process.kill()
                return False
        self._was_heard = True
        return True

    def _take(self, message: object) -> None:
        match message:
            case Note(number, done, total):
                with self._lock:
                    noting = self._waiting.get(number)
                if noting is not None:
                    noting.note(done, total)
            case Ended(number, outcome):
                with self._lock:
                    waiting = self._waiting.pop(number)
                waiting.ended.put(outcome)
            case Warned(text, category):
                warnings.warn(text, category, stacklevel=2)
            case Logged(fields):
                line = logging.makeLogRecord(fields)
                logging.getLogger(line.name).handle(line)
            case Recorded(record):
                emit(record)

    def _end_all(self, error: HelperError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            one.ended.put(error)


def _environment() -> dict[str, str]:
    """No device, and one thread for arithmetic: the training has the rest."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
