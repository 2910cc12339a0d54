"""Messages between a process and its helper: a pipe of pickles, and descriptors of shared memory.

Both ends are this library's own, started by this process; nobody else can connect.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

from cloudckpt._write import Commit
from cloudckpt.telemetry import Record

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class NewArena:
    """To the helper: one more that jobs lie in; its descriptor comes with the message."""

    number: int
    nbytes: int


@dataclass(frozen=True)
class Save:
    """To the helper: a `Job`, pickled over the arenas. ``gone``: numbers of arenas that will not be used again."""

    number: int
    job: bytes
    gone: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    number: int
    done: int
    total: int


@dataclass(frozen=True)
class Alive:
    """From the helper, every `BEAT_S`: it is neither stopped nor stuck."""


BEAT_S = 1.0


@dataclass(frozen=True)
class Warned:
    """From the helper: a warning, to be given where the user sees it."""

    text: str
    category: type[Warning]


@dataclass(frozen=True)
class Logged:
    """From the helper: a log record's fields."""

    fields: dict[str, object]


@dataclass(frozen=True)
class Recorded:
    """From the helper: what a save did, to be logged and traced where that is set up."""

    record: Record


@dataclass(frozen=True)
class Ended:
    number: int
    outcome: Commit | BaseException


class Pipe:
    """One end. Any thread may send, one may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def send(self, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Raises OSError if the other end is gone."""
        with self._lock:
            # One byte more than is needed: descriptors travel with a byte, which must not be part of a longer read.
            socket.send_fds(self._end, [bytes([len(descriptors)])], descriptors)
            self._end.sendall(_LENGTH.pack(len(message)))
            self._end.sendall(message)

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a message. Raises EOFError once the other end is closed."""
        first, descriptors, _, _ = socket.recv_fds(self._end, 1, MAX_DESCRIPTORS)
        if not first:
            raise EOFError
        (nbytes,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return bytes(self._exactly(nbytes)), descriptors

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, filled = memoryview(data), 0
        while filled < nbytes:
            count = self._end.recv_into(view[filled:])
            if not count:
                raise EOFError
            filled += count
        return data

    def wait(self, timeout_s: float) -> bool:
        """Whether a message, or the end, has begun to arrive within this time."""
        poll = select.poll()  # select() itself takes no descriptor above 1023
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def finish(self) -> None:
        """Nothing more will be sent; what the other end still says can be received."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._end.close()


MAX_DESCRIPTORS = 1
"""In one message."""
