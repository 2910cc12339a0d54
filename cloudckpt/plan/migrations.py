"""Named steps from one version of a model's keys to the next: rename rules that a load looks up by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from cloudckpt.errors import InvalidStateError, MismatchError
from cloudckpt.plan.rename import Rules

MakeRules: TypeAlias = Callable[[], Rules]


@dataclass(frozen=True)
class Migration:
    """``from_version``: None for checkpoints that were saved without a model version."""

    from_version: str | None
    to_version: str
    make_rules: MakeRules

    def __str__(self) -> str:
        return f"{_shown(self.from_version)} -> {_shown(self.to_version)}"


_registered: dict[tuple[str | None, str], Migration] = {}


def migration(from_: str | None, to: str) -> Callable[[MakeRules], MakeRules]:
    """Register the decorated function as the way from model version ``from_`` to ``to``.

    It takes nothing, and returns rules as for ``rename``. Other than there, a rule may match nothing: checkpoints
    of one version need not hold the same. ``from_=None``: checkpoints that name no version. Must be called alike on
    all ranks; two functions for the same two versions are an InvalidStateError.
    """
    for version in [to] if from_ is None else [from_, to]:
        _check_named(version)
    if from_ == to:
        raise InvalidStateError(f"a migration leads from one version to another, not from {from_!r} to {to!r}")

    def register(function: MakeRules) -> MakeRules:
        added = Migration(from_, to, function)
        known = _registered.get((from_, to))
        if known is not None and _place(known.make_rules) != _place(function):
            raise InvalidStateError(
                f"there is a migration {added} already: {_place(known.make_rules)}, and now {_place(function)}"
            )
        _registered[from_, to] = added  # also anew, where its module was loaded again
        return function

    return register


def check_version(version: str | None) -> None:
    """Raises InvalidStateError for what is neither a version nor None."""
    if version is not None:
        _check_named(version)


def _check_named(version: Any) -> None:
    if not isinstance(version, str) or not version:
        raise InvalidStateError(f"a model version is a string that is not empty, not {version!r:.200}")


def migrations_between(stored: str | None, wanted: str | None, where: str) -> tuple[Migration, ...]:
    """The fewest migrations that lead from what is stored ``where`` to what is wanted (None: as it is stored).

    Of several such ways the one whose parts were registered first. Raises MismatchError where there is none.
    """
    check_version(wanted)
    if wanted is None or wanted == stored:
        return ()
    found: dict[str | None, tuple[Migration, ...]] = {stored: ()}
    ahead = deque(found)
    while ahead:
        version = ahead.popleft()
        if version == wanted:
            return found[version]
        for step in _registered.values():
            if step.from_version == version and step.to_version not in found:
                found[step.to_version] = (*found[version], step)
                ahead.append(step.to_version)
    known = ", ".join(map(str, _registered.values())) or "none"
    raise MismatchError(
        f"{where} holds model version {_shown(stored)}, and version {_shown(wanted)} is asked for, but no migrations "
        f"lead there (registered: {known}); register them with @cloudckpt.migration, or load without model_version"
    )


def _shown(version: str | None) -> str:
    return "(none)" if version is None else repr(version)


def _place(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"
