"""What a pickle says (`pickle_reader`), as plain values: the few types that `format.values` can keep."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import pathlib
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import cloudckpt.pytorch  # noqa: F401  # makes torch's plain values known to format/values.py
from cloudckpt.errors import FormatError
from cloudckpt.format.values import MAX_DEPTH, Path, dotted
from cloudckpt.interop.pickle_reader import Global, Inert
from cloudckpt.interop.torch_tensors import REBUILDERS, SavedTensor, UnsupportedTensorError, saved_tensor

_FAULTS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)
_VALUES_PER_BYTE = 8
"""How many values a pickle may come to: shared ones count wherever they stand."""


class Left:
    """What stands where a value was that is no plain one, at ``path``; ``reason`` names what it is."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.reason}"


class Plain:
    """Turns what a pickle says into values.

    ``tensor(path, saved)``: what to put where a tensor is. ``left``: each value that cannot be taken; it stands in its
    own place.
    """

    def __init__(self, tensor: Callable[[Path, SavedTensor], Any], nbytes: int, path: Path = ()) -> None:
        self.left: list[Left] = []
        self._tensor = tensor
        self._budget = 100_000 + _VALUES_PER_BYTE * nbytes
        self._root = path

    def value(self, value: Any) -> Any:
        """FormatError for values that are nested too deeply, or that share so much that they are too many."""
        return self._value(value, self._root)

    def _value(self, value: Any, path: Path) -> Any:
        self._budget -= 1
        if self._budget < 0 or len(path) - len(self._root) > MAX_DEPTH:
            raise FormatError(
                f"{dotted(path[:8])}...: nested too deeply, or more values than a file of this size holds"
            )
        kind = type(value)
        if kind is dict:
            return self._mapping(value.items(), path)
        if kind is list:
            return [self._value(item, (*path, index)) for index, item in enumerate(value)]
        if kind is tuple:
            return tuple([self._value(item, (*path, index)) for index, item in enumerate(value)])
        if kind is set or kind is frozenset:
            return kind(self._key(item, path) for item in value)
        if kind is Global:
            return self._made(_global, value, path)
        if kind is Inert:
            return self._inert(value, path)
        return value

    def _mapping(self, pairs: Any, path: Path) -> dict[Any, Any]:
        found = {}
        for key, value in pairs:
            plain = self._key(key, path)
            found[plain] = self._value(value, (*path, plain))
        return found

    def _key(self, key: Any, path: Path) -> Any:
        if type(key) in (str, int, bytes, float, bool, type(None)):
            return key
        plain = self._value(key, (*path, "a key"))
        try:
            hash(plain)
        except TypeError:
            raise FormatError(f"{dotted(path)}: a key of type {type(plain).__name__}") from None
        return plain

    def _inert(self, value: Inert, path: Path) -> Any:
        if value.kind in REBUILDERS or value.kind.startswith("torch._utils._rebuild_"):
            return self._made(lambda inert: self._tensor(path, saved_tensor(inert)), value, path)
        maker = _MAKERS.get(value.kind.replace("__builtin__.", "builtins."))
        if maker is None:
            return self._leave(path, value.kind)
        return self._made(lambda inert: maker(_Filled(self, inert, path)), value, path)

    def _made(self, make: Callable[[Any], Any], value: Any, path: Path) -> Any:
        try:
            return make(value)
        except UnsupportedTensorError as error:
            return self._leave(path, str(error))
        except _FAULTS as error:
            name = value.name if type(value) is Global else value.kind
            return self._leave(path, f"{name}, which is malformed ({error!s:.100})")

    def _leave(self, path: Path, reason: str) -> Left:
        self.left.append(Left(path, reason))
        return self.left[-1]


class _Filled:
    """An `Inert` whose contents are plain values, made when they are asked for."""

    def __init__(self, plain: Plain, inert: Inert, path: Path) -> None:
        self._plain = plain
        self._inert = inert
        self._path = path

    @property
    def kind(self) -> str:
        return self._inert.kind

    @property
    def args(self) -> tuple[Any, ...]:
        found = self._plain._value(self._inert.args, self._path)
        if type(found) is not tuple:
            raise TypeError("arguments that are no tuple")
        if any(type(arg) is Left for arg in found):
            raise TypeError("arguments that are no plain values")
        return found

    @property
    def state(self) -> Any:
        return self._plain._value(self._inert.state, self._path)

    @property
    def pairs(self) -> dict[Any, Any]:
        return self._plain._mapping(self._inert.pairs, self._path)

    @property
    def elements(self) -> list[Any]:
        return self._plain._value(self._inert.elements, self._path)  # type: ignore[no-any-return]

    @property
    def factory(self) -> Any:
        """The builtin type that is the first argument, as for a defaultdict; None without one."""
        first = self._inert.args[0] if self._inert.args else None
        return None if first is None else _FACTORIES[first.name.replace("__builtin__.", "builtins.")]


