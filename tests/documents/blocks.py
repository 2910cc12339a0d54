"""The code blocks of a page of Markdown.

A fence says what it holds. Programs (``python``, ``console``, ``bash``) are run by the tests, in the order in which
they stand; one that cannot be is marked on the line before it: ``<!-- not run: reason -->``. Other languages are for
reading; ``text`` that follows a program is what it prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("python", "console", "bash")
READING = ("text", "json", "toml", "yaml", "ini")

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- not run: (.+) -->\n *\Z")
_RANKS = re.compile(r"# (\d+) ranks?\n")


@dataclass(frozen=True)
class Block:
    """``line``: of its first line in the page, from 1. ``reason``: why it is not run. ``output``: what it prints."""

    page: str
    line: int
    language: str
    source: str
    reason: str | None
    output: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def num_ranks(self) -> int | None:
        """As its first line says; None for one that goes on where the page's last one without ranks has stopped."""
        found = _RANKS.match(self.source)
        return int(found[1]) if found else None


def pages() -> list[str]:
    """All documents, relative to the repository."""
    found = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks(page: str) -> list[Block]:
    return blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page that has this text."""
    fences = list(_FENCE.finditer(text))
    found = []
    for number, fence in enumerate(fences):
        indent, language, source = fence.groups()
        line = text.count("\n", 0, fence.start()) + 2
        if language not in PROGRAMS + READING:
            raise AssertionError(
                f"{page}:{line - 1}: ```{language}: the language of a block is one of {PROGRAMS + READING}"
            )
        mark = _MARK.search(text[: fence.start()])
        after = fences[number + 1] if number + 1 < len(fences) else None
        follows = after is not None and after[2] == "text" and not text[fence.end() : after.start()].strip()
        output = after[3] if after is not None and follows and language in PROGRAMS else None
        lines = [part.removeprefix(indent) for part in source.splitlines(keepends=True)]
        found.append(Block(page, line, language, "".join(lines), mark[1] if mark else None, output))
    if len(fences) * 2 != len(re.findall(r"^ *```", text, re.MULTILINE)):
        raise AssertionError(f"{page}: a fence of a code block is open")
    return found


def runs(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in PROGRAMS and block.reason is None]


def not_run() -> list[Block]:
    return [block for page in pages() for block in blocks(page) if block.reason is not None]


@dataclass(frozen=True)
class Command:
    """One line of a console: words as a shell would make them, and what is shown of its output (None: nothing)."""

    line: int
    text: str
    output: str | None


def commands(block: Block) -> list[Command]:
    """``$ `` begins a command of ``console``, and what follows it is its output; ``bash`` has commands only."""
    source = re.sub(r" *\\\n\s*", lambda found: " " + "\0" * found[0].count("\n"), block.source)
    found: list[Command] = []
    line = block.line
    for text in source.split("\n"):
        folded = text.count("\0")
        text = text.replace("\0", "")
        if block.language == "bash" and text.strip() and not text.startswith("#"):
            found.append(Command(line, text, None))
        elif block.language == "console" and text.startswith("$ "):
            found.append(Command(line, text[2:], None))
        elif block.language == "console" and found and (text or found[-1].output):
            last = found.pop()
            found.append(Command(last.line, last.text, (last.output or "") + text + "\n"))
        line += 1 + folded
    return found


def printed_as(shown: str, printed: str) -> bool:
    """Whether ``printed`` is what a page shows; ``...`` there stands for anything, and ends of lines do not count."""
    parts = "\n".join(line.rstrip() for line in shown.strip().splitlines()).split("...")
    text = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return re.fullmatch(".*?".join(map(re.escape, parts)), text, re.DOTALL) is not None
