"""The seam to storage: one small protocol, HTTP words with HTTP meanings.

Keys are relative to the store's root, ``/``-separated, without a leading slash. Every call blocks
and may be made from any thread. Implementations map every foreign exception to ``NotFoundError``
or ``StoreError``, and retry transient faults themselves, under one deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from cloudckpt.errors import StoreError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Quoted, for importing numpy would take a third of the command line's start.
Buffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"
"""Contiguous bytes. (``collections.abc.Buffer`` needs Python 3.12.)"""


def byte_view(data: Buffer) -> memoryview:
    """The same memory as single bytes."""
    view = memoryview(data)  # type: ignore[arg-type]  # numpy's stubs know of buffers from Python 3.12 on
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def ends_early(url: str, key: str, end: int, wanted: int) -> StoreError:
    """For an object that ends before a range that is asked of it does."""
    return StoreError(f"{key} of {url} ends at byte {end}, not {wanted}", key=key, retryable=False)


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    nbytes: int
    modified_s: float
    """Seconds since the epoch, by the store's clock; 0.0 where the store does not tell."""


@dataclass(frozen=True)
class RequestCounts:
    """What a store has done since it was made; all of them only grow."""

    gets: int = 0
    puts: int = 0
    others: int = 0
    bytes_fetched: int = 0
    bytes_sent: int = 0
    retries: int = 0

    @property
    def requests(self) -> int:
        return self.gets + self.puts + self.others


class UploadBrokenError(StoreError):
    """An upload that cannot go on where it stopped; the same bytes may arrive if they are sent again from the first."""


class Upload(Protocol):
    """One object being written front to back. Nothing is visible under the key before ``close``.

    All but ``abort`` raise UploadBrokenError where another upload of the same object is worth trying.
    """

    def write(self, data: Buffer) -> None:
        """Append. The buffer may be kept without a copy: it must not change before ``close`` returns."""

    def close(self) -> None:
        """Make the object visible and durable; raises if any byte of it did not arrive."""

    def abort(self) -> None:
        """Drop what was written. Never raises; harmless after ``close``."""


class Store(Protocol):
    """A flat namespace of objects below one root URL."""

    @property
    def url(self) -> str:
        """The root, for messages; secrets masked."""

    @property
    def counts(self) -> RequestCounts: ...

    def get(self, key: str) -> bytes:
        """The whole object; for small ones. Raises NotFoundError."""

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Buffer]:
        """The range ``[byte_offset, byte_offset + nbytes)`` as consecutive parts, in order.

        A part is only valid until the next one is asked for. A transfer that breaks is resumed
        where it stopped. Raises NotFoundError if the object is absent, StoreError if the object
        ends before the range does; the parts always add up to ``nbytes`` exactly. No parts for
        an empty range, whose place in the object is checked all the same.
        """

    def buffered_bytes(self, nbytes: int) -> int:
        """Host memory that one ``stream`` of ``nbytes`` holds at a time."""

    @property
    def num_streams(self) -> int:
        """How many ``stream`` calls at a time pay off."""

    def size(self, key: str) -> int:
        """Bytes of the object, asked of the store itself, never of a cache. Raises NotFoundError."""

    def put(self, key: str, data: Buffer) -> None:
        """Write the whole object in one atomic step, durable on return; replaces an older one."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Like ``put``, but only if no such object exists; False if one does.

        Atomic if ``honours_conditions()``; else a check and then a put, between which another
        writer may come, so that both are told True and the later object stays. After a lost
        answer the retry may find its own object and return False. For both reasons the caller
        stamps what it writes and reads it back.
        """

    def honours_conditions(self) -> bool:
        """Whether ``put_if_absent`` is atomic here; probed once per store, with two tiny puts."""

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> Upload:
        """Stream an object of unknown or roughly known size (for the multipart part size)."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object below ``prefix`` (a whole path part: ``a`` lists ``a/b``, not ``ab``), past any cache.

        In no particular order. A prefix that holds nothing, or does not exist, lists nothing.
        """

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        """What uploads that never ended have left below ``prefix``, as far as it can be told: `delete` takes the keys.

        `list` shows none of it. What is still being written is here as well.
        """

    def common_prefixes(self, prefix: str) -> Sequence[str]:
        """The next path parts below ``prefix`` that hold objects, sorted: ``["b"]`` for ``a/b/c`` below ``a``."""

    def delete(self, keys: Iterable[str]) -> dict[str, str]:
        """Delete many objects; absent ones count as deleted. Returns what failed: key to reason."""

    def close(self) -> None:
        """Give back connections and threads."""
