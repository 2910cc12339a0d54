"""Real processes that save and are killed by SIGKILL at a chosen call.

Starting a Python with torch takes seconds, so one "zygote" imports everything once and forks a child per save.
That is safe because it never has a second thread, which it checks before each fork: no lock can be held by a
thread that the child lacks, and no client, event loop or process group exists before the fork.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from cloudckpt.config import Config

TIMEOUT_S = 60.0
CONFIG = Config(chunk_bytes=1024, pack_bytes=2100, num_threads=3, rank_timeout_s=2.0, retry_deadline_s=10.0)

# Calls of a Store that a save may make; "close" is the store's own.
STORE_CALLS = {
    "get",
    "size",
    "put",
    "put_if_absent",
    "honours_conditions",
    "list",
    "common_prefixes",
    "delete",
    "close",
}
UPLOAD_CALLS = {"write", "close", "abort"}


@dataclass(frozen=True)
class Ended:
    """How a child ended: ``signal`` it was killed by, or None and what its function returned or raised."""

    signal: int | None
    returned: Any = None
    raised: str | None = None


class Zygote:
    """``run([(function, *args), ...])`` calls every function in a child of its own, as ranks of one job if several."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
            # OpenBLAS would start threads when numpy is imported, OpenMP with the first large operation.
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("OPENBLAS_NUM_THREADS", "1")
            self._process.start()
        theirs.close()

    def run(
        self, calls: Sequence[tuple[Any, ...]], on_start: Callable[[Sequence[int]], None] | None = None
    ) -> list[Ended]:
        """``on_start`` gets the children's process ids."""
        self._pipe.send([(call[0], call[1:]) for call in calls])
        pids = self._receive()
        if on_start is not None:
            on_start(pids)
        return self._receive()

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S + 30):
            raise AssertionError("the zygote does not answer")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise AssertionError(answer)
        return answer


def _serve(pipe: Connection) -> None:
    import boto3  # noqa: F401
    import torch.distributed.tensor  # noqa: F401

    import cloudckpt._async
    import cloudckpt._export_hf
    import cloudckpt._load
    import cloudckpt._write
    import cloudckpt.store.fallback
    import cloudckpt.store.fsspec_s3
    import cloudckpt.store.obstore  # noqa: F401
    from cloudckpt import catalog

    catalog.WEAK_SETTLE_S = 0.001  # nobody competes here

    while True:
        try:
            calls = pipe.recv()
        except EOFError:
            return
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        if num_threads != 1:
            pipe.send(f"the zygote has {num_threads} threads: forking is not safe")
            continue
        port = _free_port()
        children = [_fork(function, args, rank, len(calls), port, pipe) for rank, (function, args) in enumerate(calls)]
        pipe.send([pid for pid, _ in children])
        deadline = time.monotonic() + TIMEOUT_S
        pipe.send([_wait(pid, read_end, deadline) for pid, read_end in children])


def _fork(
    function: Callable[..., Any], args: Sequence[Any], rank: int, size: int, port: int, pipe: Connection
) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:
        pipe.close()
        try:
            ended = Ended(None, returned=_as_rank(function, args, rank, size, port))
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            ended = Ended(None, raised=f"{type(error).__name__}: {error}")
        with os.fdopen(write_end, "wb") as answer:
            answer.write(pickle.dumps(ended))
    finally:
        os._exit(0)


def _as_rank(function: Callable[..., Any], args: Sequence[Any], rank: int, size: int, port: int) -> Any:
    if size == 1:
        return function(*args)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    # Not destroyed: that may wait for a peer that was killed.
    return function(*args)


