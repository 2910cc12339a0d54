"""Rename rules: the stored state seen under other names, with tensors stacked, cut and turned on the way.

A rule names keys by their dotted paths, whole. ``{name}`` in a pattern stands for a text without
dots, ``{name:d}`` for digits only, ``{name:*}`` for any text, also one with dots, also an empty one.
The same name stands for the same text throughout a rule. Rules are applied one after another, each
to what those before it have left; within one rule everything moves at once.

A target may also be a tuple of keys: then these are the keys of the new path, ints as ints, and
``"{name:d}"`` alone as the int that it stands for. For a dotted target, the keys of the old path
that its text shares with the new one stay what they were; see `retarget`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cloudckpt.errors import InvalidStateError
from cloudckpt.plan.patterns import Target


@dataclass(frozen=True)
class Stack:
    """Tensors that differ in one placeholder become one, with a new dim ``dim`` that it counts: 0, 1, ... without gaps.

    ``Stack("{p:*}.experts.{e}.w1", "{p:*}.experts.w1")``: the placeholder is the one that ``target`` has not.
    """

    source: str
    target: Target
    dim: int = 0


@dataclass(frozen=True)
class Unstack:
    """The inverse of `Stack`: a tensor for each index of ``dim``, numbered by the placeholder that ``source`` lacks."""

    source: str
    target: Target
    dim: int = 0


@dataclass(frozen=True)
class Concatenate:
    """Tensors become one along ``dim``: several sources in order, or one with a placeholder more than ``target``."""

    sources: str | tuple[str, ...]
    target: Target
    dim: int = 0


@dataclass(frozen=True)
class Split:
    """The inverse of `Concatenate`. ``sizes``: the extents along ``dim``, or a number of equal parts.

    ``targets``: one for every part, or one with a placeholder more than ``source``, which counts the parts.
    """

    source: str
    targets: str | tuple[Target, ...]
    sizes: int | tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True)
class Transpose:
    """Dim k of the result is dim ``dims[k]`` of the stored tensor, as ``torch.permute``. ``target``: as it was."""

    source: str
    dims: tuple[int, ...] = (1, 0)
    target: Target | None = None


Rule: TypeAlias = tuple[str, Target] | Stack | Unstack | Concatenate | Split | Transpose | Callable[[str], str]
"""``(pattern, target)`` moves whatever stands there; a function gets every dotted path, and returns the new one."""

Rules: TypeAlias = Rule | Sequence[Rule] | Mapping[str, Target]


def listed(rules: Any) -> list[Any]:
    """One rule, or several. Raises InvalidStateError for what is neither; of each rule `moves` knows what it is."""
    if isinstance(rules, Mapping):
        return list(rules.items())
    single = isinstance(rules, (Stack, Unstack, Concatenate, Split, Transpose)) or callable(rules)
    if single or (isinstance(rules, tuple) and len(rules) == 2 and isinstance(rules[0], str)):
        return [rules]
    if isinstance(rules, (list, tuple)):
        return list(rules)
    raise InvalidStateError(f"rename must be a list of rules, not {rules!r:.200}")


def shown(rule: Any) -> str:
    """Functions by name: their addresses are others on every rank."""
    return str(getattr(rule, "__qualname__", type(rule).__qualname__)) if callable(rule) else repr(rule)[:300]
