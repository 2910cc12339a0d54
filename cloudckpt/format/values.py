"""The tree of plain values as JSON, exact in value, type and order, and without pickle.

A node is JSON: None, bool, str, ints of at most 53 bits, finite floats, list, and dict with str keys
other than ``"$"`` stand for themselves. Everything else is an object with its tag under ``"$"``; see
"Plain values" in docs/format.md.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format import containers, scalars
from cloudckpt.format.scalars import (
    MALFORMED,
    FromNode,
    InexactError,
    ToNode,
    float_node,
    int_node,
    pack_bytes,
    scalar_node,
    scalar_reader,
    str_node,
    unpack_bytes,
)

__all__ = [
    "MALFORMED",
    "MAX_DEPTH",
    "InexactError",
    "Node",
    "Path",
    "decode",
    "dotted",
    "encode",
    "pickled",
    "register",
    "register_reducer",
]

Path: TypeAlias = tuple[Any, ...]
Node: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
LeafEncoder: TypeAlias = Callable[[Path, Any], Node]
LeafDecoder: TypeAlias = Callable[[dict[str, Any]], Any]
Deferrer: TypeAlias = Callable[[Path, Any, dict[str, Any]], bool]

MAX_DEPTH = 200

_BARE_TYPES = (type(None), bool, int, float, str)
_KEY_TYPES = (*_BARE_TYPES, tuple, bytes)


def dotted(path: Path) -> str:
    """``("model", "layers", 0)`` -> ``model.layers.0``; for people: different paths can look the same."""
    return ".".join([element if type(element) is str else _repr(element) for element in path])


def _repr(element: object) -> str:
    try:
        return repr(element)
    except ValueError:  # an int of more than 4300 digits
        return f"<{type(element).__name__}>"


def encode(
    value: Any,
    *,
    leaf: LeafEncoder | None = None,
    allow_pickle: bool = False,
    defer: Deferrer | None = None,
    path: Path = (),
) -> Node:
    """The node of ``value``; InvalidStateError, naming the dotted path, for what is not plain.

    ``leaf(path, obj)`` is asked first about every value (not about dict keys and members of sets); it
    returns the node of what it takes, an object with a tag of its own, and None for the rest.
    ``defer(path, obj, node)`` is asked about what would be pickled, outside of sets: True if the caller will put the
    `pickled` fields into ``node`` later. ``path`` is where ``value`` stands, for a leaf that encodes what it wraps.
    """
    return _Encoder(leaf, allow_pickle, defer).node(value, path)


def pickled(value: Any, path: Path) -> dict[str, Any]:
    """The fields of the node of a pickled value. Raises InvalidStateError, naming the path."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception as error:  # any class may raise anything in __reduce__
        raise InvalidStateError(f"{_where(path)}: {type(value).__qualname__} cannot be pickled: {error}") from error
    return pack_bytes(buffer.getvalue())


def decode(node: Any, *, leaf: LeafDecoder | None = None, allow_pickle: bool = False) -> Any:
    """The value of ``node``, which anybody may have written; FormatError if it is malformed.

    ``leaf(node)`` gets the objects whose tag is not known here.
    """
    return _Decoder(leaf, allow_pickle).value(node, ())


def register(kind: type, tag: str, to_node: ToNode, from_node: FromNode) -> None:
    """Store values of exactly ``kind`` as ``{"$": tag, **to_node(value)}``; ValueError if either is taken.

    ``to_node`` returns JSON-able fields, or raises InexactError. ``from_node`` gets the node, which
    anybody may have written, and raises any of ``MALFORMED`` for what ``to_node`` does not return.
    """
    if kind in containers.BY_TYPE or kind in _BARE_TYPES or tag in containers.BY_TAG or tag == "pickle":
        raise ValueError(f"{kind.__qualname__} or tag {tag!r} is built in")
    scalars.register(kind, tag, to_node, from_node)


_REDUCERS: dict[type, Callable[[Any], Any]] = {}


def register_reducer(kind: type, reduce: Callable[[Any], Any]) -> None:
    """How objects of ``kind`` inside of a pickle are pickled; see ``pickle.Pickler.reducer_override``."""
    _REDUCERS[kind] = reduce


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return next((reduce(obj) for kind, reduce in _REDUCERS.items() if isinstance(obj, kind)), NotImplemented)


