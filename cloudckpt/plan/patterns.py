"""Patterns of dotted paths with placeholders, and the keys of the paths that they lead to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.tree import TreePath, key_token

Target: TypeAlias = str | tuple[str | int, ...]

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::([d*]))?\}")
_KINDS = {None: r"[^.]+", "d": r"[0-9]+", "*": r".*"}


class Pattern:
    def __init__(self, text: Any) -> None:
        if not isinstance(text, str):
            raise InvalidStateError(f"a rename pattern is a string, not {text!r:.200}")
        self.text = text
        self.names: list[str] = []
        expression, position = "", 0
        for match in _PLACEHOLDER.finditer(text):
            expression += re.escape(_literal(text, position, match.start()))
            name, kind = match[1], match[2]
            expression += f"(?P={name})" if name in self.names else f"(?P<{name}>{_KINDS[kind]})"
            if name not in self.names:
                self.names.append(name)
            position = match.end()
        self._expression = re.compile(expression + re.escape(_literal(text, position, len(text))), re.DOTALL)

    def match(self, text: str) -> dict[str, str] | None:
        found = self._expression.fullmatch(text)
        return None if found is None else found.groupdict()


def _literal(text: str, start: int, stop: int) -> str:
    if "{" in text[start:stop] or "}" in text[start:stop]:
        raise InvalidStateError(f"rename pattern {text!r}: placeholders are {{name}}, {{name:d}} or {{name:*}}")
    return text[start:stop]


def names_in(target: Any) -> list[str]:
    if isinstance(target, str):
        return Pattern(target).names
    if isinstance(target, (tuple, list)) and target and all(type(key) in (str, int) for key in target):
        return [name for key in target if isinstance(key, str) for name in Pattern(key).names]
    raise InvalidStateError(f"a rename target is a dotted path or a tuple of keys, not {target!r:.200}")


def filled(text: str, found: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: found[match[1]], text)


def retarget(path: TreePath, target: Target, found: Mapping[str, str]) -> TreePath:
    """The keys of the new path."""
    if isinstance(target, str):
        return keys_like(path, filled(target, found))
    keys: list[str | int] = []
    for key in target:
        lone = _PLACEHOLDER.fullmatch(key) if isinstance(key, str) else None
        text = filled(key, found) if isinstance(key, str) else key
        keys.append(int(text) if lone and lone[2] == "d" else text)
    return tuple(key_token(values.encode(key)) for key in keys)


def keys_like(path: TreePath, text: str) -> TreePath:
    """``text`` as keys, cut where those of ``path`` are.

    With as many dotted parts as before, every key keeps its number of them. Otherwise the first keys
    stay as long as they are in ``text``, and all the rest of it is one key.
    """
    keys = [values.decode(msgspec.json.decode(token)) for token in path]
    counts = [len(values.dotted((key,)).split(".")) for key in keys]
    parts = text.split(".")
    new: list[str] = []
    position = 0
    if sum(counts) == len(parts):
        for token, key, count in zip(path, keys, counts, strict=True):
            new.append(_token_like(token, key, ".".join(parts[position : position + count])))
            position += count
        return tuple(new)
    for token, key, count in list(zip(path, keys, counts, strict=True))[:-1]:
        if position + count >= len(parts) or values.dotted((key,)) != ".".join(parts[position : position + count]):
            break
        new.append(token)
        position += count
    return (*new, key_token(values.encode(".".join(parts[position:]))))


def _token_like(token: str, key: Any, text: str) -> str:
    """An int stays an int where it can."""
    if values.dotted((key,)) == text:
        return token
    return key_token(values.encode(int(text) if type(key) is int and re.fullmatch(r"[0-9]{1,15}", text) else text))
