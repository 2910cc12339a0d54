"""What is in a run of checkpoints, and what those who work on it may do to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import cloudckpt
from cloudckpt._write import Commit
from cloudckpt.errors import AlreadyCommittedError, RankError, StoreError
from cloudckpt.retention import Removal
from tests.faults.simulated import Job

ROWS = 10
FROZEN = torch.arange(8, dtype=torch.int16)


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


@dataclass(frozen=True)
class Stored:
    """A committed step, as it was read. ``order``: of the run's steps, by what the manifest says."""

    value: int
    order: tuple[int, int]


Steps = dict[int, Stored]


@dataclass
class Save:
    """A save that was begun. ``took_effect``: the step was seen to have its value.

    ``first``: the run by then; None where its job may be mistaken about it, which does not look again at what it has
    seen: another one has replaced steps.
    """

    step: int
    value: int
    overwrite: bool
    first: Steps | None
    took_effect: bool = False

    def check(self, before: Steps, after: Steps, changed: set[int]) -> None:
        """That it may have made the one state of the run into the other."""
        assert changed == {self.step}, (changed, self)
        assert self.step in after, self
        assert after[self.step].value == self.value, (after, self)
        assert self.overwrite or self.step not in before, (before, self)
        assert not self.took_effect, self
        self.took_effect = True
        if before == self.first:  # else the order is that of either beginnings or ends
            assert after[self.step].order == max(stored.order for stored in after.values()), (after, self)

    def judge(self, job: Job, steps: Steps) -> None:
        """What it told its callers is what it did."""
        outcomes = [job.outcomes.get(rank) for rank in range(job.size)]
        for outcome in outcomes:
            if isinstance(outcome, Commit):
                assert self.took_effect
            elif isinstance(outcome, AlreadyCommittedError):
                assert not self.took_effect
                assert not self.overwrite
            elif outcome is not None:
                assert isinstance(outcome, RankError | StoreError), repr(outcome)
        survivors = [outcome for rank, outcome in enumerate(outcomes) if rank not in job.dead]
        assert None not in survivors
        if job.fault is None and not job.dead:
            assert all(isinstance(o, Commit | AlreadyCommittedError) for o in survivors), survivors


@dataclass
class Prune:
    """Retention that was begun. ``first``: the run by then."""

    keep_last: int
    first: Steps

    def check(self, before: Steps, after: Steps, changed: set[int]) -> None:
        newest = sorted(before, key=lambda step: before[step].order)[-self.keep_last :]
        for step in changed:
            assert step not in after, (step, after)
            # Stores have no conditional delete: docs/adr/0016 names the loss of what replaces a step at that moment.
            assert step not in newest or before[step] != self.first.get(step), (step, before, self)

    def judge(self, job: Job, steps: Steps) -> None:
        (outcome,) = [job.outcomes.get(rank) for rank in range(job.size)]
        if job.fault is not None or job.dead:
            assert outcome is None or isinstance(outcome, Removal | StoreError), repr(outcome)
            return
        assert isinstance(outcome, Removal), repr(outcome)
        assert not outcome.failed
        assert not outcome.faults
        newest = sorted(self.first, key=lambda step: self.first[step].order)[-self.keep_last :]
        assert not {step for step in self.first if step not in newest and self.first[step] == steps.get(step)}
