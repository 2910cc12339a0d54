"""Pickles as data: what a pickle says, without doing any of it.

Python's unpickler calls what a pickle tells it to call. Here nothing is imported, looked up or called: a
global is its name, and an object that a pickle would make is an `Inert` that holds what the pickle would
have made it of. Whoever asked for the pickle knows the few names that it understands, and refuses the rest.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from cloudckpt.errors import FormatError

MAX_KEY_DEPTH = 8
"""Of tuples that are keys: hashing goes down them by recursion, in C."""


@dataclass(frozen=True, slots=True)
class Global:
    """``module.name``, wherever a pickle refers to one."""

    name: str


class Inert:
    """What a pickle would make by calling ``kind`` with ``args``.

    ``state``: what it would give to ``__setstate__``; ``pairs`` and ``elements``: what it would put in.
    Compared and hashed by identity.
    """

    __slots__ = ("args", "elements", "kind", "kwargs", "pairs", "state")

    def __init__(self, kind: str, args: Any, kwargs: Any = None) -> None:
        self.kind = kind
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self.pairs: list[tuple[Any, Any]] = []
        self.elements: list[Any] = []

    def __repr__(self) -> str:
        return f"Inert({self.kind})"


PERSISTENT = "a persistent id"
"""The ``kind`` of what a pickle names by an id that only its writer understands; ``args`` is the id."""

_MARK = object()
_FAULTS = (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError)
_Step: TypeAlias = "Callable[[_Reader], object]"


def read_pickle(data: bytes, where: str, *, start: int = 0) -> tuple[Any, set[str], int]:
    """The value of the pickle at ``data[start:]``, the globals that it names, and where it ends.

    Raises FormatError naming ``where`` for anything that is no pickle. Time and memory are linear in its size.
    """
    reader = _Reader(data, start)
    try:
        value = reader.run()
    except _FAULTS as error:
        raise FormatError(f"{where}: malformed pickle at byte {reader.position - start}: {error!s:.200}") from error
    return value, reader.globals, reader.position


class _Reader:
    """The stack machine of pickle; see ``pickletools`` for what each opcode means."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.position = start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: set[str] = set()

    def run(self) -> Any:
        data, steps, stop = self.data, _STEPS, ord(".")
        while True:
            code = data[self.position]
            self.position += 1
            if code == stop:
                return self.pop()
            step = steps[code]
            if step is None:
                raise ValueError(f"opcode {code:#04x} is not for files")
            step(self)

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise ValueError(f"{count} bytes are wanted where it ends")
        raw = self.data[self.position : end]
        self.position = end
        return raw

    def unpacked(self, form: struct.Struct) -> Any:
        value = form.unpack_from(self.data, self.position)[0]
        self.position += form.size
        return value

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.position)
        raw = self.data[self.position : end]
        self.position = end + 1
        return raw

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def since_mark(self) -> list[Any]:
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("there is no mark")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def global_named(self, module: str, name: str) -> Global:
        found = Global(f"{module}.{name}")
        self.globals.add(found.name)
        return found


def _push(make: Callable[[_Reader], Any]) -> _Step:
    return lambda reader: reader.stack.append(make(reader))


def _form(code: str) -> _Step:
    form = struct.Struct(code)
    return lambda reader: reader.stack.append(reader.unpacked(form))


def _sized(code: str, make: Callable[[bytes], Any]) -> _Step:
    form = struct.Struct(code)
    return lambda reader: reader.stack.append(make(reader.take(reader.unpacked(form))))


