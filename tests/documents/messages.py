"""The messages that the package has in its source, in the form in which a page quotes them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.documents.blocks import ROOT


def messages() -> list[str]:
    """Every text of the source, with ``<>`` for what is filled in."""
    found = []
    for file in sorted((ROOT / "cloudckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = _text(node)
            if text is not None:
                found.append(_folded(text))
    return found


def quoted(text: str) -> str:
    """A message as a page has it: ``<name>`` stands for what is filled in."""
    return _folded(re.sub(r"<[^<>]*>", "<>", text))


def is_in(quote: str, message: str) -> bool:
    """Whether a quote is (a part of) a message; what is filled in there may be spelled out in the quote."""
    parts = [re.escape(part) for part in quoted(quote).split("<>")]
    return re.search(".*".join(parts), message) is not None


def tables(page: Path) -> dict[str, list[str]]:
    """The messages in the first column of the tables of a page, by the heading that they stand under."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cell = re.match(r"\| `(.+?)` \|", line)
        if cell is not None:
            found.setdefault(heading, []).append(cell[1])
    return found


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "<>" for part in node.values)
    return None


def _folded(text: str) -> str:
    return " ".join(text.split())
