"""How large the parts of a multipart upload are, and how many are under way."""

from __future__ import annotations

from cloudckpt.config import Config

MAX_PARTS = 10_000
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html"""

MIN_PART_BYTES = 5 * 1024 * 1024
_STEP_BYTES = 1024 * 1024


def part_size(nbytes: int | None, part_bytes: int) -> int:
    """The size of every part but the last, so that ``nbytes`` fit into 10,000 of them.

    All parts are equal, as some stores (R2) demand. Where ``nbytes`` is only a hint, a tenth is
    left as room; an unknown size gets ``part_bytes``, which is good for ``10,000 * part_bytes``.
    """
    smallest = max(part_bytes, MIN_PART_BYTES)
    if nbytes is None or nbytes <= smallest * MAX_PARTS:
        return smallest
    needed = -(-nbytes * 11 // (10 * MAX_PARTS))
    return -(-needed // _STEP_BYTES) * _STEP_BYTES


def parts_in_flight(part_bytes: int, config: Config) -> int:
    """How many parts one upload may send at a time: two more are being filled or handed over."""
    return max(1, min(config.num_threads, config.memory_bytes // part_bytes - 2))
