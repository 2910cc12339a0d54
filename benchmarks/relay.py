"""A TCP relay in a process of its own: one link of limited speed, with latency, that counts its bytes.

    with relay.start("http://127.0.0.1:9000", rate_bytes_s=200e6, latency_s=0.005) as link:
        ...                       # use link.url instead of the target
        print(link.counts)

All connections share the link, which is full duplex: each direction has the whole rate. By hand:
``python benchmarks/relay.py 127.0.0.1:9000 --rate 200e6``; a line with ``counts`` or ``reset`` on
standard input is answered by the counts, the end of the input ends the relay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

CHUNK_BYTES = 256 * 1024
"""What is received at once: large, so that a relayed gigabyte costs few turns of the event loop."""

CHUNK_S = 0.002
"""A chunk occupies the link no longer than this (but for the smallest chunks), so that connections share it evenly."""

SMALLEST_CHUNK_BYTES = 1024

BURST_S = 0.01
"""How far the link may catch up after an idle moment: timers are late by up to a millisecond or two."""

IN_FLIGHT_BYTES = 8 * 1024 * 1024
"""Per connection and direction, what the latency may hold."""

START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Counts:
    """``to_target`` and ``from_target``: payload bytes that the relay has passed on, over all connections."""

    to_target: int = 0
    from_target: int = 0
    connections: int = 0


class Relay:
    """A running relay. ``port`` is on loopback, or where ``listen`` said."""

    def __init__(self, process: subprocess.Popen[bytes], host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._process = process

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def counts(self) -> Counts:
        """Since the start, or the last ``reset``."""
        return Counts(**self._ask("counts"))

    def reset(self) -> Counts:
        """Counts from zero on; returns what it had counted."""
        return Counts(**self._ask("reset"))

    def _ask(self, word: str) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def start(
    target: str,
    rate_bytes_s: float | None = None,
    latency_s: float = 0.0,
    *,
    listen: str = "127.0.0.1",
) -> Iterator[Relay]:
    """Relay to ``target`` (a URL, or ``host:port``) until the block is left.

    ``rate_bytes_s``: of each direction, all connections together; None is as fast as it can.
    ``latency_s``: one way; a round trip takes twice as long. TCP's handshake is answered at once.
    """
    command = [sys.executable, str(Path(__file__).resolve()), target, "--latency", str(latency_s), "--listen", listen]
    command += ["--rate", str(rate_bytes_s)] if rate_bytes_s is not None else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        hello = process.stdout.readline()
        if not hello:
            raise RuntimeError(f"the relay to {target} did not start: exit code {process.wait(START_TIMEOUT_S)}")
        yield Relay(process, listen, json.loads(hello)["port"])
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class _Direction:
    """One direction of the link: when what is sent now will have passed, and how much has."""

    def __init__(self, rate_bytes_s: float | None, latency_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.latency_s = latency_s
        self.nbytes = 0
        self._free_at = 0.0
        by_rate = CHUNK_BYTES if rate_bytes_s is None else int(rate_bytes_s * CHUNK_S)
        self.chunk_bytes = max(SMALLEST_CHUNK_BYTES, min(CHUNK_BYTES, by_rate))

    def reserve(self, nbytes: int) -> float:
        """Take the next free place on the link; the time at which the last byte has left it."""
        now = time.monotonic()
        if self.rate_bytes_s is None:
            return now
        self._free_at = max(self._free_at, now - BURST_S) + nbytes / self.rate_bytes_s
        return self._free_at


async def _sleep_until(when: float) -> None:
    delay = when - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)


async def _pump(source: socket.socket, sink: socket.socket, link: _Direction) -> None:
    """Until the source ends. Raises OSError if either side breaks off."""
    if link.latency_s:
        await _pump_late(source, sink, link)
        return
    loop = asyncio.get_running_loop()
    view = memoryview(bytearray(link.chunk_bytes))
    while count := await loop.sock_recv_into(source, view):
        await _sleep_until(link.reserve(count))
        await loop.sock_sendall(sink, view[:count])
        link.nbytes += count


async def _pump_late(source: socket.socket, sink: socket.socket, link: _Direction) -> None:
    """Two tasks, since more is received while earlier bytes are on their way."""
    loop = asyncio.get_running_loop()
    places = IN_FLIGHT_BYTES // link.chunk_bytes
    flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=places)

    async def receive() -> None:
        while data := await loop.sock_recv(source, link.chunk_bytes):
            passed = link.reserve(len(data))
            await _sleep_until(passed)
            await flying.put((passed + link.latency_s, data))
        await flying.put((time.monotonic() + link.latency_s, b""))

    async def deliver() -> None:
        while True:
            due, data = await flying.get()
            await _sleep_until(due)
            if not data:
                return
            await loop.sock_sendall(sink, data)
            link.nbytes += len(data)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(receive())
        tasks.create_task(deliver())


class _Server:
    def __init__(self, target: tuple[str, int], rate_bytes_s: float | None, latency_s: float) -> None:
        self._target = target
        self._to_target = _Direction(rate_bytes_s, latency_s)
        self._from_target = _Direction(rate_bytes_s, latency_s)
        self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def counts(self) -> Counts:
        return Counts(self._to_target.nbytes, self._from_target.nbytes, self._connections)

    def reset(self) -> None:
        self._to_target.nbytes = self._from_target.nbytes = self._connections = 0

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            self._connections += 1
            task = asyncio.create_task(self._connection(client))
            self._tasks.add(task)  # the loop itself keeps no reference
            task.add_done_callback(self._tasks.discard)

    async def _connection(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        target = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for end in (client, target):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(target, self._target)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._one_way(client, target, self._to_target))
                tasks.create_task(self._one_way(target, client, self._from_target))
        except* OSError:  # one side broke off: the other one must see that it was no orderly end
            for end in (client, target):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            client.close()
            target.close()

    async def _one_way(self, source: socket.socket, sink: socket.socket, link: _Direction) -> None:
        try:
            await _pump(source, sink, link)
        except BaseExceptionGroup as group:  # of the tasks of a link with latency
            raise group.exceptions[0] from None
        sink.shutdown(socket.SHUT_WR)


async def _answer_questions(server: _Server) -> None:
    """Until standard input ends, which it also does when the process that started this one dies."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while word := (await reader.readline()).decode().strip():
        counts = server.counts()
        if word == "reset":
            server.reset()
        print(json.dumps(asdict(counts)), flush=True)


async def _main(target: tuple[str, int], listen: str, port: int, rate: float | None, latency_s: float) -> None:
    with socket.create_server((listen, port), backlog=512) as listener:
        listener.setblocking(False)
        server = _Server(target, rate, latency_s)
        serving = asyncio.create_task(server.serve(listener))
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        await _answer_questions(server)
        serving.cancel()


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(text if "://" in text else f"tcp://{text}")
    if parts.hostname is None or parts.port is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a URL with a port nor host:port")
    return parts.hostname, parts.port


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=_address, help="host:port, or a URL")
    parser.add_argument("--rate", type=float, help="bytes per second of each direction (default: no limit)")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds, one way (default: 0)")
    parser.add_argument("--listen", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: whoever started this one closes its input
    asyncio.run(_main(options.target, options.listen, options.port, options.rate, options.latency))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
