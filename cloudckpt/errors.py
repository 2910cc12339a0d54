"""What can go wrong, grouped by what a caller would do about it.

CloudckptError
├── NotFoundError          nothing is there: wrong URL, not committed
│   └── NoBucketError      not even the bucket
├── AlreadyCommittedError  the checkpoint exists: choose another step, or overwrite=True
├── InvalidStateError      the state or an argument cannot be used as it is: change it
├── MismatchError          target and checkpoint differ: change the target, or strict=False
├── FormatError            not a checkpoint that this version reads
├── CorruptChunkError      stored bytes are not the bytes that were written
├── BusyError              background saves are still running: wait for one, or allow more at a time
├── HelperError            the process that does background saves died, or met something unknown
├── StoreError             the store refused or stayed unreachable
└── RankError              other ranks failed: see .causes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class CloudckptError(Exception):
    """Base of every error that this package raises on purpose."""


class NotFoundError(CloudckptError):
    """No such checkpoint, bucket or object."""


class NoBucketError(NotFoundError):
    """Not even the bucket is there: most likely its name is mistyped."""


class AlreadyCommittedError(CloudckptError):
    """A committed checkpoint is at this URL already, and ``overwrite`` was not asked for."""


class InvalidStateError(CloudckptError):
    """The state (or an option) cannot be saved or loaded into as it is."""


class FormatError(CloudckptError):
    """What is stored is not a checkpoint, is damaged, or is of a newer format."""


class MismatchError(CloudckptError):
    """The target and the checkpoint differ; nothing was changed.

    ``missing`` and ``unexpected`` are dotted paths. ``shapes``, ``dtypes`` and ``kinds`` map a
    dotted path to ``(stored, target)``.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
        dtypes: Mapping[str, tuple[str, str]] | None = None,
        kinds: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.shapes = dict(shapes or {})
        self.dtypes = dict(dtypes or {})
        self.kinds = dict(kinds or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class CorruptChunkError(CloudckptError):
    """A chunk is absent, short, or fails its checksum.

    ``array`` is the dotted path of the tensor, ``box`` its ``(offset, shape)`` in elements,
    ``key`` the object (relative to the checkpoint), ``byte_offset`` where the chunk starts in it.
    """

    def __init__(
        self,
        message: str,
        *,
        array: str,
        box: tuple[tuple[int, ...], tuple[int, ...]],
        key: str,
        byte_offset: int,
    ) -> None:
        super().__init__(message)
        self.array = array
        self.box = box
        self.key = key
        self.byte_offset = byte_offset

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class BusyError(CloudckptError):
    """As many background saves are under way as may be, or they hold all the memory that one more needs."""


class StoreError(CloudckptError):
    """The store failed. ``retryable`` tells whether trying again later could help."""

    def __init__(self, message: str, *, key: str | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.key = key
        self.retryable = retryable

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class HelperError(CloudckptError):
    """The helper process of background saves was killed or broke down; the next save starts another."""


class RankError(CloudckptError):
    """One or more ranks failed; every rank raises. ``causes`` maps a rank to its error's text."""

    def __init__(self, message: str, *, causes: Mapping[int, str]) -> None:
        super().__init__(message)
        self.causes = dict(causes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class InterruptedTransferError(CloudckptError):
    """Internal: this rank stopped because another one failed. Callers see that rank's RankError."""


def _rebuild(cls: type[CloudckptError], args: tuple[Any, ...], fields: dict[str, Any]) -> CloudckptError:
    """Unpickle without the keyword-only constructor: errors travel between ranks."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error
