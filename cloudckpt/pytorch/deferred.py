"""Objects that are copied while training waits, and pickled when it does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values

T = TypeVar("T")

_COPIES: dict[type, Callable[[Any], Any]] = {}
_WARNED: set[type] = set()


def register_staging(kind: type[T], copy: Callable[[T], T]) -> None:
    """How ``async_save(allow_pickle=True)`` takes its private copy of objects of exactly ``kind``.

    What ``copy`` returns must share nothing with the original that training may change; it is pickled in the
    background. Without one, such objects are pickled before ``async_save`` returns. The last call for a kind counts.
    """
    if not isinstance(kind, type):
        raise InvalidStateError(f"register_staging() takes a class, not {kind!r}")
    if not callable(copy):
        raise InvalidStateError(f"register_staging({kind.__qualname__}): the copy must be a function, not {copy!r}")
    _COPIES[kind] = copy


@dataclass(frozen=True, eq=False)
class Deferred:
    """A private copy of the object at ``path``, and the node, by reference, that its pickle goes into."""

    path: values.Path
    node: dict[str, Any]
    copy: Any


def finish(deferred: Iterable[Deferred]) -> None:
    """Pickle the copies. Raises InvalidStateError, naming the path, for one that cannot be."""
    for item in deferred:
        item.node.update(values.pickled(item.copy, item.path))


class Deferrals:
    """Takes the copies of one state: a `values.Deferrer`."""

    def __init__(self) -> None:
        self.taken: list[Deferred] = []

    def __call__(self, path: values.Path, obj: Any, node: dict[str, Any]) -> bool:
        kind = type(obj)
        copy = _COPIES.get(kind)
        if copy is None:
            _warn(kind, path)
            return False
        try:
            made = copy(obj)
        except Exception as error:
            raise InvalidStateError(
                f"{values.dotted(path)!r}: the copy registered for {kind.__qualname__} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if type(made) is not kind:
            raise InvalidStateError(
                f"{values.dotted(path)!r}: the copy registered for {kind.__qualname__} returned a "
                f"{type(made).__qualname__}"
            )
        self.taken.append(Deferred(path, node, made))
        return True


def _warn(kind: type, path: values.Path) -> None:
    """Once for each type: it is pickled with every save."""
    if kind not in _WARNED:
        _WARNED.add(kind)
        name = f"{kind.__module__}.{kind.__qualname__}"
        warnings.warn(
            f"{values.dotted(path)!r}: training waits while this {name} is pickled; to have that done in the "
            f"background, say how it is copied: cloudckpt.register_staging({kind.__qualname__}, copy.deepcopy)",
            stacklevel=2,
        )
