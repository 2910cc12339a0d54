"""Processes that never stop saving, and what they write down of it for whoever kills them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import cloudckpt
from cloudckpt.config import Config
from cloudckpt.errors import HelperError
from cloudckpt.format.keys import step_dir

CONFIG = Config(chunk_bytes=1024, pack_bytes=2100, num_threads=3, rank_timeout_s=1.0, retry_deadline_s=10.0)
NUMEL = 600
NUM_STEPS = 6
KEEP_LAST = 3


@dataclass(frozen=True)
class Toil:
    """``log``: where rank r writes ``<log>.<r>``. ``first_value``: of the values of this job, which ascend."""

    run: str
    options: Mapping[str, Any] | None
    log: str
    seed: int
    first_value: int
    ways: Sequence[str]

    def logs(self, size: int) -> list[Path]:
        return [Path(f"{self.log}.{rank}") for rank in range(size)]


def state_of(value: int) -> dict[str, Any]:
    """The whole state. With `CONFIG` it has several chunks and packs."""
    return {
        "w": torch.arange(NUMEL, dtype=torch.float64) + NUMEL * value,
        "b": torch.full((7,), value, dtype=torch.int64),
        "value": value,
    }


def value_at(url: str, options: Mapping[str, Any] | None) -> int | None:
    """Which state lies there, compared in full: a mix of two fails. None where nothing was committed."""
    found = {key: torch.zeros_like(part) if key != "value" else -1 for key, part in state_of(0).items()}
    try:
        cloudckpt.load(found, url, storage_options=options, config=CONFIG)
    except cloudckpt.errors.NotFoundError:
        return None
    right = state_of(found["value"])
    assert torch.equal(found["w"], right["w"]), found["value"]
    assert torch.equal(found["b"], right["b"]), found["value"]
    return int(found["value"])


class Log:
    """One line for the beginning and one for the end of all that is done. They outlive the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @contextlib.contextmanager
    def during(self, way: str, step: int, value: int) -> Iterator[None]:
        self._write(["begin", way, step, value])
        yield
        self._write(["end", way, step, value])

    def _write(self, line: list[Any]) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def _save(toil: Toil, step: int, state: dict[str, Any], **arguments: Any) -> None:
    cloudckpt.save(
        state, f"{toil.run}/{step_dir(step)}", step=step, storage_options=toil.options, config=CONFIG, **arguments
    )


def _async(toil: Toil, step: int, state: dict[str, Any], **arguments: Any) -> None:
    pending = cloudckpt.async_save(
        state, f"{toil.run}/{step_dir(step)}", step=step, storage_options=toil.options, config=CONFIG, **arguments
    )
    state["b"].zero_()  # it is the caller's again
    pending.result()


def _run(toil: Toil, step: int, state: dict[str, Any]) -> None:
    """As a job does that keeps few steps, which are removed while it goes on."""
    with cloudckpt.Checkpointer(
        toil.run, storage_options=toil.options, keep_last=KEEP_LAST, incremental=True, config=CONFIG
    ) as run:
        run.save(step, state, overwrite=True)
        pending = run.async_save(step, state, overwrite=True)
        assert pending is not None
        pending.result()


def _copy(toil: Toil, step: int, state: dict[str, Any]) -> None:
    _save(toil, step, state, overwrite=True)
    source, target = (f"{run}/{step_dir(step)}" for run in (toil.run, copy_of(toil.run)))
    options = {"src_options": toil.options, "dst_options": toil.options}
    cloudckpt.copy(source, target, overwrite=True, progress=False, config=CONFIG, **options)


def copy_of(run: str) -> str:
    return f"{run}-copy"


