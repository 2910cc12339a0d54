"""The order of the steps of a run, which is the order in which training went through them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloudckpt.format.keys import MAX_STEP


@dataclass(frozen=True)
class SavedStep:
    """A committed step of a run.

    ``branch``: how often training had gone back to an earlier step before it saved this one. ``name``: its
    directory in the run; ``commit_id``: tells it from what stood or will stand there.
    """

    step: int
    branch: int
    name: str
    commit_id: str


def newest_first(steps: Iterable[SavedStep]) -> list[SavedStep]:
    """By branch, then by step: clocks, times of files and names say nothing. Of copies, the one first by name."""
    return sorted(steps, key=lambda saved: (-saved.branch, -saved.step, saved.name))


def next_branch(step: int, earlier: Iterable[tuple[int, int]]) -> int:
    """The branch that ``step`` belongs to. ``earlier``: (branch, step) of all that were saved, or are being saved.

    What is not above the last step of the newest branch can only come after training went back: it opens
    another branch, so that it is newer than what was abandoned.
    """
    branch, last = max(earlier, default=(0, -1))
    # No manifest may have a higher one: to be the newest is worth less than to be read.
    return branch if step > last else min(branch + 1, MAX_STEP)
