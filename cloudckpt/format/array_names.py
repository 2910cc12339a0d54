"""The only place where the names of arrays are made and checked."""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Hashable, Sequence

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format.values import dotted

MAX_NAME_BYTES = 160
_DIGEST_HEX = 16
_STEM_BYTES = MAX_NAME_BYTES - 1 - _DIGEST_HEX

_HASHED = re.compile(rf".*-[0-9a-fA-F]{{{_DIGEST_HEX}}}", re.DOTALL)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_NAME_FAULTS = {
    f"is empty or longer than {MAX_NAME_BYTES} characters": re.compile(rf"(?s)\A\Z|.{{{MAX_NAME_BYTES + 1}}}"),
    "has a character other than A-Z a-z 0-9 . _ -": _UNSAFE,
    "begins with '.' or '__', ends in '.' or has '..'": re.compile(r"\A(\.|__)|\.\Z|\.\."),
}
# "c" and "zarr.json" would be read as chunks and metadata of the enclosing group.
_RESERVED = frozenset({"c", "zarr.json"})
# Windows keeps these for devices, in any case and with any extension.
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))})


def check_name(name: str) -> str:
    """Return ``name`` if it may be the name of an array; else raise FormatError."""
    for fault, pattern in _NAME_FAULTS.items():
        if pattern.search(name):
            raise FormatError(f"unsafe array name {name!r:.200}: it {fault}")
    if name.lower() in _RESERVED or name.split(".", maxsplit=1)[0].lower() in _DEVICES:
        raise FormatError(f"unsafe array name {name!r:.200}: it is reserved")
    return name


def array_names(paths: Sequence[tuple[Hashable, ...]]) -> list[str]:
    """One name per path, in the order of ``paths``; equal paths (types included) get equal names.

    A function of the set of paths alone. A name is one path component that every store keeps apart
    from all the others, also where case is ignored: see "Names" in docs/format.md.
    """
    serialised = [_serialise(path) for path in paths]
    plain = [_plain_name(path) for path in paths]
    distinct = dict(zip(serialised, plain, strict=True))
    claims = Counter(name.lower() for name in distinct.values() if name is not None)
    names = {}
    for path, identity, name in zip(paths, serialised, plain, strict=True):
        if name is None or claims[name.lower()] > 1:
            name = hashed_name(path)
        names[identity] = name
    if len({name.lower() for name in names.values()}) < len(names):
        raise InvalidStateError("two paths of the state have the same digest; rename one of them")
    return [names[identity] for identity in serialised]


def hashed_name(path: tuple[Hashable, ...]) -> str:
    """The name that a path has where another could stand for two of them. Told without knowing the other paths."""
    return f"{_stem(path)[:_STEM_BYTES]}-{_digest(_serialise(path))}"


def _plain_name(path: tuple[Hashable, ...]) -> str | None:
    """The dotted path where it may stand as a name as it is."""
    text = dotted(path)
    if text != _stem(path) or len(text) > MAX_NAME_BYTES or text.endswith(".") or text.lower() in _RESERVED:
        return None
    return None if _HASHED.fullmatch(text) else text


def _stem(path: tuple[Hashable, ...]) -> str:
    """What remains readable of a path: safe characters, no leading dots, never a device name."""
    text = _UNSAFE.sub("_", dotted(path))
    text = re.sub(r"\.{2,}", ".", text)  # some servers refuse ".." anywhere in a key
    if text.startswith((".", "__")):  # hidden files, and names that zarr reserves
        text = text.lstrip("._")
    if text.split(".")[0].lower() in _DEVICES:
        text = f"_{text}"
    return text or "_"


def _digest(serialised: bytes) -> str:
    return hashlib.sha256(serialised).hexdigest()[:_DIGEST_HEX]


def _serialise(element: object) -> bytes:
    """Bytes that differ for different paths, by value, type or Unicode form."""
    kind, payload = _payload(element)
    return b"%b%d:%b" % (kind, len(payload), payload)


def _payload(element: object) -> tuple[bytes, bytes]:
    if type(element) is tuple:
        return b"t", b"".join(_serialise(inner) for inner in element)
    if type(element) is str:
        return b"s", element.encode("utf-8", "surrogatepass")
    if type(element) is int:
        return b"i", hex(element).encode()
    if type(element) is bool:
        return b"b", b"%d" % element
    if type(element) is float:
        return b"f", struct.pack("<d", element)
    if type(element) is bytes:
        return b"y", element
    if element is None:
        return b"n", b""
    raise InvalidStateError(f"a key of type {type(element).__qualname__} cannot name a tensor: {element!r:.200}")
