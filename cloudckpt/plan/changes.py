"""What a load may change on the way into the target, only because the caller said so: dtypes and extents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.dtypes import DTYPES

PLAIN_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})

Cast: TypeAlias = bool | str | Collection[str]


@dataclass(frozen=True)
class Resize:
    """A stored tensor may fill a target of other extents; what is at the same indices in both is loaded.

    ``fill``: what the rest of the target becomes; None keeps what it holds. ``shrink``: the target
    may be smaller along some dim, and what is beyond its end is not loaded.
    """

    fill: float | None = None
    shrink: bool = False


Resizes: TypeAlias = Mapping[str, Resize | float | None]
"""By pattern of dotted paths, as ``fnmatch`` has it; a number or None stands for ``Resize(fill=...)``."""


@dataclass(frozen=True)
class Changes:
    """``castable``: dtypes that may become each other. ``resizes``: by pattern, the first that matches counts."""

    castable: frozenset[str] = frozenset()
    resizes: Mapping[str, Resize] = field(default_factory=dict)

    @staticmethod
    def of(cast: Cast, resize: Resizes | None) -> Changes:
        """Raises InvalidStateError for options that make no sense."""
        return Changes(_castable(cast), _resizes(resize))

    def casts(self, stored: str, target: str) -> bool:
        return stored in self.castable and target in self.castable

    def resize(self, text: str) -> tuple[str, Resize] | None:
        """The pattern that a dotted path matches, and what it allows."""
        return next(((p, r) for p, r in self.resizes.items() if p == text or fnmatchcase(text, p)), None)

    def __str__(self) -> str:
        """For the comparison between ranks."""
        return f"castable={sorted(self.castable)}, resize={dict(self.resizes)!r}"


def fits(stored: tuple[int, ...], target: tuple[int, ...], resize: Resize) -> bool:
    """Whether one shape may become the other."""
    return len(stored) == len(target) and (resize.shrink or all(a <= b for a, b in zip(stored, target, strict=True)))


def uncovered(box: Box, covered: Box | None) -> Iterable[Box]:
    """What is left of a box without ``covered``, which lies inside of it: disjoint boxes, one per dim and side."""
    if covered is None:
        yield box
        return
    offset, shape = list(box.offset), list(box.shape)
    for dim, (start, extent) in enumerate(zip(covered.offset, covered.shape, strict=True)):
        for low, high in ((offset[dim], start), (start + extent, offset[dim] + shape[dim])):
            if low < high:
                yield Box((*offset[:dim], low, *offset[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :]))
        offset[dim], shape[dim] = start, extent


def _castable(cast: Any) -> frozenset[str]:
    if cast is False:
        return frozenset()
    if cast is True:
        return PLAIN_FLOATS
    names = [cast] if isinstance(cast, str) else cast
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidStateError(f"cast must be True, False or names of dtypes, not {cast!r:.200}")
    for name in names:
        if name not in DTYPES or not (name in PLAIN_FLOATS or name.startswith("float8_")):
            allowed = ", ".join(sorted(n for n in DTYPES if n in PLAIN_FLOATS or n.startswith("float8_")))
            raise InvalidStateError(f"cast: {name!r} is never converted; these can be: {allowed}")
    return PLAIN_FLOATS | frozenset(names)


def _resizes(resize: Any) -> dict[str, Resize]:
    if resize is None:
        return {}
    if not isinstance(resize, Mapping):
        raise InvalidStateError(f"resize must be a dict from patterns to fill values, not {resize!r:.200}")
    found = {}
    for pattern, value in resize.items():
        rule = value if isinstance(value, Resize) else Resize(fill=value)
        if not isinstance(pattern, str) or not isinstance(rule.fill, (int, float, type(None))):
            raise InvalidStateError(
                f"resize: {pattern!r:.200} -> {value!r:.200} is no pattern with a number, None or Resize"
            )
        found[pattern] = rule
    return found