class _Encoder:
    """Two frames of the stack per level of nesting, so that `MAX_DEPTH` stays clear of Python's limit."""

    def __init__(self, leaf: LeafEncoder | None, allow_pickle: bool, defer: Deferrer | None) -> None:
        self.leaf = leaf
        self.allow_pickle = allow_pickle
        self.defer = defer
        self.open: list[int] = []  # ids of the containers around the current value

    def node(self, value: Any, path: Path) -> Node:
        taken = None if self.leaf is None else self.leaf(path, value)
        if taken is not None:
            return taken
        container = containers.BY_TYPE.get(type(value))
        if container is None:
            return self.scalar(value, path)
        try:
            fields = container.fields(value)
        except InexactError as error:
            return self.not_plain(value, path, f" ({error})")
        self.enter(value, path)
        children = _WALKS[container.form](self, value, path)
        self.open.pop()
        if container is containers.LIST:
            return children
        if container is containers.DICT and all(type(key) is str and key != "$" for key, _ in children):
            return dict(children)
        return {"$": container.tag, **fields, "items": children}

    def enter(self, value: Any, path: Path) -> None:
        if id(value) in self.open:
            raise InvalidStateError(f"{_where(path)}: the state contains itself; remove the cycle")
        if len(self.open) >= MAX_DEPTH:
            raise InvalidStateError(f"{_where(path)}: the state is nested more than {MAX_DEPTH} levels deep")
        self.open.append(id(value))

    def scalar(self, value: Any, path: Path) -> Node:
        kind = type(value)
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]
        if kind is str:
            return str_node(value)
        if kind is int:
            return int_node(value)
        if kind is float:
            return float_node(value)
        try:
            node = scalar_node(value)
        except InexactError as error:
            return self.not_plain(value, path, f" ({error})")
        return self.not_plain(value, path) if node is None else node

    def not_plain(self, value: Any, path: Path, reason: str = "") -> Node:
        kind = type(value)
        if not self.allow_pickle:
            raise InvalidStateError(
                f"{_where(path)}: a value of type {kind.__module__}.{kind.__qualname__} cannot be stored as plain data"
                f"{reason}. Convert it to plain values, put an object with state_dict() and load_state_dict() there,"
                " leave it out, or pass allow_pickle=True to both save and load"
            )
        node: dict[str, Any] = {"$": "pickle"}
        if self.defer is None or not self.defer(path, value, node):
            node.update(pickled(value, path))
        return node

    def items(self, values: Iterable[Any], path: Path) -> list[Any]:
        nodes = []
        for index, value in enumerate(values):
            nodes.append(self.node(value, (*path, index)))
        return nodes

    def members(self, values: Iterable[Any], path: Path) -> list[Any]:
        nodes = []
        for value in values:
            nodes.append(self.alone(value, path))  # noqa: PERF401  # frames, see the class
        # Ranks iterate over equal sets in different orders; their nodes must be equal all the same.
        return sorted(nodes, key=json.dumps)

    def pairs(self, values: Mapping[Any, Any], path: Path) -> list[Any]:
        pairs = []
        for key, value in values.items():
            key_node = key if type(key) is str and key.isascii() else self.key(key, path)
            pairs.append([key_node, self.node(value, (*path, key))])
        return pairs

    def attributes(self, value: Any, path: Path) -> list[Any]:
        return self.pairs(vars(value), path)

    def key(self, key: Any, path: Path) -> Node:
        fault = _key_fault(key)
        if fault:
            raise InvalidStateError(f"{_where(path)}: {fault}")
        return self.alone(key, path)

    def alone(self, value: Any, path: Path) -> Node:
        """Without ``leaf`` and ``defer``."""
        kept = self.leaf, self.defer
        self.leaf = self.defer = None
        node = self.node(value, path)
        self.leaf, self.defer = kept
        return node


_WALKS: dict[str, Callable[[_Encoder, Any, Path], list[Any]]] = {
    "sequence": _Encoder.items,
    "set": _Encoder.members,
    "mapping": _Encoder.pairs,
    "attributes": _Encoder.attributes,
}


