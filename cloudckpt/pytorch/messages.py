"""Messages between the ranks of one job that lie in a store where others may write, too."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cloudckpt.errors import CloudckptError, NoBucketError, NotFoundError
from cloudckpt.store.base import Store

NUM_THREADS = 16
"""Messages that are read at a time. They are small, so nearly all of the time is the store's."""

_MAC_BYTES = 32


@dataclass(frozen=True)
class Session:
    """What the ranks of one job share, so that they find and believe one another's messages."""

    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> Session:
        return cls(secrets.token_hex(8), secrets.token_bytes(32))


class ForgedMessageError(CloudckptError):
    """Internal: what lies under the key of a message was not written by a rank of this session."""


class Messages:
    """Bytes under keys of a store. Those that are handed out were written under the same key by this session."""

    def __init__(self, store: Store, session: Session) -> None:
        self._store = store
        self._secret = session.secret

    def put(self, key: str, body: bytes) -> None:
        """Replaces an older one. Raises StoreError."""
        self._store.put(key, self._mac(key, body) + body)

    def get(self, key: str) -> bytes | None:
        """None where there is no message yet. Raises ForgedMessageError, StoreError, NoBucketError."""
        try:
            data = self._store.get(key)
        except NoBucketError:
            raise
        except NotFoundError:
            return None
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, body)):
            raise ForgedMessageError(
                f"{key} in {self._store.url} was not written by this job: refused; see who else can write there"
            )
        return body

    def get_many(self, keys: Sequence[str]) -> list[bytes | ForgedMessageError | None]:
        """As ``get``, for all of them at a time."""
        with ThreadPoolExecutor(min(NUM_THREADS, max(1, len(keys))), thread_name_prefix="cloudckpt-messages") as pool:
            return list(pool.map(self._checked, keys))

    def keys(self, prefix: str) -> list[str]:
        """What lies below ``prefix`` now; not all of it need be messages."""
        return [found.key for found in self._store.list(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        """What cannot be deleted is left to the sweep of the run."""
        self._store.delete(keys)

    def _checked(self, key: str) -> bytes | ForgedMessageError | None:
        try:
            return self.get(key)
        except ForgedMessageError as error:
            return error

    def _mac(self, key: str, body: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + body, "sha256")