_FACTORIES: Mapping[str, type] = {
    f"builtins.{kind.__name__}": kind for kind in (list, dict, int, float, set, str, tuple, bool)
}


def _global(value: Global) -> Any:
    module, _, name = value.name.rpartition(".")
    found = getattr(torch, name, None) if module == "torch" else None
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise TypeError("a class or function, no value")
    return found


def _ordered(filled: _Filled) -> Any:
    pairs = filled.args[0] if filled.args else ()
    return collections.OrderedDict([*(tuple(pair) for pair in pairs), *filled.pairs.items()])


def _defaultdict(filled: _Filled) -> Any:
    return collections.defaultdict(filled.factory, filled.pairs)


def _deque(filled: _Filled) -> Any:
    return collections.deque([*(filled.args[0] if filled.args else ()), *filled.elements], *filled.args[1:2])


def _attributes(make: Callable[[], Any]) -> Callable[[_Filled], Any]:
    def build(filled: _Filled) -> Any:
        made = make()
        vars(made).update(filled.state or {})
        return made

    return build


def _encoded(filled: _Filled) -> bytes:
    """How protocol 2 writes bytes: ``_codecs.encode(text, "latin1")``."""
    text, encoding = filled.args
    if encoding != "latin1":
        raise ValueError(f"an encoding {encoding!r}")
    return bytes(text, "latin1")


def _called(kind: Callable[..., Any]) -> Callable[[_Filled], Any]:
    return lambda filled: kind(*filled.args)


def _bytes_of(kind: Callable[..., Any]) -> Callable[[_Filled], Any]:
    def build(filled: _Filled) -> Any:
        if any(type(arg) is int for arg in filled.args):  # so many zeros, which the file does not hold
            raise TypeError("bytes of a number")
        return kind(*filled.args)

    return build


def _fraction(filled: _Filled) -> fractions.Fraction:
    """Of two ints, or, before Python 3.12, of a text, whose decimal forms could be numbers of any size."""
    args = filled.args
    if len(args) == 1:
        args = args[0].split("/")
    return fractions.Fraction(*map(int, args))


def _bytes_io(filled: _Filled) -> bytes:
    return bytes(filled.state[0] if filled.state else b"".join(filled.args))


def _uuid(filled: _Filled) -> uuid.UUID:
    return uuid.UUID(int=filled.state["int"])


def _numpy_dtype(filled: _Filled) -> np.dtype:
    found = np.dtype(filled.args[0])
    order = filled.state[1] if filled.state else "="
    if found.hasobject or (filled.state and any(filled.state[2:5])):
        raise TypeError("a numpy dtype of objects or fields")
    swapped: np.dtype = found.newbyteorder(order) if order in ("<", ">") else found
    return swapped


def _numpy_scalar(filled: _Filled) -> Any:
    kind, raw = filled.args
    return np.frombuffer(raw, kind)[0]


_MAKERS: Mapping[str, Callable[[_Filled], Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaultdict,
    "collections.Counter": lambda filled: collections.Counter(
        {**(filled.args[0] if filled.args else {}), **filled.pairs}
    ),
    "collections.deque": _deque,
    "argparse.Namespace": _attributes(argparse.Namespace),
    "types.SimpleNamespace": _attributes(types.SimpleNamespace),
    "_codecs.encode": _encoded,
    "_io.BytesIO": _bytes_io,
    "uuid.UUID": _uuid,
    "torch.Size": _called(torch.Size),
    "torch.device": _called(torch.device),
    "torch.serialization._get_layout": lambda filled: _global(Global(filled.args[0])),
    "numpy.dtype": _numpy_dtype,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    **{f"builtins.{kind.__name__}": _called(kind) for kind in (set, frozenset, complex, slice)},
    **{f"builtins.{kind.__name__}": _bytes_of(kind) for kind in (bytes, bytearray)},
    "builtins.range": _called(range),
    "builtins.xrange": _called(range),
    **{f"datetime.{kind.__name__}": _called(kind) for kind in (dt.datetime, dt.date, dt.time)},
    "datetime.timedelta": _called(dt.timedelta),
    "datetime.timezone": _called(dt.timezone),
    "decimal.Decimal": _called(decimal.Decimal),
    "fractions.Fraction": _fraction,
    **{f"pathlib.{kind.__name__}": _called(kind) for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath)},
    "pathlib.PosixPath": _called(pathlib.Path),
}
