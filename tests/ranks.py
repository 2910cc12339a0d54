"""Real processes that run a function as the ranks of one job, on gloo or on a backend of the test's own.

Starting a Python with torch takes seconds, so all processes are forked from a server that has imported it, and are
kept and used again; every call sets up a new process group, with a rendezvous of its own. The server never has a second
thread (see `kills.Zygote` for why that matters), and imports nothing of cloudckpt: a rank imports what is tested.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

TIMEOUT_S = 100.0


def _serve(pipe: Connection, backend: str, prepare: Callable[[], None] | None) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    while True:
        try:
            function, args, rank, world_size, port = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(TIMEOUT_S - 5, file=sys.__stderr__)
        try:
            limit = timedelta(seconds=TIMEOUT_S)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
            # Or a rank that is done at once would close connections that another has yet to see made.
            store.set(f"connected/{rank}", b"")
            store.wait([f"connected/{r}" for r in range(world_size)])
            try:
                answer = (True, function(*args))
            finally:
                dist.destroy_process_group()
        except BaseException:  # noqa: BLE001  # the test process reports it
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


class RankPool:
    """``run(n, function, *args)`` calls a module-level function in n processes; returns what they return, by rank."""

    def __init__(self, backend: str = "gloo", prepare: Callable[[], None] | None = None) -> None:
        """``prepare``: a module-level function that each process calls when it starts."""
        self._backend = backend
        self._prepare = prepare
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        while len(self._workers) < num_ranks:
            self._workers.append(_start(self._backend, self._prepare))
        import torch.distributed as dist

        # Held here, on a port that the system chose: two pools that look for a free one can find the same.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [pipe for _, pipe in self._workers[:num_ranks]]
        for rank, pipe in enumerate(pipes):
            pipe.send((function, args, rank, num_ranks, store.port))
        answers = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(TIMEOUT_S):
                self.stop()
                raise AssertionError(f"rank {rank} did not finish {function.__name__} within {TIMEOUT_S:g} s")
            answers.append(pipe.recv())
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def stop(self) -> None:
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()


IMPORTED = ["torch.distributed.tensor", "boto3", "numcodecs", "obstore", "s3fs"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _start(backend: str, prepare: Callable[[], None] | None) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, backend, prepare), daemon=True)
    # gloo would look up the host's name, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        process.start()
    theirs.close()
    return process, ours