def _wait(pid: int, read_end: int, deadline: float) -> Ended:
    while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read_end)
            return Ended(None, raised=f"still running after {TIMEOUT_S:g} s")
        time.sleep(0.002)
    with os.fdopen(read_end, "rb") as answer:
        data = answer.read()
    if os.WIFSIGNALED(waited[1]):
        return Ended(os.WTERMSIG(waited[1]))
    return pickle.loads(data) if data else Ended(None, raised=f"ended with status {waited[1]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Killer:
    """Counts events, writes each to ``log``, and kills its own process at number ``at``."""

    def __init__(self, log: str, at: int | None) -> None:
        self._descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write = os.write  # which is wrapped later
        self._at = at
        self._count = 0
        self._lock = threading.Lock()

    def event(self, name: str) -> None:
        with self._lock:
            self._write(self._descriptor, f"{name}\n".encode())
            if self._count == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.event(f"before {name}")
            try:
                return call(*args, **kwargs)
            finally:
                self.event(f"after {name}")

        return wrapped


class Doomed:
    """A store, or one of its uploads, whose calls are events."""

    def __init__(self, real: Any, calls: set[str], killer: Killer, label: str) -> None:
        self._real, self._calls, self._killer, self._label = real, calls, killer, label

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return self._killer.around(f"{self._label}{name}", value) if name in self._calls else value

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> Any:
        upload = self._killer.around("open_upload", self._real.open_upload)(key, nbytes_hint)
        return Doomed(upload, UPLOAD_CALLS, self._killer, "upload.")


def kill_at_store_calls(killer: Killer) -> None:
    """From here on, in this process, every store that a save opens is doomed."""
    from cloudckpt import _write

    real = _write.resolve
    _write.resolve = lambda *args: Doomed(real(*args), STORE_CALLS, killer, "")


def kill_at_system_calls(killer: Killer) -> None:
    """From here on, in this process, the calls that change a local disk are events; a write can end half-way."""
    real_write = os.write

    def write(descriptor: int, data: Any) -> int:
        killer.event("before write")
        view = memoryview(data).cast("B")
        done = real_write(descriptor, view[: len(view) // 2]) if len(view) > 1 else 0
        killer.event("within write")
        done += real_write(descriptor, view[done:])
        killer.event("after write")
        return done

    os.write = write
    for place, name in ((os, "fsync"), (os, "link"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir")):
        setattr(place, name, killer.around(name, getattr(place, name)))


HOW = {"store": kill_at_store_calls, "system": kill_at_system_calls, "nothing": lambda killer: None}


def expected(value: int, numel: int = 1000) -> dict[str, Any]:
    """The whole state as one process sees it. With ``CONFIG`` it has many chunks, and two packs."""
    import torch

    return {
        "w": torch.arange(numel, dtype=torch.float32) + 1000 * value,
        "b": torch.full((7,), value, dtype=torch.int64),
        "value": value,
    }


def save_job(
    url: str,
    value: int,
    log: str,
    at: int | None,
    how: str = "store",
    options: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    numel: int = 1000,
) -> str:
    """Save ``expected(value)``, as the ranks of a job if there are several; killed at event ``at`` (None: never)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import cloudckpt

    state = expected(value, numel)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state["w"] = distribute_tensor(state["w"], mesh, [Shard(0)], src_data_rank=None)
    HOW[how](Killer(log, at))
    commit = cloudckpt.save(
        state, url, storage_options=options, **{"step": value, "config": CONFIG, **(arguments or {})}
    )
    return commit.commit_id


def value_at(url: str, options: Mapping[str, Any] | None = None, numel: int = 1000) -> int | None:
    """Which state lies there, compared in full: a mix of two fails. None where nothing was committed."""
    import torch

    import cloudckpt

    found = {"w": torch.full((numel,), -1.0), "b": torch.full((7,), -1), "value": -1}
    try:
        cloudckpt.load(found, url, storage_options=options, config=CONFIG)
    except cloudckpt.errors.NotFoundError:
        assert (found["w"] == -1).all()
        return None
    right = expected(found["value"], numel)
    assert torch.equal(found["w"], right["w"])
    assert torch.equal(found["b"], right["b"])
    return int(found["value"])
