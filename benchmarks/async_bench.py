"""What a background save costs the training: how long the call blocks, and how much slower steps are meanwhile.

    python benchmarks/async_bench.py --mib 1024 --tensors 100 --repeat 3

One process trains: forward, backward and an optimizer's step of a small network on one thread. It saves to an S3 server
on the same machine by either executor; for comparison another process, which does nothing else, uploads as many bytes
with the client library alone. The turns alternate. The first save, which makes buffers and plans, is shown apart.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the server lies with the tests
MIB = 1024 * 1024
BUCKET = "async"
EXECUTORS = ("thread", "process")


@dataclass
class AsyncFigures:
    """Seconds, by turn; ``steps``: the mean step while that upload ran. ``quiet_step_s``: with nothing beside."""

    mib: int
    first_s: dict[str, float] = field(default_factory=dict)
    blocked_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in EXECUTORS})
    memcpy_s: list[float] = field(default_factory=list)
    steps_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*EXECUTORS, "uploader")})
    uploads_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*EXECUTORS, "uploader")})
    quiet_step_s: float = 0.0

    @property
    def bars(self) -> list[tuple[str, list[float], float]]:
        """What is promised, the figures by turn, and the most that they may be."""
        found: list[tuple[str, list[float], float]] = []
        for name in EXECUTORS:
            ratios = [a / b for a, b in zip(self.blocked_s[name], self.memcpy_s, strict=True)]
            found.append((f"async_save blocks ({name}) / memcpy", ratios, 1.3))
        for name, bar in (("process", 1.15), ("thread", 1.3)):
            ratios = [a / b for a, b in zip(self.steps_s[name], self.steps_s["uploader"], strict=True)]
            found.append((f"step beside a save ({name}) / beside an idle uploader", ratios, bar))
        return found


class Training:
    """A step that is bound by one core, of which Python is a part as in real training."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), foreach=False)
        self._batch = torch.randn(64, 256)

    def step(self) -> float:
        start = time.perf_counter()
        loss = self._model(self._batch).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - start

    def while_running(self, is_done: Callable[[], bool]) -> tuple[float, float]:
        """The mean step until then, and how long that was."""
        start = time.perf_counter()
        steps = []
        while not is_done():
            steps.append(self.step())
        return mean(steps), time.perf_counter() - start


def measure_async(mib: int = 1024, num_tensors: int = 100, repeat: int = 3) -> AsyncFigures:
    import torch

    import cloudckpt

    count = mib * MIB // (4 * num_tensors)
    state = {f"w{i}": torch.full((count,), float(i)) for i in range(num_tensors)}
    source, target = (torch.ones(mib * MIB, dtype=torch.uint8) for _ in range(2))
    figures, training = AsyncFigures(mib), Training()
    with _server() as server, _uploader(server, mib) as upload:

        def save(executor: Any, name: str) -> tuple[float, cloudckpt.PendingSave]:
            start = time.perf_counter()
            pending = cloudckpt.async_save(
                state,
                f"s3://{BUCKET}/{name}",
                storage_options=server.storage_options,
                executor=executor,
                overwrite=True,
            )
            return time.perf_counter() - start, pending

        for executor in EXECUTORS:
            figures.first_s[executor], pending = save(executor, executor)
            pending.result()
        upload().wait()
        figures.quiet_step_s = median(training.step() for _ in range(200))
        for _ in range(repeat):
            start = time.perf_counter()
            ctypes.memmove(target.data_ptr(), source.data_ptr(), mib * MIB)
            figures.memcpy_s.append(time.perf_counter() - start)
            for executor in EXECUTORS:
                blocked_s, pending = save(executor, executor)
                figures.blocked_s[executor].append(blocked_s)
                _note(figures, executor, training.while_running(pending.done))
                pending.result()
            running = upload()
            _note(figures, "uploader", training.while_running(running.done))
    return figures


def measure_incremental(mib: int = 64) -> float:
    """The part of its bytes that a save writes, on a local disk, if nine tenths have not changed since the last one."""
    import torch

    import cloudckpt

    frozen = {f"frozen{i}": torch.rand(mib * MIB // 40) for i in range(9)}
    trained = torch.rand(mib * MIB // 40)
    with tempfile.TemporaryDirectory(prefix="incremental-") as folder:
        for step in range(2):
            state = {**frozen, "trained": trained + step}
            commit = cloudckpt.save(state, f"{folder}/step-{step:08d}", step=step, incremental=True)
    return commit.nbytes_new / commit.nbytes


def _note(figures: AsyncFigures, name: str, found: tuple[float, float]) -> None:
    figures.steps_s[name].append(found[0])
    figures.uploads_s[name].append(found[1])


@contextmanager
def _server() -> Iterator[Any]:
    from tests.servers.juicefs import start_juicefs

    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="async-", dir=shared if shared.is_dir() else None))
    server = start_juicefs(folder / "server")
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


class _Upload:
    """One that the other process was told to make. It says so in a line when it is done."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        import select

        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        self._out = process.stdout
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)

    def done(self) -> bool:
        return bool(self._poll.poll(0)) and bool(self._out.readline())

    def wait(self) -> None:
        self._out.readline()


@contextmanager
def _uploader(server: Any, mib: int) -> Iterator[Callable[[], _Upload]]:
    """Uploads are made by a process that sleeps otherwise."""
    options = server.storage_options
    command = [
        sys.executable,
        __file__,
        "--upload",
        str(mib),
        options["endpoint_url"],
        options["key"],
        options["secret"],
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield lambda: _Upload(process)
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(30)


def _serve_uploads(mib: int, endpoint: str, key: str, secret: str) -> None:
    import numpy as np
    import obstore
    from obstore.store import S3Store

    from cloudckpt.config import Config

    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=key,
        secret_access_key=secret,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    data = np.ones(mib * MIB, np.uint8)
    config = Config()
    for _ in sys.stdin:
        with obstore.open_writer(
            store, "uploader.bin", buffer_size=config.part_bytes, max_concurrency=config.num_threads
        ) as writer:
            for start in range(0, len(data), config.chunk_bytes):
                writer.write(memoryview(data[start : start + config.chunk_bytes]))
        print("done", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--upload", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.upload:
        mib, *access = args.upload
        _serve_uploads(int(mib), *access)
        return 0
    figures = measure_async(args.mib, args.tensors, args.repeat)
    for name in EXECUTORS:
        blocked = ", ".join(f"{1000 * s:.0f}" for s in figures.blocked_s[name])
        print(f"{name:8}: first call {1000 * figures.first_s[name]:.0f} ms, later ones {blocked} ms")
    print(f"memcpy  : {', '.join(f'{1000 * s:.0f}' for s in figures.memcpy_s)} ms")
    print(f"step    : {1000 * figures.quiet_step_s:.1f} ms with nothing beside")
    for name, steps in figures.steps_s.items():
        seconds = ", ".join(f"{s:.1f}" for s in figures.uploads_s[name])
        print(f"{name:8}: steps of {', '.join(f'{1000 * s:.1f}' for s in steps)} ms beside uploads of {seconds} s")
    print(f"incremental save, 90 % frozen: {measure_incremental():.4f} of its bytes written, at most 0.11")
    for what, ratios, bar in figures.bars:
        print(f"{what}: {median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}), at most {bar}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
