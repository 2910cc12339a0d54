"""Plain text for terminals and pipes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime


def printable(text: str, *, keep_lines: bool = False) -> str:
    """Control characters come out as escapes: what a checkpoint says must not steer the terminal."""
    return "".join(
        c if c.isprintable() or (keep_lines and c == "\n") else c.encode("unicode_escape").decode() for c in text
    )


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def human_bytes(nbytes: int) -> str:
    """Three digits or so, in powers of 1024: ``1.5 MiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            return f"{nbytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.0f} PiB"


def age(created: str, now: datetime) -> str:
    """Of an ISO 8601 time; empty for what is none."""
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return ""
    seconds = int((now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Lines with aligned columns; ``right`` names the columns that hold numbers, by position: ``"02"``."""
    cells = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if str(i) in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
