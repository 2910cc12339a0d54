"""The cluster of namespaces that the multi-node tests run on."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.servers import nodes
from tests.servers.nodes import FABRIC, STORAGE, Node


@pytest.fixture(autouse=True)
def permitted() -> None:
    reason = nodes.missing()
    if reason is not None:
        pytest.skip(reason)


def send(sender: Node, receiver: Node, network: str, nbytes: int) -> float:
    """Seconds that it took."""
    with receiver.network():
        listener = socket.create_server((receiver.addresses[network], 0))
    with listener, sender.network():
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        start = time.monotonic()
        sending = threading.Thread(target=client.sendall, args=(bytes(nbytes),))
        sending.start()
        while nbytes:
            nbytes -= len(server.recv(1 << 20))
        sending.join()
        return time.monotonic() - start


def test_links_count_their_bytes_and_keep_to_their_rates():
    mine = Path("/proc/thread-self/ns/net").readlink()
    with nodes.cluster(3, fabric_bytes_s=20e6, store_bytes_s=10e6) as cluster:
        first, second, third = cluster.nodes
        before = cluster.traffic
        assert send(first, third, FABRIC, 4_000_000) > 0.15
        assert send(cluster.store, second, STORAGE, 2_000_000) > 0.15
        traffic = cluster.traffic.since(before)
        assert 4_000_000 < traffic.to_fabric[0] < 4_200_000
        assert max(traffic.to_fabric[1:]) < 200_000
        assert 2_000_000 < traffic.from_store < 2_100_000
        assert 2_000_000 < traffic.from_storage[1] < 2_100_000
        assert max(traffic.to_store, traffic.from_storage[0], traffic.from_storage[2]) < 100_000
        name = subprocess.run(second.inside(["hostname"]), check=True, capture_output=True, text=True)
        assert name.stdout.strip() == second.name == "node1"
    assert Path("/proc/thread-self/ns/net").readlink() == mine


KILLED = """
import sys
from tests.servers import nodes
with nodes.cluster(2) as cluster:
    with open("/dev/null", "wb") as log:
        cluster.nodes[0].popen(["sleep", "1000"], log=log, env={})
    print(*(node.pid for node in (*cluster.nodes, cluster.store)), flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_of_a_killed_test():
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as test:
        assert test.stdout is not None
        pids = [int(word) for word in test.stdout.readline().split()]
        assert len(pids) == 3
        namespaces = {Path(f"/proc/{pid}/ns/pid").readlink() for pid in pids}
        test.kill()
    deadline = time.monotonic() + 20
    while left := [path for path in Path("/proc").glob("[0-9]*") if _namespace(path) in namespaces]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _namespace(process: Path) -> Path | None:
    try:
        return (process / "ns/pid").readlink()
    except OSError:  # it has ended
        return None
