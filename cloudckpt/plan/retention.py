"""Which steps of a run are to be kept: small objects that look at the list of steps, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cloudckpt.errors import InvalidStateError
from cloudckpt.plan.history import SavedStep


class RetentionPolicy(Protocol):
    """A step is removed once no policy of its run keeps it."""

    def keep(self, steps: Sequence[SavedStep]) -> Iterable[SavedStep]:
        """Those of all committed steps, newest first, that are to stay."""


@dataclass(frozen=True)
class KeepLast:
    """The newest ``num_steps``."""

    num_steps: int

    def __post_init__(self) -> None:
        _check_positive("keep_last", self.num_steps)

    def keep(self, steps: Sequence[SavedStep]) -> Iterable[SavedStep]:
        return steps[: self.num_steps]


@dataclass(frozen=True)
class KeepEvery:
    """Those whose number is a multiple of ``interval``."""

    interval: int

    def __post_init__(self) -> None:
        _check_positive("keep_every", self.interval)

    def keep(self, steps: Sequence[SavedStep]) -> Iterable[SavedStep]:
        return [saved for saved in steps if saved.step % self.interval == 0]


def make_policies(
    keep_last: int | None, keep_every: int | None, others: Sequence[RetentionPolicy] = ()
) -> tuple[RetentionPolicy, ...]:
    """Raises InvalidStateError for settings that would remove everything, and for what is no policy."""
    made: list[RetentionPolicy] = []
    if keep_last is not None:
        made.append(KeepLast(keep_last))
    if keep_every is not None:
        made.append(KeepEvery(keep_every))
    for policy in others:
        if not callable(getattr(policy, "keep", None)):
            raise InvalidStateError(f"a retention policy has a method keep(steps), unlike {policy!r:.200}")
    return (*made, *others)


def removable(
    steps: Sequence[SavedStep], policies: Collection[RetentionPolicy], *, busy: Collection[str] = ()
) -> list[SavedStep]:
    """What goes, oldest first, of ``steps``, newest first. The newest never goes; without policies nothing does.

    ``busy``: names of directories that are being saved to.
    """
    if not policies or not steps:
        return []
    kept = {steps[0].name, *busy}
    for policy in policies:
        kept.update(saved.name for saved in policy.keep(steps))
    return [saved for saved in reversed(steps) if saved.name not in kept]


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidStateError(f"{name} must be an int of at least 1, or None to leave it out, not {value!r}")
