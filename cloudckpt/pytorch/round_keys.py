"""What ranks tell one another in a round as keys of torch.distributed's store, signs of life among it."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

HEARTBEAT_S = 1.0
"""How often a working rank says that it lives, and looks whether another one failed."""


class RoundKeys:
    """The keys of one round after another, for one rank. ``number``: that of the round that it is in."""

    def __init__(self, store: PrefixStore, rank: int, size: int) -> None:
        self.number = 0
        self._store = store
        self._rank = rank
        self._size = size

    def set(self, name: str, value: object) -> None:
        self._store.set(self._key(name), pickle.dumps(value))  # type: ignore[arg-type]  # the stubs forget bytes

    def get(self, name: str) -> Any:
        return pickle.loads(self._store.get(self._key(name)))

    def has(self, name: str) -> bool:
        return self._store.check([self._key(name)])

    def add(self, name: str, number: int) -> int:
        """To a counter; returns what it is then."""
        return self._store.add(self._key(name), number)

    def delete(self, name: str) -> None:
        self._store.delete_key(self._key(name))

    def wait(self, name: str, timeout_s: float) -> bool:
        """Asks again and again: the store's own wait warns on the console whenever it times out."""
        deadline = time.monotonic() + timeout_s
        longest_s = 0.004 + self._size / 4096  # so that many ranks do not flood the store
        pause_s = 0.0005
        while not self.has(name):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)
        return True

    def scratch_store(self, name: str) -> PrefixStore:
        """For others, within this round."""
        return PrefixStore(self._key(f"scratch/{name}"), self._store)

    def tell_failure(self) -> None:
        self._store.set(self._key("failed"), "1")

    @contextlib.contextmanager
    def sign_of_life(self, cancel: threading.Event) -> Iterator[None]:
        """This rank is at work. ``cancel`` is set once another one has failed, or the store cannot be reached."""
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(stop, cancel), name="cloudckpt-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()

    def _watch(self, stop: threading.Event, cancel: threading.Event) -> None:
        beats = 0
        while not stop.wait(HEARTBEAT_S):
            beats += 1
            try:
                self._store.set(self._key(f"beat/{self._rank}"), str(beats))
                has_failed = self.has("failed")
            except RuntimeError:  # the store's process is gone, and with it this round
                cancel.set()
                return
            if has_failed:
                cancel.set()

    def beat(self, rank: int) -> bytes:
        """Another one with every sign of life."""
        key = self._key(f"beat/{rank}")
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def forget(self, number: int) -> None:
        """Of a round that all ranks have left."""
        if number > 0:
            names = [
                "verdict",
                "outcome",
                "failed",
                "left",
                *(f"{k}/{r}" for k in ("here", "beat") for r in range(self._size)),
            ]
            for name in names:
                self._store.delete_key(f"{number}/{name}")

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"


class Silence:
    """Who has given no sign of life for ``timeout_s``. ``deadline_s``: when that is looked at next."""

    def __init__(self, keys: RoundKeys, timeout_s: float) -> None:
        self.deadline_s = time.monotonic() + timeout_s
        self._keys = keys
        self._timeout_s = timeout_s
        self._beats: dict[int, bytes] = {}

    def of(self, ranks: Sequence[int]) -> list[int]:
        if time.monotonic() < self.deadline_s:
            return []
        beats = {rank: self._keys.beat(rank) for rank in ranks}
        silent = [rank for rank, beat in beats.items() if beat == self._beats.get(rank, b"")]
        if not silent:
            self._beats, self.deadline_s = beats, time.monotonic() + self._timeout_s
        return silent
