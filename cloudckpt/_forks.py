"""A fork waits for the imports of other threads.

A background save imports what it is the first to need: a client library, parts of numpy. A child that is forked
meanwhile inherits Python's lock of the module, and no thread that will ever release it: the child's own import of it
waits for ever. `DataLoader` workers are such children.
"""

from __future__ import annotations

import _imp  # the lock that each import takes before it takes its module's, and that a fork takes as well
import os
import threading
import time
from importlib import _bootstrap

MAX_WAIT_S = 10.0
"""After this the fork goes on as it would without this module: what it waited for may be waiting for this thread."""


def _wait() -> None:
    deadline = time.monotonic() + MAX_WAIT_S
    _imp.acquire_lock()
    while _others_import() and time.monotonic() < deadline:
        _imp.release_lock()
        time.sleep(0.001)
        _imp.acquire_lock()


def _others_import() -> bool:
    """Whether a thread other than this one holds the lock of a module."""
    me = threading.get_ident()
    locks = [reference() for reference in list(getattr(_bootstrap, "_module_locks", {}).values())]
    return any(getattr(lock, "owner", None) not in (None, me) for lock in locks)


os.register_at_fork(before=_wait, after_in_parent=_imp.release_lock, after_in_child=_imp.release_lock)
