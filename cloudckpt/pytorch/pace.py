"""When ranks that meet in a store ask it, and when they give one another up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

GROWTH = 1.5


@dataclass(frozen=True)
class Pace:
    """Between two questions of a rank lies first ``first_s``, then more and more, up to ``longest_s``.

    ``beat_s``: between two signs of life. ``farewell_s``: how long the coordinator stays for the others in the end.
    """

    first_s: float
    longest_s: float
    beat_s: float
    farewell_s: float

    @classmethod
    def of(cls, size: int, timeout_s: float) -> Pace:
        """Slower with many ranks, so that all of them together ask at most 512 times a second."""
        longest_s = min(1.0 + size / 512, timeout_s / 6)
        first_s = min(0.02 + size / 4096, longest_s)
        return cls(first_s, longest_s, timeout_s / 6, 2.0 + 2 * longest_s)

    def pauses(self) -> Iterator[float]:
        """Without end."""
        pause_s = self.first_s
        while True:
            yield pause_s
            pause_s = min(GROWTH * pause_s, self.longest_s)


class Signs:
    """Who has given no sign of life since this was made. By counters, for the clocks of two nodes may differ.

    ``read``: the counters of some ranks, which only grow while these are alive.
    """

    def __init__(self, read: Callable[[Sequence[int]], Sequence[int]], timeout_s: float) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._start_s = time.monotonic()
        self._next_s = self._start_s + timeout_s / 4
        self._seen: dict[int, tuple[int, float]] = {}

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` whose counter has not moved for ``timeout_s``; it is looked at four times in that time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + self._timeout_s / 4
        for rank, count in zip(ranks, self._read(ranks), strict=True):
            before, _ = self._seen.get(rank, (0, self._start_s))
            if count != before:
                self._seen[rank] = count, now_s
        return [rank for rank in ranks if now_s - self._seen.get(rank, (0, self._start_s))[1] >= self._timeout_s]
