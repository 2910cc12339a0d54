"""Two nodes of two ranks and a store behind its own link: what each link carries when a job saves and loads."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import node_job
from tests.recipes.node_job import NBYTES, Job
from tests.servers import nodes
from tests.servers.juicefs import start_juicefs
from tests.servers.nodes import FABRIC, STORAGE, Cluster, Traffic

REPOSITORY = str(Path(__file__).parents[2])
RANKS_PER_NODE = 2
TIMEOUT_S = 120.0
LOADS: dict[str, dict[str, Any]] = {
    "none": {"exchange": "none"},
    "world": {"exchange": "auto", "exchange_scope": "world"},
    "node": {"exchange": "auto", "exchange_scope": "node"},
}

OVERHEAD = 1.03
"""Heads of packets and answers, and packets that were sent twice."""
SMALL_BYTES = 512 * 1024
"""Manifest, requests, what the ranks tell each other about plans, torch's own rendezvous."""


@contextmanager
def running_job(cluster: Cluster, job: Job) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One torchrun per node; the first node is where they meet."""
    meeting_point = f"{cluster.nodes[0].addresses[FABRIC]}:29500"
    with ExitStack() as stack:
        launchers: list[subprocess.Popen[bytes]] = []
        for i, node in enumerate(cluster.nodes):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(cluster.nodes)}"]
            command += [f"--nproc-per-node={RANKS_PER_NODE}"]
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={meeting_point}", "--rdzv-id=job"]
            command += [f"--local-addr={node.addresses[FABRIC]}", "-m", node_job.__name__]
            # The tests' other process groups live on loopback, and say so in the environment.
            env = {"GLOO_SOCKET_IFNAME": FABRIC, "OMP_NUM_THREADS": "1", "PYTHONPATH": REPOSITORY}
            log = stack.enter_context((Path(job.folder) / f"node{i}.log").open("wb"))
            command += [json.dumps(dataclasses.asdict(job))]
            launchers.append(node.popen(command, log=log, env=env))
            stack.callback(launchers[-1].wait)
            stack.callback(launchers[-1].kill)
        yield launchers


def logs(job: Job) -> str:
    found = sorted(Path(job.folder).glob("*.log"))
    return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in found)


def wait_for(path: Path, job: Job, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        ended = [process.returncode for process in launchers if process.poll() is not None]
        assert not ended, f"torchrun ended with {ended} before {path.name}\n{logs(job)}"
        assert time.monotonic() < deadline, f"no {path.name} within {TIMEOUT_S:g} s\n{logs(job)}"
        time.sleep(0.05)


@dataclasses.dataclass(frozen=True)
class Phase:
    traffic: Traffic
    report: dict[str, Any] | None


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Phase]:
    """One job does everything: starting its processes takes longest."""
    reason = nodes.missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("nodes")
    found: dict[str, Phase] = {}
    with nodes.cluster(2, fabric_bytes_s=200e6, store_bytes_s=100e6) as cluster, ExitStack() as stack:
        with cluster.store.network():
            server = start_juicefs(folder / "store", host=cluster.store.addresses[STORAGE])
            stack.callback(server.stop)
            server.make_bucket("bucket")
        job = Job(str(folder), "s3://bucket/run/step-00000001", server.storage_options, LOADS)
        launchers = stack.enter_context(running_job(cluster, job))
        before = cluster.traffic
        for phase in ("start", "save", *LOADS):
            reached = folder / f"{phase}.reached"
            wait_for(reached, job, launchers)
            now = cluster.traffic
            found[phase] = Phase(now.since(before), json.loads(reached.read_text()))
            before = now
            (folder / f"{phase}.go").touch()
        for launcher in launchers:
            assert launcher.wait(timeout=60) == 0, logs(job)
    return found


def about(nbytes: int, times: float) -> tuple[float, float]:
    """The least and the most that a link carries when so many bytes of tensors pass, so many times."""
    return nbytes * times, nbytes * times * OVERHEAD + SMALL_BYTES


def test_a_save_sends_each_byte_once_to_the_store_and_none_between_nodes(phases: dict[str, Phase]):
    traffic = phases["save"].traffic
    least, most = about(NBYTES, 1)
    assert least <= traffic.to_store <= most
    assert max(traffic.from_store, *traffic.to_fabric, *traffic.from_storage) < SMALL_BYTES


def test_without_exchange_every_rank_gets_what_it_wants_from_the_store(phases: dict[str, Phase]):
    traffic = phases["none"].traffic
    # One tensor four times, the other once on each node.
    least, most = about(NBYTES // 2, 4 + 2)
    assert least <= traffic.from_store <= most
    for received in traffic.from_storage:
        assert least / 2 <= received <= most / 2
    assert max(traffic.to_store, *traffic.to_fabric) < SMALL_BYTES


def test_exchange_in_the_world_gets_each_byte_from_the_store_once(phases: dict[str, Phase]):
    traffic, report = phases["world"].traffic, phases["world"].report
    assert report is not None
    least, most = about(NBYTES, 1)
    assert least <= traffic.from_store <= most
    assert report["bytes_needed"] <= report["bytes_fetched"] <= report["bytes_needed"] * OVERHEAD
    # Each node lacks what the other one has read, be it told once or to each of its ranks.
    assert NBYTES <= sum(traffic.to_fabric) <= 2 * most
    assert traffic.to_store < SMALL_BYTES


def test_exchange_in_nodes_gets_each_byte_once_per_node_and_sends_none_to_the_other(phases: dict[str, Phase]):
    traffic, report = phases["node"].traffic, phases["node"].report
    assert report is not None
    least, most = about(NBYTES, 2)
    assert least <= traffic.from_store <= most
    for received in traffic.from_storage:
        assert least / 2 <= received <= most / 2
    assert 2 * report["bytes_needed"] <= report["bytes_fetched"] <= 2 * report["bytes_needed"] * OVERHEAD
    assert report["bytes_sent"] >= NBYTES
    assert max(traffic.to_store, *traffic.to_fabric) < SMALL_BYTES
