"""A rectangular region of a tensor, in elements, half open."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        spans = ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=True))
        return f"[{spans}]"

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None where it is empty. 0-dim boxes always meet."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(e <= o for o, e in zip(offset, end, strict=True)):
            return None
        return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same region counted from ``origin``."""
        return Box(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.shape)
