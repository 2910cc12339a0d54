"""Where a rank stands on the axes of a mixed-parallel job. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloudckpt.errors import InvalidStateError

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Slowest first, as torch's ``init_device_mesh`` is usually given them."""

EXPERT_AXES = ("edp", "ep", "etp")
"""The second decomposition, of the ranks of one pipeline stage; slowest first by default."""

AXES = (*DENSE_AXES, *EXPERT_AXES)

DATA_AXES = frozenset({"dp_replicate", "dp_shard", "cp", "edp"})
"""Axes over which weights are cut for memory only (ZeRO, FSDP): as one run of elements, whatever is packed in them."""


@dataclass(frozen=True)
class ParallelConfig:
    """The sizes of the parallel axes of a job, and in what order they make up a rank.

    Dense tensors: ``pp, dp_replicate, dp_shard, cp, tp``. Expert tensors: the ranks of each pipeline
    stage once more, as ``edp, ep, etp`` (Megatron's decoupled expert parallelism). ``etp=None``: as
    ``tp``; ``edp`` follows. Any of these names is an axis of ``size``, ``coordinates`` and of rules.

    ``order``: the axes slowest first, as in ``init_device_mesh``, or Megatron's string, fastest
    first, in which ``dp`` stands for ``dp_replicate, dp_shard``: the default is its
    ``"tp-cp-ep-dp-pp"``. The places of ``dp``, ``ep`` and ``tp`` order the expert axes, too; ``ep``
    may be left out, and then comes right after ``dp_shard``. Axes of size 1 may be left out.

    Raises InvalidStateError for sizes that do not fit together and for unknown or missing axes.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str | tuple[str, ...] = DENSE_AXES

    def __post_init__(self) -> None:
        for axis in (*DENSE_AXES, "ep"):
            object.__setattr__(self, axis, _size(axis, getattr(self, axis)))
        if self.etp is not None:
            object.__setattr__(self, "etp", _size("etp", self.etp))
        object.__setattr__(self, "order", self._full_order())
        stage = self.world_size // self.pp
        if stage % (self.ep * self.size("etp")):
            raise InvalidStateError(
                f"the {stage} ranks of a pipeline stage cannot be divided over ep={self.ep} x etp={self.size('etp')}"
            )

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in DENSE_AXES)

    def size(self, axis: str) -> int:
        """How many ranks stand along an axis, the expert axes included."""
        if axis == "etp":
            return self.tp if self.etp is None else self.etp
        if axis == "edp":
            return self.world_size // (self.pp * self.ep * self.size("etp"))
        if axis not in AXES:
            raise InvalidStateError(f"there is no axis {axis!r}; the axes are {', '.join(AXES)}")
        size: int = getattr(self, axis)
        return size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis, the expert axes included."""
        if not 0 <= rank < self.world_size:
            raise InvalidStateError(f"there is no rank {rank} among the {self.world_size} of {self}")
        dense = [axis for axis in self.order if axis != "ep"]
        found = self._split(rank, dense)
        within_stage = 0
        for axis in dense:
            if axis != "pp":
                within_stage = within_stage * self.size(axis) + found[axis]
        names = {"dp_shard": "edp", "ep": "ep", "tp": "etp"}
        found |= self._split(within_stage, [names[axis] for axis in self.order if axis in names])
        return {axis: found[axis] for axis in AXES}

    def _split(self, index: int, axes: list[str]) -> dict[str, int]:
        """Digits of a number whose last axis counts fastest."""
        found = {}
        for axis in reversed(axes):
            index, found[axis] = divmod(index, self.size(axis))
        return found

    def _full_order(self) -> tuple[str, ...]:
        given: Any = self.order
        if isinstance(given, str):
            given = [a for axis in reversed(given.split("-")) for a in (DENSE_AXES[1:3] if axis == "dp" else (axis,))]
        if not isinstance(given, (list, tuple)):
            raise InvalidStateError(
                f"order must be a tuple of axes or a string such as 'tp-cp-ep-dp-pp', not {given!r}"
            )
        order = list(given)
        unknown = [axis for axis in order if axis not in (*DENSE_AXES, "ep")]
        if unknown or len(set(order)) != len(order):
            fault = f"unknown axes {unknown}" if unknown else "an axis twice"
            raise InvalidStateError(f"order={self.order!r} has {fault}; it orders {', '.join(DENSE_AXES)} and ep")
        missing = [axis for axis in DENSE_AXES if axis not in order]
        large = [axis for axis in missing if getattr(self, axis) > 1]
        if large:
            raise InvalidStateError(f"order={self.order!r} lacks {', '.join(large)}, which this config makes use of")
        order = [*missing, *order]
        if "ep" not in order:
            order.insert(order.index("dp_shard") + 1, "ep")
        return tuple(order)


def _size(axis: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidStateError(f"the size of axis {axis} must be a positive int, not {value!r}")
    return int(value)
