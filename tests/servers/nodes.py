"""Nodes of a cluster, and a store, as Linux namespaces of this machine with their own network links.

Every node has two links into a switch: ``fabric``, to the other nodes, and ``storage``, to the store,
which hangs on one link of its own. All bytes are counted, and links can be slowed down (``tc tbf``).

A node is one process, the init of its PID namespace, that waits for the end of its input. When it ends,
be it since this process dies, the kernel kills everything that runs on the node, and removes its
namespaces and links. Nothing is named, so nothing can be left over.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

FABRIC = "fabric"
STORAGE = "storage"

BURST_BYTES = 256 * 1024
"""What may pass at once: several of the 64 KiB that TCP hands down in one piece."""

QUEUE_BYTES = 4 * 1024 * 1024

_CLONE_NEWNET = 0x40000000

# The pid as this process sees it, before /proc is replaced by the new namespace's.
_HOLD = 'read -r pid rest </proc/self/stat; mount -t proc proc /proc; mount -t sysfs sysfs /sys; echo "$pid"; exec cat'


@functools.cache
def missing() -> str | None:
    """Why this machine cannot run nodes; None if it can."""
    if os.uname().sysname != "Linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for command in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(command) is None:
            return f"the command {command!r} is not installed (packages iproute2, util-linux)"
    try:
        with Node.start("probe") as node:
            node.call("ip", "link", "add", "name", "probe", "type", "veth", "peer", "name", "probe-peer")
    except RuntimeError as error:
        return f"network namespaces are not permitted here: {error}"
    return None


@dataclass(frozen=True)
class Node:
    """``addresses``: by network."""

    name: str
    pid: int
    addresses: dict[str, str] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def start(cls, name: str) -> Iterator[Node]:
        command = ["unshare", "--net", "--uts", "--pid", "--mount", "--propagation", "private", "--fork"]
        process = subprocess.Popen(
            [*command, "--kill-child=KILL", "sh", "-c", f"hostname {name}; {_HOLD}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            answer = process.stdout.readline().strip()
            if not answer:
                raise RuntimeError(process.stderr.read().decode().strip() or "unshare failed")
            node = cls(name, int(answer))
            node.call("ip", "link", "set", "dev", "lo", "up")
            yield node
        finally:
            process.kill()  # and with it, by --kill-child, the init process
            process.communicate()

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command line that runs ``command`` on this node."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--pid", "--mount", "--", *command]

    def call(self, *command: str) -> None:
        """Set up this node's network and mounts; pids are those outside. Raises RuntimeError with what it said."""
        inside = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--", *command]
        done = subprocess.run(inside, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

    def popen(self, command: Sequence[str], *, log: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command on this node. It ends with the node at the latest."""
        return subprocess.Popen(
            self.inside(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
        )

    @contextmanager
    def network(self) -> Iterator[None]:
        """The calling thread is in this node's network: sockets that it opens, processes that it starts."""
        with Path("/proc/thread-self/ns/net").open() as here, Path(f"/proc/{self.pid}/ns/net").open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def received_and_sent(self) -> dict[str, tuple[int, int]]:
        """By link of this node, in bytes, with the packets' heads."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()[2:]
        columns = {name.strip(): numbers.split() for name, numbers in (line.split(":", 1) for line in lines)}
        return {name: (int(numbers[0]), int(numbers[8])) for name, numbers in columns.items()}


def _enter(network: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    if libc.setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


@dataclass(frozen=True)
class Traffic:
    """Bytes by link. ``to_store`` and ``from_store``: over the store's one link."""

    to_store: int
    from_store: int
    to_fabric: tuple[int, ...]
    """By node, what it sent to other nodes."""
    from_storage: tuple[int, ...]
    """By node, what it received from the store."""

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.to_store - earlier.to_store,
            self.from_store - earlier.from_store,
            tuple(a - b for a, b in zip(self.to_fabric, earlier.to_fabric, strict=True)),
            tuple(a - b for a, b in zip(self.from_storage, earlier.from_storage, strict=True)),
        )


@dataclass(frozen=True)
class Cluster:
    nodes: tuple[Node, ...]
    store: Node
    _switch: Node

    @property
    def traffic(self) -> Traffic:
        """Since the start, as the switch counts it."""
        links = self._switch.received_and_sent()
        return Traffic(
            to_store=links["store"][1],
            from_store=links["store"][0],
            to_fabric=tuple(links[f"{FABRIC}{i}"][0] for i in range(len(self.nodes))),
            from_storage=tuple(links[f"{STORAGE}{i}"][1] for i in range(len(self.nodes))),
        )


@contextmanager
def cluster(
    num_nodes: int = 2, *, fabric_bytes_s: float | None = None, store_bytes_s: float | None = None
) -> Iterator[Cluster]:
    """Nodes and a store until the block is left; ask ``missing()`` first.

    ``fabric_bytes_s`` and ``store_bytes_s``: what each node's fabric link and the store's link carry in
    either direction; None is as fast as this machine can. The store's link is shared by all nodes.
    """
    with ExitStack() as stack:
        switch = stack.enter_context(Node.start("switch"))
        for bridge in (FABRIC, STORAGE):
            switch.call("ip", "link", "add", "name", bridge, "type", "bridge")
            switch.call("ip", "link", "set", "dev", bridge, "up")
        nodes = tuple(stack.enter_context(Node.start(f"node{i}")) for i in range(num_nodes))
        store = stack.enter_context(Node.start("store"))
        for i, node in enumerate(nodes):
            _connect(switch, f"{FABRIC}{i}", node, FABRIC, f"10.91.1.{i + 1}", fabric_bytes_s)
            _connect(switch, f"{STORAGE}{i}", node, STORAGE, f"10.91.2.{i + 1}", None)
        _connect(switch, "store", store, STORAGE, "10.91.2.100", store_bytes_s)
        _tell_names(nodes)
        yield Cluster(nodes, store, switch)


def _connect(switch: Node, port: str, node: Node, network: str, address: str, bytes_s: float | None) -> None:
    """A cable from a port of the switch to a node, whose end is named after the network."""
    peer = ["peer", "name", network, "netns", str(node.pid)]
    switch.call("ip", "link", "add", "name", port, "type", "veth", *peer)
    switch.call("ip", "link", "set", "dev", port, "master", network, "up")
    node.call("ip", "address", "add", f"{address}/24", "dev", network)
    node.call("ip", "link", "set", "dev", network, "up")
    if bytes_s is not None:
        for end, device in ((switch, port), (node, network)):
            end.call(
                *("tc", "qdisc", "add", "dev", device, "root", "tbf"),
                *("rate", f"{int(bytes_s * 8)}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)),
            )
    node.addresses[network] = address


def _tell_names(nodes: Sequence[Node]) -> None:
    """Nodes know each other's names, and their own, which torchrun looks up."""
    with tempfile.NamedTemporaryFile("w", prefix="hosts-") as hosts:
        Path(hosts.name).chmod(0o644)
        hosts.write("127.0.0.1 localhost\n" + "".join(f"{node.addresses[FABRIC]} {node.name}\n" for node in nodes))
        hosts.flush()
        for node in nodes:
            node.call("mount", "--bind", hosts.name, "/etc/hosts")
