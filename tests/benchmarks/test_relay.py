"""The relay of the benchmarks and the multi-node tests: what comes through, how fast, and how it is counted."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from benchmarks import relay

BROKEN_OFF = "reset by peer|[Bb]roken pipe|not connected"
"""By the call that sees it first."""


@contextmanager
def served(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on loopback that calls ``handle`` with every connection, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def echo(connection: socket.socket) -> None:
    """All that comes until the client's end of file, then the same back."""
    with connection:
        data = b"".join(iter(lambda: connection.recv(65536), b""))
        connection.sendall(data)


def send_a_million(connection: socket.socket) -> None:
    with connection:
        connection.recv(1)
        connection.sendall(bytes(1_000_000))


def break_off(connection: socket.socket) -> None:
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def exchanged(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(30)
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
def test_bytes_come_through_unchanged_and_are_counted(latency_s: float):
    data = os.urandom(3_000_000)
    with served(echo) as target, relay.start(target, latency_s=latency_s) as link:
        start = time.monotonic()
        assert exchanged(link.port, data) == data
        assert time.monotonic() - start >= 2 * latency_s
        assert link.counts == relay.Counts(len(data), len(data), 1)
        assert link.reset() == relay.Counts(len(data), len(data), 1)
        assert exchanged(link.port, b"abc") == b"abc"
        assert link.counts == relay.Counts(3, 3, 1)
        assert link.url == f"http://127.0.0.1:{link.port}"


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
def test_all_connections_share_the_rate(latency_s: float):
    with served(send_a_million) as target, relay.start(f"http://{target}", 4e6, latency_s) as link:
        start = time.monotonic()
        fetchers = [threading.Thread(target=exchanged, args=(link.port, b"x")) for _ in range(4)]
        for fetcher in fetchers:
            fetcher.start()
        for fetcher in fetchers:
            fetcher.join()
        # Never faster; how much slower depends on the machine.
        assert time.monotonic() - start > 0.95
        assert link.counts == relay.Counts(4, 4_000_000, 4)


def test_a_connection_that_breaks_off_does_so_on_both_sides():
    with served(break_off) as target, relay.start(target) as link:
        for _ in range(2):  # and the relay goes on
            with pytest.raises(OSError, match=BROKEN_OFF):
                exchanged(link.port, b"x")


def test_a_target_that_is_not_there():
    with relay.start("127.0.0.1:9") as link:
        with pytest.raises(OSError, match=BROKEN_OFF):
            exchanged(link.port, b"")
        assert link.counts == relay.Counts(0, 0, 1)


def test_wrong_targets_are_refused():
    with pytest.raises(RuntimeError, match="did not start: exit code 2"), relay.start("nowhere"):
        pass
