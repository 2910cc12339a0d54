"""Counting requests from many threads."""

from __future__ import annotations

import threading

from cloudckpt.store.base import RequestCounts


class Counter:
    """Adds up what one store has done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = RequestCounts()

    def add(
        self,
        *,
        gets: int = 0,
        puts: int = 0,
        others: int = 0,
        bytes_fetched: int = 0,
        bytes_sent: int = 0,
        retries: int = 0,
    ) -> None:
        with self._lock:
            old = self._counts
            self._counts = RequestCounts(
                gets=old.gets + gets,
                puts=old.puts + puts,
                others=old.others + others,
                bytes_fetched=old.bytes_fetched + bytes_fetched,
                bytes_sent=old.bytes_sent + bytes_sent,
                retries=old.retries + retries,
            )

    def snapshot(self) -> RequestCounts:
        with self._lock:
            return self._counts
