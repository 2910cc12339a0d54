"""What all kinds of groups make of a round's parts: bytes to send, one outcome, or one error for all ranks."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from isal import isal_zlib

from cloudckpt.errors import CloudckptError, InterruptedTransferError, InvalidStateError, RankError

K = TypeVar("K")

COORDINATOR = 0

_KEPT_LOCK = threading.Lock()


@dataclass(frozen=True)
class Failure:
    """An error that takes part in the round. ``interrupted``: it only says that another rank failed."""

    error: CloudckptError
    interrupted: bool


def kept_in(kept: dict[type, Any], kind: type[K]) -> K:
    """The one object of a kind in ``kept``, made at first use."""
    with _KEPT_LOCK:
        if kind not in kept:
            kept[kind] = kind()
        found = kept[kind]
    assert isinstance(found, kind)
    return found


def packed_part(part: Callable[[], object], tell_failure: Callable[[], None]) -> bytes | Failure:
    """What a part gives, or how it failed. Pickled here: what cannot be pickled must not break off the round.

    ``tell_failure`` is called where it failed.
    """
    try:
        return packed(part())
    except CloudckptError as error:
        failure = Failure(error, isinstance(error, InterruptedTransferError))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # the others must hear of it, whatever it is
        failure = Failure(foreign(error), False)
    tell_failure()
    return failure


def combined(parts: Sequence[Any], combine: Callable[[Sequence[Any]], Any]) -> bytes | Failure:
    """The outcome of a round, from the parts of all ranks, by rank."""
    failures = {rank: part for rank, part in enumerate(parts) if isinstance(part, Failure)}
    if failures:
        return Failure(joined(failures, len(parts)), False)
    try:
        return packed(combine([unpacked(part) for part in parts]))
    except CloudckptError as error:
        return Failure(error, False)
    except Exception as error:  # noqa: BLE001  # must reach all ranks
        return Failure(foreign(error), False)


def settled(outcome: bytes | Failure, mine: bytes | Failure | None) -> Any:
    """What a round gives; raises what it failed with, after this rank's own error, if ``mine`` is one."""
    if isinstance(outcome, Failure):
        raise outcome.error from (mine.error if isinstance(mine, Failure) else None)
    return unpacked(outcome)


def out_of_touch(rank: int, mine: bytes | Failure | None, text: str) -> RankError:
    """For a round that ``rank`` cannot go on with. ``mine``: its part, as far as it is known."""
    own = [str(mine.error)] if isinstance(mine, Failure) and not mine.interrupted else []
    return rank_error({rank: "; ".join([*own, text])})


def packed(value: object) -> bytes:
    """Compressed, since names and columns of numbers, of which descriptions and receipts consist, repeat themselves."""
    return isal_zlib.compress(pickle.dumps(value, protocol=5), 1)


def unpacked(data: bytes) -> Any:
    return pickle.loads(isal_zlib.decompress(data))


def joined(failures: dict[int, Failure], size: int) -> CloudckptError:
    """One error for all ranks: their own where all had the same, else a RankError with every cause."""
    causes = {rank: f for rank, f in failures.items() if not f.interrupted} or failures
    errors = [f.error for f in causes.values()]
    if len(errors) == size and all(type(e) is type(errors[0]) and str(e) == str(errors[0]) for e in errors):
        return errors[0]
    return rank_error({rank: f"{type(f.error).__name__}: {f.error}" for rank, f in causes.items()})


def rank_error(causes: dict[int, str]) -> RankError:
    """``causes``: what is wrong with each rank."""
    lines = [f"rank {rank}: {text}" for rank, text in causes.items()]
    shown = lines[:5] + ([f"... and {len(lines) - 5} more"] if len(lines) > 5 else [])
    return RankError("; ".join(shown), causes=causes)


def foreign(error: BaseException) -> CloudckptError:
    """An error that is not this package's own, as one that can travel between processes."""
    return CloudckptError(f"{type(error).__name__}: {error}")


def check_alike(what: str, parts: Sequence[Mapping[str, Any]]) -> None:
    """``parts``: by rank, the arguments that ``what`` was called with. Raises InvalidStateError where they differ."""
    for rank, part in enumerate(parts):
        for name, own in part.items():
            first = parts[0][name]
            if first != own:
                raise InvalidStateError(
                    f"{what} was called with {name}={first!r:.300} on rank 0 but {name}={own!r:.300} on rank {rank}"
                )