def _text(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _old_text(raw: bytes) -> str | bytes:
    """A string of Python 2, which was bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _int_line(reader: _Reader) -> int | bool:
    raw = reader.line()
    return raw == b"01" if raw in (b"00", b"01") else int(raw)


def _string_line(reader: _Reader) -> str | bytes:
    raw = reader.line().strip()
    if len(raw) < 2 or raw[0] != raw[-1] or raw[0] not in b"\"'":
        raise ValueError("a string without quotes")
    return _old_text(codecs.escape_decode(raw[1:-1])[0])


def _memoized(reader: _Reader, index: int) -> None:
    reader.memo[index] = reader.top()


def _append(reader: _Reader, values: list[Any]) -> None:
    target = reader.top()
    if type(target) is Inert:
        target.elements += values
    elif type(target) is list:
        target += values
    else:
        raise TypeError(f"cannot append to {type(target).__name__}")


def _add(reader: _Reader) -> None:
    values, target = reader.since_mark(), reader.top()
    if type(target) is not set:
        raise TypeError(f"cannot add to {type(target).__name__}")
    target.update(_key(value) for value in values)


def _set_items(reader: _Reader, flat: list[Any]) -> None:
    target = reader.top()
    if len(flat) % 2:
        raise ValueError("a key without a value")
    pairs = zip(flat[::2], flat[1::2], strict=True)
    if type(target) is Inert:
        target.pairs += pairs
    elif type(target) is dict:
        for key, value in pairs:
            target[_key(key)] = value
    else:
        raise TypeError(f"cannot set items of {type(target).__name__}")


def _key(value: Any, depth: int = 0) -> Any:
    if type(value) is tuple:
        if depth == MAX_KEY_DEPTH:
            raise ValueError(f"a key nested more than {MAX_KEY_DEPTH} levels deep")
        for element in value:
            _key(element, depth + 1)
    elif type(value) is frozenset:
        raise TypeError("a frozenset as a key")
    return value


def _call(reader: _Reader, target: Any, args: Any, kwargs: Any = None) -> None:
    if type(target) is not Global:
        raise TypeError(f"a call of {type(target).__name__}")
    reader.stack.append(Inert(target.name, args, kwargs))


def _reduce(reader: _Reader) -> None:
    args = reader.pop()
    _call(reader, reader.pop(), args)


def _newobj_ex(reader: _Reader) -> None:
    kwargs, args = reader.pop(), reader.pop()
    _call(reader, reader.pop(), args, kwargs)


def _inst(reader: _Reader) -> None:
    module, name = _text(reader.line()), _text(reader.line())
    args = tuple(reader.since_mark())
    _call(reader, reader.global_named(module, name), args)


def _obj(reader: _Reader) -> None:
    target, *args = reader.since_mark()
    _call(reader, target, tuple(args))


def _build(reader: _Reader) -> None:
    state, target = reader.pop(), reader.top()
    if type(target) is not Inert:
        raise TypeError(f"a state for {type(target).__name__}")
    target.state = state


def _stack_global(reader: _Reader) -> None:
    name, module = reader.pop(), reader.pop()
    if not type(name) is type(module) is str:
        raise TypeError("a global whose name is no string")
    reader.stack.append(reader.global_named(module, name))


def _global(reader: _Reader) -> None:
    module, name = _text(reader.line()), _text(reader.line())
    reader.stack.append(reader.global_named(module, name))


def _dict(reader: _Reader) -> None:
    flat = reader.since_mark()
    reader.stack.append({})
    _set_items(reader, flat)


def _tuple_of(count: int) -> _Step:
    return _push(lambda reader: tuple([reader.pop() for _ in range(count)][::-1]))


_U1, _U4, _U8 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")

_BY_CODE: dict[bytes, _Step] = {
    b"\x80": lambda r: r.take(1),  # the protocol
    b"\x95": lambda r: r.take(8),  # a frame
    b"(": lambda r: r.stack.append(_MARK),
    b"0": lambda r: r.stack.pop(),
    b"1": lambda r: r.since_mark(),
    b"2": lambda r: r.stack.append(r.top()),
    b"N": lambda r: r.stack.append(None),
    b"\x88": lambda r: r.stack.append(True),
    b"\x89": lambda r: r.stack.append(False),
    b"I": _push(_int_line),
    b"L": _push(lambda r: int(r.line().rstrip(b"L"))),
    b"F": _push(lambda r: float(r.line())),
    b"J": _form("<i"),
    b"K": _form("<B"),
    b"M": _form("<H"),
    b"G": _form(">d"),
    b"\x8a": _sized("<B", _signed),
    b"\x8b": _sized("<I", _signed),
    b"S": _push(_string_line),
    b"T": _sized("<I", _old_text),
    b"U": _sized("<B", _old_text),
    b"V": _push(lambda r: str(r.line(), "raw-unicode-escape")),
    b"X": _sized("<I", _text),
    b"\x8c": _sized("<B", _text),
    b"\x8d": _sized("<Q", _text),
    b"B": _sized("<I", bytes),
    b"C": _sized("<B", bytes),
    b"\x8e": _sized("<Q", bytes),
    b"\x96": _sized("<Q", bytearray),
    b"]": lambda r: r.stack.append([]),
    b"}": lambda r: r.stack.append({}),
    b")": lambda r: r.stack.append(()),
    b"\x8f": lambda r: r.stack.append(set()),
    b"l": _push(lambda r: r.since_mark()),
    b"t": _push(lambda r: tuple(r.since_mark())),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"d": _dict,
    b"\x91": _push(lambda r: frozenset(_key(value) for value in r.since_mark())),
    b"a": lambda r: _append(r, [r.pop()]),
    b"e": lambda r: _append(r, r.since_mark()),
    b"s": lambda r: _set_items(r, [r.stack.pop(-2), r.pop()]),
    b"u": lambda r: _set_items(r, r.since_mark()),
    b"\x90": _add,
    b"p": lambda r: _memoized(r, int(r.line())),
    b"q": lambda r: _memoized(r, r.unpacked(_U1)),
    b"r": lambda r: _memoized(r, r.unpacked(_U4)),
    b"\x94": lambda r: _memoized(r, len(r.memo)),
    b"g": lambda r: r.stack.append(r.memo[int(r.line())]),
    b"h": lambda r: r.stack.append(r.memo[r.unpacked(_U1)]),
    b"j": lambda r: r.stack.append(r.memo[r.unpacked(_U4)]),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _reduce,
    b"\x92": _newobj_ex,
    b"i": _inst,
    b"o": _obj,
    b"b": _build,
    b"P": lambda r: r.stack.append(Inert(PERSISTENT, _text(r.line()))),
    b"Q": lambda r: r.stack.append(Inert(PERSISTENT, r.pop())),
}
_STEPS: list[_Step | None] = [_BY_CODE.get(bytes([code])) for code in range(256)]
