"""A run of checkpoints as a dict of steps: whatever jobs do to it, and wherever they die, a step is whole or absent.

After every rule the whole run is read. What has changed since must be the work of the one job that was let go on.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import cloudckpt
from cloudckpt._write import Commit
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, NotFoundError, RankError, StoreError
from cloudckpt.format.keys import MANIFEST, parse_step, step_dir
from cloudckpt.format.manifest import decode_manifest
from tests.faults.simulated import CONFIG, Fault, Job, Rank, install

ROWS = 10
FROZEN = torch.arange(8, dtype=torch.int16)

_WORLDS = itertools.count()


def rows_of(value: int) -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.float32) + 100 * value


def state_of(value: int, rank: int, size: int) -> dict[str, Any]:
    """One rank's part of a state that is told from all others by its ``value``."""
    start, end = (ROWS * r // size for r in (rank, rank + 1))
    return {
        "w": cloudckpt.ShardedTensor(
            rows_of(value)[start:end].clone(), (ROWS,), [cloudckpt.Piece([0], [start], [end - start])]
        ),
        "b": torch.full((3,), value),
        "frozen": FROZEN,
        "mine": cloudckpt.PerRank((rank, value)),
        "value": value,
    }


def value_of(found: dict[str, Any]) -> int:
    """Of a state as ``read`` returns it; fails where it is not, in all its parts, one that was saved."""
    value = found["value"]
    assert torch.equal(found["w"], rows_of(value)), found
    assert torch.equal(found["b"], torch.full((3,), value)), found
    assert torch.equal(found["frozen"], FROZEN), found
    assert found["mine"] == [(rank, value) for rank in range(len(found["mine"]))], found
    return int(value)


@dataclass
class Save:
    """A save that was begun. ``took_effect``: the step was seen to have its value."""

    step: int
    value: int
    overwrite: bool
    took_effect: bool = False


class Runs(RuleBasedStateMachine):
    """Two writers, who know nothing of each other; and readers."""

    def __init__(self) -> None:
        super().__init__()
        self.root = f"memory://runs-{next(_WORLDS)}"
        self.values = itertools.count(1)
        self.jobs: dict[int, Job] = {}
        self.saves: dict[int, Save] = {}
        """What each writer is at."""
        self.steps: dict[int, int] = {}
        """What is in the run: values by step."""
        self.read: dict[Any, tuple[dict[str, Any], int]] = {}
        """By manifest: the objects that were read, and the value that they have."""

    def url(self, step: int) -> str:
        return f"{self.root}/{step_dir(step)}"

    writers = st.sampled_from([0, 1])
    sizes = st.integers(1, 3)
    steps_of_a_run = st.integers(1, 3)
    counts = st.integers(1, 30)
    layouts = st.sampled_from(["packed", "packed", "zarr"])
    faults = st.none() | st.builds(Fault, counts, st.sampled_from(["kill job", "kill rank", "refuse", "repeat"]))

    @rule(writer=writers, size=sizes, seed=st.integers(0, 1000))
    def begin_anew(self, writer: int, size: int, seed: int) -> None:
        """A writer that is at something is killed there."""
        self.kill(writer)
        self.jobs[writer] = Job(size, seed)

    @rule(
        writer=writers,
        step=steps_of_a_run,
        overwrite=st.booleans(),
        layout=layouts,
        fault=faults,
        stop_after=st.none() | counts,
    )
    def save(self, writer: int, step: int, overwrite: bool, layout: Any, fault: Fault | None, stop_after: int | None):
        """From the beginning to the end, or to where it is held."""
        self.begin(writer, step, overwrite, layout, fault)
        self.go_on(writer, stop_after)

    @rule(step=steps_of_a_run, overwrite=st.tuples(st.booleans(), st.booleans()), seed=st.integers(0, 1000))
    def race(self, step: int, overwrite: tuple[bool, bool], seed: int) -> None:
        """Both writers save one step at the same time."""
        dice = random.Random(seed)
        for writer in (0, 1):
            self.begin(writer, step, overwrite[writer], "packed", None)
        while self.saves:
            self.go_on(dice.choice([*self.saves]), dice.randint(1, 10))

    def begin(self, writer: int, step: int, overwrite: bool, layout: Any, fault: Fault | None) -> None:
        if self.job(writer).is_busy:
            self.go_on(writer, None)
        save = self.saves[writer] = Save(step, next(self.values), overwrite)

        def saved(rank: Rank) -> Commit:
            return cloudckpt.save(
                state_of(save.value, rank.rank, rank.size),
                self.url(step),
                step=step,
                overwrite=overwrite,
                layout=layout,
                group=rank,
                storage_options=rank.storage_options,
                config=CONFIG,
            )

        self.job(writer).start(saved, fault)

    @precondition(lambda self: any(job.is_busy for job in self.jobs.values()))
    @rule(writer=writers, num_events=st.none() | counts)
    def go_on(self, writer: int, num_events: int | None) -> None:
        job = self.jobs.get(writer)
        if job is None or not job.is_busy:
            return
        job.advance(num_events)
        self.look(self.saves[writer])
        if not job.is_busy:
            self.judge(job, self.saves.pop(writer))
            if job.dead:
                del self.jobs[writer]

    @precondition(lambda self: any(job.is_busy for job in self.jobs.values()))
    @rule(writer=writers, rank=st.none() | st.integers(0, 2))
    def kill(self, writer: int, rank: int | None = None) -> None:
        """The whole job, or one rank of it, at the event where it is held."""
        job = self.jobs.get(writer)
        if job is not None and job.is_busy:
            job.kill(None if rank is None else [rank % job.size])
            self.go_on(writer, None)

    @rule(step=steps_of_a_run, size=sizes)
    def load(self, step: int, size: int) -> None:
        """On another number of ranks."""

        def loaded(rank: Rank) -> Any:
            target = state_of(-1, rank.rank, rank.size)
            target["frozen"] = torch.zeros_like(FROZEN)
            del target["mine"]
            cloudckpt.load(
                target, self.url(step), group=rank, storage_options=rank.storage_options, strict=False, config=CONFIG
            )
            return target

        for rank, target in enumerate(Job(size, 0).run(loaded)):
            if step not in self.steps:
                assert isinstance(target, NotFoundError), target
                continue
            assert isinstance(target, dict), target
            right = state_of(self.steps[step], rank, size)
            assert target["value"] == self.steps[step]
            assert torch.equal(target["w"].local, right["w"].local)
            assert torch.equal(target["b"], right["b"])
            assert torch.equal(target["frozen"], FROZEN)

    @invariant()
    def nothing_changes_by_itself(self) -> None:
        self.look(None)

    def teardown(self) -> None:
        """All is finished, and nothing that happened is in the way of the next save."""
        try:
            for writer in [*self.saves]:
                self.go_on(writer, None)
            self.jobs.clear()
            self.save(0, 9, False, "packed", None, None)
            assert self.steps[9]
        finally:
            for job in self.jobs.values():
                job.kill()
                job.advance()
            MemoryFileSystem(skip_instance_cache=True).rm(self.root, recursive=True)

    def job(self, writer: int) -> Job:
        return self.jobs.setdefault(writer, Job(2, 0))

    def look(self, save: Save | None) -> None:
        """See what is in the run now; ``save`` is what may have changed it."""
        found = {}
        for path, file in self.objects().items():
            directory, _, name = path.rpartition("/")
            if name == MANIFEST:
                step = parse_step(directory.rpartition("/")[2])
                assert step is not None
                found[step] = self.value_in(directory, file)
        changed = {step for step in found.keys() | self.steps.keys() if found.get(step) != self.steps.get(step)}
        if changed:
            assert save is not None
            assert changed == {save.step}, (changed, save)
            assert found.get(save.step) == save.value, (found, save)
            assert save.overwrite or save.step not in self.steps, (self.steps, save)
            assert not save.took_effect, save
            save.took_effect = True
        self.steps = found

    def value_in(self, directory: str, manifest: Any) -> int:
        """Of a committed checkpoint; it is read again if any of its objects is not the one that was read before."""
        if manifest in self.read:
            objects, value = self.read[manifest]
            if all(MemoryFileSystem.store.get(path) is file for path, file in objects.items()):
                return value
        url = f"memory:/{directory}"
        value = value_of(cloudckpt.read(url, config=CONFIG))
        paths = [f"{directory}/{entry.key}" for entry in decode_manifest(manifest.getvalue(), url).objects]
        self.read[manifest] = ({path: MemoryFileSystem.store[path] for path in paths}, value)
        return value

    def objects(self) -> dict[str, Any]:
        """All that is stored. An object that was replaced is another one."""
        root = MemoryFileSystem._strip_protocol(self.root)
        return {path: file for path, file in MemoryFileSystem.store.items() if path.startswith(f"{root}/")}

    def judge(self, job: Job, save: Save) -> None:
        """What a save told its caller is what it did."""
        outcomes = [job.outcomes.get(rank) for rank in range(job.size)]
        for outcome in outcomes:
            if isinstance(outcome, Commit):
                assert save.took_effect
            elif isinstance(outcome, AlreadyCommittedError):
                assert not save.took_effect
                assert not save.overwrite
            elif outcome is not None:
                assert isinstance(outcome, RankError | StoreError), repr(outcome)
        survivors = [outcome for rank, outcome in enumerate(outcomes) if rank not in job.dead]
        assert None not in survivors
        if job.fault is None and not job.dead:
            assert save.took_effect or all(isinstance(o, CloudckptError) for o in survivors)
            assert all(isinstance(o, Commit | AlreadyCommittedError) for o in survivors), survivors


@pytest.mark.timeout(1200)  # what fails is made smaller first
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_a_step_is_whole_or_absent(monkeypatch: pytest.MonkeyPatch, count: int):
    install(monkeypatch)
    run_state_machine_as_test(
        Runs,
        settings=settings(
            max_examples=count, stateful_step_count=12, suppress_health_check=[*HealthCheck], deadline=None
        ),
    )
