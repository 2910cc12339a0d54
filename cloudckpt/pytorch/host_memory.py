"""How much memory the host still has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")
"""Of the control group, version 2, as a process in a container sees its own."""


def available_bytes() -> int | None:
    """What can be had without anything being swapped out or killed for it; None where the system does not say."""
    known = [value for value in (_of_machine(), _of_container()) if value is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    kib = dict(_lines(_MEMINFO)).get("MemAvailable:")
    return None if kib is None else 1024 * kib


def _of_container() -> int | None:
    limit, used = (dict(_lines(_CONTAINER / name, prefix=name)).get(name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:  # "max": no limit
        return None
    cached = dict(_lines(_CONTAINER / "memory.stat")).get("inactive_file", 0)
    return max(0, limit - used + cached)


def _lines(path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Names and numbers; nothing where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return
    for line in text.splitlines():
        words = f"{prefix} {line}".split()
        if len(words) > 1 and words[1].isdecimal():
            yield words[0], int(words[1])
