"""Without the garbage collector for a moment."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """For what all ranks wait for, and what makes many small objects and keeps them.

    Python looks for garbage whenever some hundreds were made, and now and then through all that the process has,
    which takes hundreds of milliseconds in a training process; on one of many ranks it is always now. It would
    find nothing here, and may look later, while each rank transfers by itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
