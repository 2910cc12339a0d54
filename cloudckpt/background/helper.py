"""The helper process: does the saves that its parent hands it, and ends when the parent has closed the pipe.

A parent that was killed has closed it, too: what was begun is then still brought to its end.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
import time
import warnings
from typing import Any

from cloudckpt.background.job import run_job
from cloudckpt.background.wire import BEAT_S, Alive, Ended, Logged, NewArena, Note, Pipe, Recorded, Save, Warned
from cloudckpt.errors import HelperError
from cloudckpt.pytorch.arena import Arena, arena_loads
from cloudckpt.telemetry import divert

NICENESS = 5
"""The training goes first where there are not enough cores for both."""

NOTE_INTERVAL_S = 0.1


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the parent decides
    os.nice(NICENESS)
    parent = Parent(Pipe(socket.socket(fileno=descriptor)))
    logging.getLogger("cloudckpt").addHandler(_ToParent(parent))
    logging.getLogger("cloudckpt").setLevel(logging.INFO)
    divert(lambda record: parent.tell(Recorded(record)))
    warnings.showwarning = parent.warn  # type: ignore[assignment]  # it takes all that it may be given
    threading.Thread(target=parent.show_life, name="cloudckpt-beat", daemon=True).start()
    arenas: dict[int, Arena] = {}
    while True:
        try:
            data, descriptors = parent.pipe.receive()
        except (EOFError, OSError):
            return  # the threads are waited for by the interpreter
        message = pickle.loads(data)
        if isinstance(message, NewArena):
            arenas[message.number] = Arena.attached(message.number, descriptors[0], message.nbytes)
        else:
            assert isinstance(message, Save)
            for number in message.gone:
                arenas.pop(number).close()
            args = (parent, message, dict(arenas))
            threading.Thread(target=_save, args=args, name=f"cloudckpt-save-{message.number}", daemon=False).start()


class Parent:
    """The process that this one works for. Once it is gone, what it is told is lost, and nothing else."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self._is_there = True

    def tell(self, message: Note | Ended | Warned | Logged | Recorded) -> None:
        self.send(pickle.dumps(message))

    def send(self, data: bytes) -> None:
        try:
            self.pipe.send(data)
        except OSError:
            self._is_there = False

    def show_life(self) -> None:
        beat = pickle.dumps(Alive())
        while self._is_there:
            self.send(beat)
            time.sleep(BEAT_S)

    def warn(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        self.tell(Warned(str(message), category))


class _ToParent(logging.Handler):
    def __init__(self, parent: Parent) -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"name": record.name, "levelno": record.levelno, "levelname": record.levelname}
        self._parent.tell(Logged(fields | {"msg": self.format(record), "created": record.created}))


def _save(parent: Parent, message: Save, arenas: dict[int, Arena]) -> None:
    told_at = 0.0

    def note(done: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if done == total or now - told_at > NOTE_INTERVAL_S:
            told_at = now
            parent.tell(Note(message.number, done, total))

    try:
        job = arena_loads(message.job, arenas)
        outcome: Any = run_job(job, None, note)
    except BaseException as error:  # noqa: BLE001  # handed to the parent, whatever it is
        outcome = error
    parent.send(_ended(message.number, outcome))


def _ended(number: int, outcome: Any) -> bytes:
    try:
        data = pickle.dumps(Ended(number, outcome))
        pickle.loads(data)
    except Exception:  # noqa: BLE001  # errors of other libraries need not survive pickling
        return pickle.dumps(Ended(number, HelperError(f"{type(outcome).__name__}: {outcome}")))
    return data
