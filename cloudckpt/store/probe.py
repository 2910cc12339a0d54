"""Finding out whether a server means it when it answers 200 to ``If-None-Match: *``."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable

from cloudckpt.store.base import Buffer

# What a server can do does not change while a process runs, and each probe costs three requests.
_known: dict[str, bool] = {}
_lock = threading.Lock()


def honours_conditions(
    create: Callable[[str, Buffer], bool], delete: Callable[[Iterable[str]], object], identity: str
) -> bool:
    """Create one tiny object twice by conditional puts alone. ``identity`` names endpoint and bucket."""
    with _lock:
        if identity not in _known:
            key = f".cloudckpt-probe-{secrets.token_hex(8)}"
            try:
                create(key, b"probe")
                _known[identity] = not create(key, b"probe")
            finally:
                delete([key])
        return _known[identity]
