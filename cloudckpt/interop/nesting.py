"""Flat keys back in the nested state that they came from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from cloudckpt.errors import FormatError
from cloudckpt.format.values import MAX_DEPTH

MAX_LIST = 1_000_000
MAX_HOLES = 100_000
"""Places of lists without a value, in all: an index must not make a list that nothing else fills."""


class _Sparse(dict[int, Any]):
    """A list while it is being filled."""


def nested(flat: Mapping[str, Any], paths: Mapping[str, Sequence[str | int]], where: str) -> dict[str, Any]:
    """A dict in which every value stands at its path; keys without one stay as they are.

    Ints in a path are indices of lists, whose places without a value become None. FormatError where two keys have the
    same place, or one lies in the other.
    """
    root: dict[str, Any] = {}
    holders = {id(root)}
    for key, value in flat.items():
        path = paths.get(key, (key,))
        if len(path) > MAX_DEPTH:
            raise FormatError(f"{where}: key {key!r:.200} is nested more than {MAX_DEPTH} levels deep")
        inner: Any = root
        for part, following in itertools.pairwise(path):
            inner = inner.setdefault(_checked(part, inner, key, where), _new(following))
            if id(inner) not in holders and (inner or not isinstance(inner, dict)):
                raise FormatError(f"{where}: key {key!r} lies inside of a value that is no dict or list")
            holders.add(id(inner))
        last = _checked(path[-1], inner, key, where)
        if last in inner:
            raise FormatError(f"{where}: key {key!r} has the same place as another one: {path!r:.200}")
        inner[last] = value
    if _holes(root) > MAX_HOLES:
        raise FormatError(f"{where}: its paths make lists with more than {MAX_HOLES} places that have no value")
    return _lists(root)  # type: ignore[no-any-return]


def _new(part: str | int) -> dict[Any, Any]:
    return _Sparse() if type(part) is int else {}


def _checked(part: str | int, holder: Any, key: str, where: str) -> str | int:
    if (type(part) is int) != (type(holder) is _Sparse) or (type(part) is int and not 0 <= part < MAX_LIST):
        raise FormatError(f"{where}: the path of key {key!r} does not fit those of others")
    return part


def _holes(value: Any) -> int:
    if type(value) not in (_Sparse, dict):
        return 0
    own = max(value, default=-1) + 1 - len(value) if type(value) is _Sparse else 0
    return own + sum(_holes(item) for item in value.values())


def _lists(value: Any) -> Any:
    if type(value) is _Sparse:
        return [_lists(value.get(index)) for index in range(max(value, default=-1) + 1)]
    return {key: _lists(item) for key, item in value.items()} if type(value) is dict else value
