"""Which neighbouring byte ranges become one request."""

from __future__ import annotations

import numpy as np

from cloudckpt.format.grid import Ints

FRAMING_BYTES = 512
"""A gap that only holds the ZIP header and padding between two chunks of a pack (30 + name + 67 at most)."""


def coalesce(readers: Ints, objects: Ints, offsets: Ints, sizes: Ints, *, read_bytes: int) -> Ints:
    """The first row of every request; rows are sorted by reader, object and offset.

    Only ranges with no more than framing between them are joined, so an unwanted chunk is read along
    only if it is smaller than that. A request is closed at the first row that starts ``read_bytes`` or more after it.
    """
    if not len(objects):
        return np.zeros(0, dtype=np.int64)
    gap = offsets[1:] - (offsets[:-1] + sizes[:-1])
    new_run = np.ones(len(objects), dtype=bool)
    # A chunk that two keys share may lie behind its neighbour's end only if a manifest is wrong: never join these.
    new_run[1:] = (readers[1:] != readers[:-1]) | (objects[1:] != objects[:-1]) | (gap > FRAMING_BYTES) | (gap < 0)
    run = np.cumsum(new_run) - 1
    run_start = offsets[new_run][run]
    window = (offsets + sizes - 1 - run_start) // read_bytes
    first = new_run.copy()
    first[1:] |= window[1:] != window[:-1]
    return np.nonzero(first)[0]
