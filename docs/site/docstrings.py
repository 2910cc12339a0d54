"""Docstrings as Markdown: lists of arguments become lists, and names of the public interface become links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"(?:^|(?<=[.;,] ))``[^`]+``(?:, ``[^`]+``)*:(?!:)")
_NAME = re.compile(r"(?<!`)`((?:cloudckpt\.)?([A-Za-z_.]+))`(?!`)")
_ERROR = re.compile(r"(?<![`\w.])([A-Z]\w*Error)(?![`\w])")


class Docstrings(griffe.Extension):
    """Runs when all of the package has been read, so that every public name is known."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        public = set(map(str, pkg.exports or ()))
        errors = {name for name, member in pkg["errors"].members.items() if not member.is_alias and member.is_class}
        _walk(pkg, public, errors)


def _walk(scope: Any, public: set[str], errors: set[str]) -> None:
    if scope.is_alias:
        return
    if scope.docstring is not None:
        scope.docstring.value = _linked(as_lists(scope.docstring.value), scope, public, errors)
    for member in scope.members.values():
        if not member.is_alias:
            _walk(member, public, errors)


def as_lists(text: str) -> str:
    """A paragraph that tells of several arguments, each with its name and a colon first, becomes a list."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split("\n"))
        starts = [found.start() for found in _ITEM.finditer(line)]
        if len(starts) < 2:
            paragraphs.append(paragraph)
            continue
        ends = [*starts[1:], len(line)]
        items = [f"- {line[start:end].strip(' ,;')}" for start, end in zip(starts, ends, strict=True)]
        paragraphs.append("\n".join([line[: starts[0]], "", *items] if starts[0] else items))
    return "\n\n".join(paragraphs)


def _linked(text: str, scope: Any, public: set[str], errors: set[str]) -> str:
    owner = scope.parent if scope.is_function and scope.parent is not None and scope.parent.is_class else scope

    def link(found: re.Match[str]) -> str:
        name = found[2]
        head, _, member = name.partition(".")
        if owner.is_class and owner.name in public and owner is not scope and name in owner.members:
            return f"[`{name}`][cloudckpt.{owner.name}.{name}]"
        if head in public and (not member or head in ("PendingSave", "Checkpointer")):
            return f"[`{name}`][cloudckpt.{name}]"
        return f"`{found[1]}`"

    text = _NAME.sub(link, text)
    return _ERROR.sub(
        lambda found: f"[{found[1]}][cloudckpt.errors.{found[1]}]" if found[1] in errors else found[0], text
    )