WAYS: dict[str, Callable[[Toil, int, dict[str, Any]], None]] = {
    "save": lambda *args: _save(*args, overwrite=True),
    "zarr": lambda *args: _save(*args, overwrite=True, layout="zarr"),
    "incremental": lambda *args: _save(*args, overwrite=True, incremental=True),
    "thread": lambda *args: _async(*args, overwrite=True),
    "process": lambda *args: _async(*args, overwrite=True, executor="process"),
    "run": _run,
    "copy": _copy,
}


def work(toil: Toil) -> None:
    """As one rank, until the process is killed."""
    import torch.distributed as dist

    rank, mesh = 0, None
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh

        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
        _sharded(state_of(0), mesh)
        dist.barrier()  # from here on nobody waits for anybody, but in what is tested
    log, dice = Log(toil.logs(rank + 1)[rank]), random.Random(toil.seed)
    for value in itertools.count(toil.first_value):
        way, step = dice.choice(toil.ways), dice.randrange(NUM_STEPS)
        state = _sharded(state_of(value), mesh)
        # Without its helper a process goes on; the save that was lost with it has no end.
        with contextlib.suppress(HelperError), log.during(way, step, value):
            WAYS[way](toil, step, state)


def _sharded(state: dict[str, Any], mesh: Any) -> dict[str, Any]:
    if mesh is not None:
        from torch.distributed.tensor import Shard, distribute_tensor

        state["w"] = distribute_tensor(state["w"], mesh, [Shard(0)], src_data_rank=None)
    return state


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.002)


def await_start(toil: Toil, size: int) -> None:
    """Until all ranks of a job have come to what they toil at."""
    wait_until(lambda: all(path.exists() for path in toil.logs(size)), "the start of a job")


def await_one_more(toil: Toil, what: str) -> None:
    """Until the first rank has written one more such line."""
    (log,) = toil.logs(1)

    def count() -> int:
        return log.read_text().count(f'["{what}"')

    before = count()
    wait_until(lambda: count() > before, f"one more {what}")


@dataclass
class Ledger:
    """What may be in a run, by what its jobs have written down: values by step, None for nothing.

    ``ways``: those that write to the run. ``keep_last``: how many of the newest steps nobody removes; None: all.
    """

    ways: Sequence[str]
    keep_last: int | None = None
    allowed: dict[int, set[int | None]] = field(default_factory=dict)
    cut_off: list[str] = field(default_factory=list)
    """What was being done when a job was killed."""
    _newest: list[int] = field(default_factory=list)
    """Steps that are there, last first."""
    _undecided: dict[int, int] = field(default_factory=dict)
    """What was being saved when the last job was killed."""

    def expected(self, step: int) -> set[int | None]:
        return self.allowed.get(step, {None})

    def take(self, logs: Sequence[Path]) -> None:
        """The logs of a job that is no more, by rank. What one rank saw the end of is done."""
        lines = [line for path in logs if path.exists() for line in map(json.loads, path.read_text().splitlines())]
        ended = {value for what, _, _, value in lines if what == "end"}
        begun = sorted({(value, step, way) for _, way, step, value in lines if way in self.ways})
        for value, step, way in begun:
            if value in ended:
                self.allowed[step] = {value}
                self._put_first(step)
            else:
                self.cut_off.append(way)
                self.allowed[step] = self.expected(step) | {value}
                self._undecided[step] = value
        if_all_were_done = [*self._undecided, *(step for step in self._newest if step not in self._undecided)]
        for newest in (self._newest, if_all_were_done):
            for old in newest[self.keep_last :] if self.keep_last else ():
                self.allowed[old] = self.expected(old) | {None}

    def settle(self, step: int, found: int | None) -> None:
        assert found in self.expected(step), f"step {step}: found {found}, not one of {self.expected(step)}"
        self.allowed[step] = {found}
        undecided = self._undecided.pop(step, None)
        if found is None:
            self._newest = [other for other in self._newest if other != step]
        elif found == undecided:
            self._put_first(step)

    def _put_first(self, step: int) -> None:
        self._newest = [step, *(other for other in self._newest if other != step)]
