"""A process whose last save failed, and nobody looked, must not end as if all were well."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence

EXIT_STATUS = 1

_askers: list[Callable[[], Sequence[str]]] = []


def ask_at_exit(faults: Callable[[], Sequence[str]]) -> None:
    """``faults`` is called when the interpreter ends: for any text that it returns the process ends with status 1."""
    _askers.append(faults)


def _leave() -> None:
    texts = [text for ask in _askers for text in ask()]
    if not texts:
        return
    for text in texts:
        print(text, file=sys.stderr)  # noqa: T201  # logging may not be configured, and this must be seen
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)  # nothing else changes the status of a process that is ending


# Handlers run last first: this one is registered as soon as the package is imported, so that it cuts off few others.
atexit.register(_leave)
os.register_at_fork(after_in_child=_askers.clear)
