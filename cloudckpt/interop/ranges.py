"""Small ranged reads of one object, many at a time where they are known beforehand."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from cloudckpt.store.base import Store
from cloudckpt.transfer.pool import run_all

JOIN_BYTES = 32 * 1024
"""Ranges that are no further apart than this are one request: as fast as what is skipped."""
MAX_REQUEST_BYTES = 4 * 1024 * 1024


class Ranges:
    """Bytes of one object. What `prefetch` has got is served from memory, all else is a request."""

    def __init__(self, store: Store, key: str, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self._store = store
        self._starts: list[int] = []
        self._parts: list[bytes] = []

    def keep(self, starts: Sequence[int], parts: Sequence[bytes]) -> None:
        """Serve these from now on, ascending, and forget what was kept before."""
        self._starts, self._parts = list(starts), list(parts)

    def read(self, byte_offset: int, nbytes: int) -> bytes:
        """StoreError if the object ends before the range does."""
        number = bisect.bisect_right(self._starts, byte_offset) - 1
        if number >= 0:
            within = byte_offset - self._starts[number]
            if within + nbytes <= len(self._parts[number]):
                return self._parts[number][within : within + nbytes]
        return self.get(byte_offset, nbytes)

    def get(self, byte_offset: int, nbytes: int) -> bytes:
        return b"".join(bytes(part) for part in self._store.stream(self.key, byte_offset, nbytes))


def prefetch(wanted: Mapping[Ranges, Iterable[tuple[int, int]]], *, num_threads: int) -> None:
    """Get ``(start, end)`` ranges of many objects; they forget what an earlier call got."""
    spans = [(ranges, span) for ranges, pairs in wanted.items() for span in joined(sorted(pairs))]
    found = [b""] * len(spans)

    def fetch(number: int) -> None:
        ranges, (start, end) = spans[number]
        found[number] = ranges.get(start, end - start)

    run_all((functools.partial(fetch, number) for number in range(len(spans))), num_threads=num_threads)
    for ranges, group in itertools.groupby(zip(spans, found, strict=True), key=lambda pair: pair[0][0]):
        mine = [(span[0], part) for (_, span), part in group]
        ranges.keep([start for start, _ in mine], [part for _, part in mine])


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges as fewer ones that cover them."""
    spans: list[tuple[int, int]] = []
    for start, end in ranges:
        if spans and start - spans[-1][1] <= JOIN_BYTES and end - spans[-1][0] <= MAX_REQUEST_BYTES:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


class Part:
    """``[byte_offset, byte_offset + nbytes)`` of an object, addressed from its own first byte."""

    def __init__(self, ranges: Ranges, byte_offset: int, nbytes: int) -> None:
        self.byte_offset = byte_offset
        self.nbytes = nbytes
        self._ranges = ranges

    @property
    def key(self) -> str:
        return self._ranges.key

    @property
    def object_nbytes(self) -> int:
        return self._ranges.nbytes

    def read(self, start: int, end: int) -> bytes:
        """The bytes ``[start, end)``, as far as there are any."""
        start, end = max(0, start), min(end, self.nbytes)
        return self._ranges.read(self.byte_offset + start, end - start) if end > start else b""
