"""What each rank tells of its target before anything is read, and what the coordinator makes of all that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cloudckpt.errors import InvalidStateError, MismatchError
from cloudckpt.format.tree import TreePath, path_text
from cloudckpt.plan.changes import Resizes
from cloudckpt.plan.names import check_found
from cloudckpt.plan.rules import ShardingRules, check_all_matched
from cloudckpt.pytorch.links import NamedSet
from cloudckpt.pytorch.match import Problems
from cloudckpt.pytorch.rounds import check_alike
from cloudckpt.pytorch.ties import Twins

NOTHING_SHARED = "no chunk is wanted twice"


@dataclass(frozen=True)
class Sharing:
    """What must be known of a rank to plan an exchange.

    ``digest``: of the table of its wants. ``touched``: a bit for every chunk, where these are few. ``is_own``:
    it wants just the chunks that the rank of its number wrote. ``device``: the type of device where most of its
    bytes go, None without any. ``serves``: types of devices that its group has a backend for. ``groups``: that
    it has already.
    """

    digest: bytes
    touched: bytes | None
    is_own: bool
    node: str
    device: str | None
    serves: frozenset[str]
    groups: frozenset[NamedSet]


@dataclass(frozen=True)
class Wish:
    """One rank's part of the comparison. ``asked``: a bit for every stored leaf, in tree order.

    ``arguments``: what all ranks must have called the function with. ``matched``: numbers of sharding rules.
    ``patterns``: of ``resize`` that name something. ``cast``, ``resized``: as in the report.
    ``sharing``: None if the rank reads by itself. ``declared``, ``twins``: as in `Match`.
    """

    asked: bytes
    problems: Problems
    arguments: Mapping[str, Any]
    has_objects: bool
    matched: tuple[int, ...]
    patterns: frozenset[str]
    cast: Mapping[str, tuple[str, str]]
    resized: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    sharing: Sharing | None
    declared: Mapping[str, bool] = field(default_factory=dict)
    twins: Sequence[Twins] = ()


@dataclass(frozen=True)
class Agreement:
    """``table``: of each rank, the number of its table among those that the ranks in ``tellers`` will tell."""

    table: tuple[int, ...]
    tellers: tuple[int, ...]
    nodes: tuple[str, ...]
    device: str
    groups: frozenset[NamedSet]


@dataclass(frozen=True)
class Verdict:
    """What ``strict=False`` forgives, what is changed on request, and how to share (or why not).

    ``has_objects``: whether any rank has objects to load into.
    """

    missing: list[str]
    unexpected: list[str]
    has_objects: bool
    cast: dict[str, tuple[str, str]]
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    agreement: Agreement | None
    reason: str


def judge(
    wishes: Sequence[Wish],
    stored: Sequence[TreePath],
    where: str,
    *,
    strict: bool,
    rules: ShardingRules | None,
    resize: Resizes | None,
    check_twins: Callable[[Iterable[Twins]], None],
) -> Verdict:
    """On the coordinator: all ranks' differences at once. Raises MismatchError, or InvalidStateError for the call.

    ``check_twins``: reads what two arrays hold that are for one memory; it raises InvalidStateError if they differ.
    """
    check_alike("load()", [wish.arguments for wish in wishes])
    check_all_matched(rules, [wish.matched for wish in wishes], map(path_text, stored))
    idle = [pattern for pattern in resize or () if not any(pattern in wish.patterns for wish in wishes)]
    if idle:
        raise InvalidStateError(f"resize: nothing in the target matches {', '.join(map(repr, idle))}")
    check_found(wish.declared for wish in wishes)
    asked = np.zeros(len(stored), dtype=bool)
    problems = Problems()
    for wish in wishes:
        asked |= unpack_bits(wish.asked, len(stored))
        problems.missing.extend(wish.problems.missing)
        problems.shapes.update(wish.problems.shapes)
        problems.dtypes.update(wish.problems.dtypes)
        problems.kinds.update(wish.problems.kinds)
    problems.missing = list(dict.fromkeys(problems.missing))
    unexpected = [path_text(path) for path, was_asked in zip(stored, asked, strict=True) if not was_asked]
    if problems.is_readable and (not strict or not (problems.missing or unexpected)):
        check_twins(pair for wish in wishes for pair in wish.twins)
        has_objects = any(wish.has_objects for wish in wishes)
        agreement, reason = agree([wish.sharing for wish in wishes])
        cast = {path: dtypes for wish in wishes for path, dtypes in wish.cast.items()}
        resized = {path: shapes for wish in wishes for path, shapes in wish.resized.items()}
        return Verdict(problems.missing, unexpected, has_objects, cast, resized, agreement, reason)
    raise _mismatch(problems, unexpected, where, strict)


def agree(parts: Sequence[Sharing | None]) -> tuple[Agreement | None, str]:
    """How to share what all ranks want, or why not. On the coordinator."""
    sharing = [part for part in parts if part is not None]
    if len(parts) == 1:
        return None, "there is one rank"
    if len(sharing) < len(parts):
        return None, "not asked for"
    if all(part.is_own for part in sharing):
        return None, "every rank wants what the rank of its number wrote"
    touched = [part.touched for part in sharing]
    if _are_disjoint([bits for bits in touched if bits is not None]) and None not in touched:
        return None, NOTHING_SHARED
    numbers: dict[bytes, int] = {}
    tellers: list[int] = []
    for rank, part in enumerate(sharing):
        if numbers.setdefault(part.digest, len(numbers)) == len(tellers):
            tellers.append(rank)
    devices = {part.device for part in sharing if part.device is not None}
    device = devices.pop() if len(devices) == 1 else "cpu"
    if not all(device in part.serves for part in sharing):
        device = "cpu"
    offered = frozenset().union(*(part.groups for part in sharing))
    agreement = Agreement(
        table=tuple(numbers[part.digest] for part in sharing),
        tellers=tuple(tellers),
        nodes=tuple(part.node for part in sharing),
        device=device,
        groups=frozenset(item for item in offered if all(item in sharing[rank].groups for rank in item[0])),
    )
    return agreement, ""


def _are_disjoint(bits: Sequence[bytes]) -> bool:
    seen = 0
    for part in bits:
        number = int.from_bytes(part, "big")
        if seen & number:
            return False
        seen |= number
    return True


def _mismatch(problems: Problems, unexpected: list[str], where: str, strict: bool) -> MismatchError:
    lines = [f"the target does not fit the checkpoint at {where}:"]
    if strict or problems.missing or unexpected:
        lines += [f"  missing (asked for, not stored): {path}" for path in problems.missing]
        lines += [f"  unexpected (stored, not asked for): {path}" for path in unexpected]
    for what, found in (("shape", problems.shapes), ("dtype", problems.dtypes), ("kind", problems.kinds)):
        lines += [
            f"  {what}: {path} is {stored} in the checkpoint, {own} in the target"
            for path, (stored, own) in found.items()
        ]
    shown = lines[:60] + ([f"  ... and {len(lines) - 60} more"] if len(lines) > 60 else [])
    return MismatchError(
        "\n".join(shown),
        missing=problems.missing,
        unexpected=unexpected,
        shapes=problems.shapes,
        dtypes=problems.dtypes,
        kinds=problems.kinds,
    )


def pack_bits(bits: npt.NDArray[np.bool_]) -> bytes:
    return np.packbits(bits).tobytes()


def unpack_bits(bits: bytes, count: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count).astype(bool)