class _Decoder:
    """Two frames of the stack per level of nesting, as in `_Encoder`."""

    def __init__(self, leaf: LeafDecoder | None, allow_pickle: bool) -> None:
        self.leaf = leaf
        self.allow_pickle = allow_pickle
        self.depth = 0

    def value(self, node: Any, path: Path) -> Any:
        kind = type(node)
        if kind is not dict and kind is not list:
            return _bare(node, path)
        if kind is dict and "$" in node:
            container = containers.BY_TAG.get(node["$"]) if type(node["$"]) is str else None
            if container is None:
                return self.tagged(node, path)
            build, items = container.build, node.get("items")
            walk = _READS[container.form]
            if type(items) is not list:
                _malformed(path, f"tag {node['$']!r} wants a list of items")
        else:
            build, items = containers.LIST.build, node
            walk = _Decoder.items if kind is list else _Decoder.plain_dict
        if self.depth >= MAX_DEPTH:
            _malformed(path, f"it is nested more than {MAX_DEPTH} levels deep")
        self.depth += 1
        children = walk(self, items, path)
        self.depth -= 1
        return _built(lambda: build(children, node), node, path)

    def items(self, nodes: list[Any], path: Path) -> list[Any]:
        values = []
        for index, node in enumerate(nodes):
            values.append(self.value(node, (*path, index)))
        return values

    def plain_dict(self, node: dict[Any, Any], path: Path) -> dict[str, Any]:
        values = {}
        for key, inner in node.items():
            if type(key) is not str:
                _malformed(path, "a key of a JSON object is not a string")
            values[key] = self.value(inner, (*path, key))
        return values

    def pairs(self, nodes: list[Any], path: Path) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for pair in nodes:
            if type(pair) is not list or len(pair) != 2:
                _malformed(path, "an item of a dict is not a pair")
            key = self.value(pair[0], path)
            fault = _key_fault(key) or ("the same key stands twice" if key in values else None)
            if fault:
                _malformed(path, fault)
            values[key] = self.value(pair[1], (*path, key))
        return values

    def attributes(self, nodes: list[Any], path: Path) -> dict[str, Any]:
        values = self.pairs(nodes, path)
        if not all(type(name) is str for name in values):
            _malformed(path, "the name of an attribute is not a string")
        return values

    def tagged(self, node: dict[str, Any], path: Path) -> Any:
        tag = node["$"]
        if type(tag) is not str:
            _malformed(path, "its tag is not a string")
        if tag == "pickle":
            return self.unpickled(node, path)
        reader = scalar_reader(tag)
        if reader is not None:
            return _built(lambda: reader(node), node, path)
        if self.leaf is not None:
            return self.leaf(node)
        raise FormatError(f"{_where(path)}: unknown tag {tag!r:.100}; a newer version may know it")

    def unpickled(self, node: dict[str, Any], path: Path) -> Any:
        if not self.allow_pickle:
            raise FormatError(
                f"{_where(path)}: the value is pickled, and loading it can execute code."
                " Pass allow_pickle=True if you trust who wrote this checkpoint"
            )
        raw = _built(lambda: unpack_bytes(node), node, path)
        try:
            return pickle.loads(raw)
        except Exception as error:  # noqa: BLE001  # a pickle may raise whatever the code that it calls raises
            _malformed(path, f"its pickle does not load: {type(error).__name__}: {error}", error)


_READS: dict[str, Callable[[_Decoder, Any, Path], Any]] = {
    "sequence": _Decoder.items,
    "set": _Decoder.items,
    "mapping": _Decoder.pairs,
    "attributes": _Decoder.attributes,
}


def _built(build: Callable[[], Any], node: Any, path: Path) -> Any:
    try:
        return build()
    except MALFORMED as error:
        _malformed(path, f"tag {node['$']!r}: {error}", error)


def _bare(node: Any, path: Path) -> Any:
    kind = type(node)
    if kind not in _BARE_TYPES:
        _malformed(path, f"{kind.__name__} is not JSON")
    if kind is float and not math.isfinite(node):
        _malformed(path, "a bare float must be finite")
    return node


def _key_fault(key: Any) -> str | None:
    kind = type(key)
    if kind not in _KEY_TYPES:
        names = "str, int, float, bool, None, bytes or a tuple of these"
        return f"a dict key of type {kind.__module__}.{kind.__qualname__} is not plain: use {names}"
    if kind is float and key != key:
        return "nan is not equal to itself and cannot be a dict key"
    if kind is tuple:
        return next(filter(None, map(_key_fault, key)), None)
    return None


def _where(path: Path) -> str:
    return dotted(path)[:500] or "the state"


def _malformed(path: Path, fault: str, cause: BaseException | None = None) -> NoReturn:
    raise FormatError(f"{_where(path)}: malformed value: {fault:.300}") from cause
