"""A run of checkpoints as a dict of steps: whatever jobs do to it, and wherever they die, a step is whole or absent.

After every rule the whole run is read. What has changed since must be the work of the one job that was let go on.
"""

from __future__ import annotations

import itertools
import posixpath
import random
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import cloudckpt
from cloudckpt._tries import RunPolicy
from cloudckpt._write import Commit
from cloudckpt.errors import NotFoundError
from cloudckpt.format.keys import MANIFEST, parse_step, step_dir
from cloudckpt.format.manifest import decode_manifest
from cloudckpt.plan.retention import make_policies
from cloudckpt.retention import Removal, Retention
from tests.faults.model import FROZEN, Prune, Save, Steps, Stored, state_of, value_of
from tests.faults.simulated import CONFIG, Fault, Job, Rank, install, resolve

LONG_S = 1e9

RETENTION = 2
"""The job beside the two writers."""

_WORLDS = itertools.count()


class Runs(RuleBasedStateMachine):
    """Two writers, who know nothing of each other, retention, and readers."""

    def __init__(self) -> None:
        super().__init__()
        self.root = f"memory://runs-{next(_WORLDS)}"
        self.values = itertools.count(1)
        self.jobs: dict[int, Job] = {}
        self.doing: dict[int, Save | Prune] = {}
        """What each of them is at."""
        self.authors: dict[int, Job] = {}
        """By value."""
        self.is_sound = True
        self.steps: Steps = {}
        """What is in the run."""
        self.read: dict[Any, tuple[dict[str, Any], Stored]] = {}
        """By manifest: the objects that were read, and what they are."""

    def url(self, step: int) -> str:
        return f"{self.root}/{step_dir(step)}"

    writers = st.sampled_from([0, 1])
    jobs_of_all = st.sampled_from([0, 1, RETENTION])
    sizes = st.integers(1, 3)
    steps_of_a_run = st.integers(1, 3)
    counts = st.integers(1, 30)
    manners = st.sampled_from([{"incremental": True}, {"incremental": True}, {}, {"layout": "zarr"}])
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
        manner=manners,
        fault=faults,
        stop_after=st.none() | counts,
    )
    def save(
        self,
        writer: int,
        step: int,
        overwrite: bool,
        manner: dict[str, Any],
        fault: Fault | None = None,
        stop_after: int | None = None,
    ) -> None:
        """From the beginning to the end, or to where it is held."""
        self.begin(writer, step, overwrite, manner, fault)
        self.go_on(writer, stop_after)

    @rule(
        steps=st.tuples(steps_of_a_run, steps_of_a_run),
        overwrite=st.tuples(st.booleans(), st.booleans()),
        manner=st.tuples(manners, manners),
        keep_last=st.none() | st.integers(1, 2),
        seed=st.integers(0, 1000),
    )
    def race(self, steps: Any, overwrite: Any, manner: Any, keep_last: int | None, seed: int) -> None:
        """Both writers, and perhaps retention, at the same time."""
        dice = random.Random(seed)
        for writer in (0, 1):
            self.begin(writer, steps[writer], overwrite[writer], manner[writer])
        if keep_last is not None:
            self.begin_retention(keep_last, LONG_S)
        while self.doing:
            self.go_on(dice.choice([*self.doing]), dice.randint(1, 15))

    @rule(steps=st.tuples(steps_of_a_run, steps_of_a_run), stop_after=counts, manner=manners)
    def be_overtaken(self, steps: tuple[int, int], stop_after: int, manner: dict[str, Any]) -> None:
        """What an incremental save relies on is no longer the newest while it goes on, and not kept."""
        self.save(0, steps[0], overwrite=True, manner={"incremental": True}, stop_after=stop_after)
        self.save(1, steps[1], overwrite=True, manner=manner)
        self.prune(keep_last=1)
        self.finish(0)

    def begin(
        self, writer: int, step: int, overwrite: bool, manner: dict[str, Any], fault: Fault | None = None
    ) -> None:
        self.finish(writer)
        job = self.job(writer)
        is_new = job not in self.authors.values()
        knows_all = is_new or all(self.authors[stored.value] is job for stored in self.steps.values())
        first = dict(self.steps) if knows_all else None
        self.doing[writer] = save = Save(step, next(self.values), overwrite, first)

        def saved(rank: Rank) -> Commit:
            return cloudckpt.save(
                state_of(save.value, rank.rank, rank.size),
                self.url(step),
                step=step,
                overwrite=overwrite,
                group=rank,
                storage_options=rank.storage_options,
                config=CONFIG,
                policy=RunPolicy(),
                **manner,
            )

        self.authors[save.value] = job
        job.start(saved, fault)

    @rule(keep_last=st.integers(1, 2), fault=faults, stop_after=st.none() | counts)
    def prune(self, keep_last: int, fault: Fault | None = None, stop_after: int | None = None) -> None:
        """By a process of its own."""
        self.begin_retention(keep_last, LONG_S, fault)
        self.go_on(RETENTION, stop_after)

    @precondition(lambda self: not self.doing)
    @rule()
    def sweep(self) -> None:
        """Where nobody is at anything, all goes that is of use to nobody."""
        self.begin_retention(1, 1e-9)
        self.go_on(RETENTION, None)
        used = {path for objects, _ in map(self.read.__getitem__, self.manifests().values()) for path in objects}
        assert self.objects().keys() == used | self.manifests().keys()

    def begin_retention(self, keep_last: int, orphan_age_s: float, fault: Fault | None = None) -> None:
        self.finish(RETENTION)
        job = self.jobs[RETENTION] = Job(1, 0)
        self.doing[RETENTION] = Prune(keep_last, dict(self.steps))

        def pruned(rank: Rank) -> Removal:
            run = resolve(self.root, rank.storage_options)
            return Retention(run, make_policies(keep_last, None), orphan_age_s=orphan_age_s).run()

        job.start(pruned, fault)

    @precondition(lambda self: any(job.is_busy for job in self.jobs.values()))
    @rule(writer=jobs_of_all, num_events=st.none() | counts)
    def go_on(self, writer: int, num_events: int | None) -> None:
        job = self.jobs.get(writer)
        if job is None or not job.is_busy:
            return
        self.is_sound = False
        job.advance(num_events)
        self.look(self.doing[writer])
        if not job.is_busy:
            self.doing.pop(writer).judge(job, self.steps)
            if job.dead:
                del self.jobs[writer]
        self.is_sound = True

    @precondition(lambda self: any(job.is_busy for job in self.jobs.values()))
    @rule(writer=jobs_of_all, rank=st.none() | st.integers(0, 2))
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
            right = state_of(self.steps[step].value, rank, size)
            assert target["value"] == right["value"]
            assert torch.equal(target["w"].local, right["w"].local)
            assert torch.equal(target["b"], right["b"])
            assert torch.equal(target["frozen"], FROZEN)

    @invariant()
    def nothing_changes_by_itself(self) -> None:
        self.look(None)

    def teardown(self) -> None:
        """All is finished, and nothing that happened is in the way of the next save."""
        try:
            if self.is_sound:
                for writer in [*self.doing]:
                    self.go_on(writer, None)
                self.jobs.clear()
                self.save(0, 9, overwrite=False, manner={"incremental": True})
                assert self.steps[9]
        finally:
            for job in self.jobs.values():
                job.kill()
                job.advance()
            MemoryFileSystem(skip_instance_cache=True).rm(self.root, recursive=True)

    def finish(self, writer: int) -> None:
        if self.job(writer).is_busy:
            self.go_on(writer, None)

    def job(self, writer: int) -> Job:
        return self.jobs.setdefault(writer, Job(2, 0))

    def look(self, doing: Save | Prune | None) -> None:
        """See what is in the run now; ``doing`` is what may have changed it."""
        found = {}
        for path, file in self.objects().items():
            directory, _, name = path.rpartition("/")
            if name == MANIFEST:
                step = parse_step(directory.rpartition("/")[2])
                assert step is not None
                found[step] = self.stored(directory, file)
        changed = {step for step in found.keys() | self.steps.keys() if found.get(step) != self.steps.get(step)}
        if changed:
            assert doing is not None
            doing.check(self.steps, found, changed)
        self.steps = found

    def stored(self, directory: str, manifest: Any) -> Stored:
        """A committed checkpoint; it is read again if any of its objects is not the one that was read before."""
        if manifest in self.read:
            objects, stored = self.read[manifest]
            if all(MemoryFileSystem.store.get(path) is file for path, file in objects.items()):
                return stored
        url = f"memory:/{directory}"
        value = value_of(cloudckpt.read(url, config=CONFIG))
        document = decode_manifest(manifest.getvalue(), url).document
        paths = [posixpath.normpath(f"{directory}/{entry.key}") for entry in document.objects]
        stored = Stored(value, (document.branch, document.step))
        self.read[manifest] = ({path: MemoryFileSystem.store[path] for path in paths}, stored)
        return stored

    def manifests(self) -> dict[str, Any]:
        return {path: file for path, file in self.objects().items() if path.endswith(f"/{MANIFEST}")}

    def objects(self) -> dict[str, Any]:
        """All that is stored. An object that was replaced is another one."""
        root = MemoryFileSystem._strip_protocol(self.root)
        return {path: file for path, file in MemoryFileSystem.store.items() if path.startswith(f"{root}/")}


@pytest.mark.timeout(1200)  # what fails is made smaller first
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 11))])
def test_a_step_is_whole_or_absent(monkeypatch: pytest.MonkeyPatch, part: int):
    """200 histories, and 2,000 in the long tests; parts, since what takes minutes is taken for a hang."""
    install(monkeypatch)
    run_state_machine_as_test(
        Runs,
        settings=settings(
            max_examples=200, stateful_step_count=10, suppress_health_check=[*HealthCheck], deadline=None
        ),
    )
