"""Real processes that save and load together, and what it costs them."""

from __future__ import annotations

import ctypes
import gc
import resource
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_state import Layout, TensorSpec, build, check
from peers import PEERS, Place, Told, parent_folder
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TASK_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Task:
    """One collective call: ``layout`` is how the ranks hold the state that they save or want."""

    peer: str
    action: Literal["save", "load"]
    layout: Layout
    place: Place
    specs: list[TensorSpec]


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured. The times are of a clock that all processes of a machine share."""

    start_s: float
    end_s: float
    cpu_s: float
    extra_rss_bytes: int
    told: Told = field(default_factory=dict)


class TaskError(Exception):
    """A rank failed or was late; the pool is of no use any more."""


class Pool:
    """``size`` ranks with a gloo process group. Close it by leaving the ``with`` block."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        pairs = [context.Pipe() for _ in range(size)]
        self._ours = [ours for ours, _ in pairs]
        init = f"file://{self._folder.name}/rendezvous"
        self._processes: list[BaseProcess] = [
            context.Process(target=_serve, args=(rank, size, init, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def run(self, task: Task) -> list[RankFigures]:
        """Raises TaskError with the text of the first rank that failed."""
        for connection in self._ours:
            connection.send(task)
        figures: dict[int, RankFigures] = {}
        deadline = time.monotonic() + TASK_TIMEOUT_S
        while len(figures) < len(self._ours):
            waiting = {c: rank for rank, c in enumerate(self._ours) if rank not in figures}
            ready = wait(list(waiting), timeout=deadline - time.monotonic())
            if not ready:
                raise TaskError(f"ranks {sorted(waiting.values())} did not answer in {TASK_TIMEOUT_S:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except EOFError:
                    answer = "the process ended"
                if isinstance(answer, str):
                    raise TaskError(f"rank {waiting[connection]}: {answer}")
                figures[waiting[connection]] = answer
        return [figures[rank] for rank in range(len(self._ours))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, init: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    while True:
        task: Task = connection.recv()
        try:
            answer: RankFigures | str = _perform(task, mesh)
        except BaseException:  # noqa: BLE001  torch DCP's errors are no Exceptions; the parent reports and ends us
            answer = traceback.format_exc()
        connection.send(answer)


def _perform(task: Task, mesh: DeviceMesh) -> RankFigures:
    peer = PEERS[task.peer].peer
    state = build(task.specs, mesh, task.layout, filled=task.action == "save")
    if task.action == "save":
        parent_folder(task.place)
        return _measure(lambda: peer.save(state, task.place))
    figures = _measure(lambda: peer.load(state, task.place))
    check(task.specs, mesh, task.layout, state)
    return figures


def _measure(action: Callable[[], Told]) -> RankFigures:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else free memory of the last task would hide what this one needs
    dist.barrier()
    reset_peak_rss()
    rss = status_bytes("VmRSS")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start = time.monotonic()
    told = action()
    end = time.monotonic()
    now = resource.getrusage(resource.RUSAGE_SELF)
    peak = status_bytes("VmHWM")
    dist.barrier()
    cpu = now.ru_utime - usage.ru_utime + now.ru_stime - usage.ru_stime
    return RankFigures(start, end, cpu, max(0, peak - rss), told)


def reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
