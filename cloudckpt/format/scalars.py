"""Plain values without children, as tagged JSON objects, and the registry that other layers extend."""

from __future__ import annotations

import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

from cloudckpt.errors import FormatError
from cloudckpt.format.dtypes import numpy_dtype, numpy_name

Fields = Mapping[str, Any]
ToNode = Callable[[Any], dict[str, Any]]
FromNode = Callable[[Fields], Any]
T = TypeVar("T")

MAX_BARE_INT = 2**53 - 1
# What a from_node function may raise about fields that are absent, of another type or out of range.
MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, OSError, FormatError)


class InexactError(Exception):
    """A value of a known type that its JSON form would not give back; the text says why."""


_BY_TYPE: dict[type, tuple[str, ToNode]] = {}
_BY_TAG: dict[str, FromNode] = {}


def register(kind: type, tag: str, to_node: ToNode, from_node: FromNode) -> None:
    """What ``values.register`` does, without a look at the types that are not scalars."""
    if kind in _BY_TYPE or tag in _BY_TAG:
        raise ValueError(f"{kind.__qualname__} or tag {tag!r} is registered already")
    _BY_TYPE[kind] = (tag, to_node)
    _BY_TAG[tag] = from_node


def scalar_node(value: object) -> dict[str, Any] | None:
    """The tagged node of ``value``; None if its type has none."""
    known = _BY_TYPE.get(type(value))
    if known is None:
        return _numpy_node(value)
    tag, to_node = known
    return {"$": tag, **to_node(value)}


def scalar_reader(tag: str) -> FromNode | None:
    return _BY_TAG.get(tag)


def field(node: Fields, name: str, kind: type[T]) -> T:
    """The field of exactly ``kind`` (so that ``true`` is no int); ValueError otherwise."""
    value = node.get(name)
    if type(value) is not kind:
        raise ValueError(f"field {name!r} must be {kind.__name__}")
    return value


def pack_bytes(raw: bytes | bytearray) -> dict[str, Any]:
    return {"base64": b64encode(raw).decode("ascii")}


def unpack_bytes(node: Fields) -> bytes:
    return b64decode(field(node, "base64", str), validate=True)


def str_node(value: str) -> str | dict[str, Any]:
    """Bare, unless it holds lone surrogates, which JSON in UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"$": "str", **pack_bytes(value.encode("utf-8", "surrogatepass"))}
    return value


def str_from(node: object) -> str:
    if type(node) is str:
        return node
    if type(node) is dict and node.get("$") == "str":
        return unpack_bytes(node).decode("utf-8", "surrogatepass")
    raise ValueError("not a str")


def int_node(value: int) -> int | dict[str, Any]:
    """Bare up to the ints that a double holds exactly, since many JSON readers know doubles only."""
    return value if -MAX_BARE_INT <= value <= MAX_BARE_INT else {"$": "int", "hex": hex(value)}


def int_from(node: object) -> int:
    if type(node) is int:
        return node
    if type(node) is dict and node.get("$") == "int":
        digits = field(node, "hex", str)
        # Hexadecimal reads in linear time and has no limit of digits; decimal has both faults.
        if re.fullmatch(r"-?0x[1-9a-f][0-9a-f]*", digits):
            return int(digits, 16)
    raise ValueError("not an int")


def float_node(value: float) -> float | dict[str, Any]:
    """Bare if finite. Sign and payload of a nan are not kept, so that equal states have equal nodes."""
    return value if math.isfinite(value) else {"$": "float", "value": repr(value)}


def float_from(node: object) -> float:
    if type(node) is float and math.isfinite(node):
        return node
    if type(node) is dict and node.get("$") == "float":
        text = field(node, "value", str)
        if text in ("nan", "inf", "-inf"):
            return float(text)
    raise ValueError("not a float")


def _none_or_int(node: object) -> int | None:
    return None if node is None else int_from(node)


def _slice_node(value: slice) -> dict[str, Any]:
    parts = {name: getattr(value, name) for name in ("start", "stop", "step")}
    if any(part is not None and type(part) is not int for part in parts.values()):
        raise InexactError("only slices of ints and None are plain")
    return {name: None if part is None else int_node(part) for name, part in parts.items()}


def _checked(value: T, text: str, written: str) -> T:
    if written != text:
        raise ValueError(f"{text!r} is not in the form {written!r}")
    return value


def _timezone_node(tz: timezone) -> dict[str, Any]:
    offset, *name = tz.__getinitargs__()  # type: ignore[attr-defined]  # tells a given "UTC" from the implied one
    return {"offset_us": offset // timedelta(microseconds=1), "name": str_node(name[0]) if name else None}


def _timezone_from(node: Fields) -> timezone:
    offset = timedelta(microseconds=field(node, "offset_us", int))
    return timezone(offset) if node.get("name") is None else timezone(offset, str_from(node["name"]))


def _zone_node(tz: ZoneInfo) -> dict[str, Any]:
    if tz.key is None:
        raise InexactError("a ZoneInfo without a key")
    return {"zone": tz.key}


def _zone_from(node: Fields) -> ZoneInfo:
    return ZoneInfo(field(node, "zone", str))


def _tz_node(tz: tzinfo | None) -> dict[str, Any] | None:
    if tz is None:
        return None
    if type(tz) is timezone:
        return _timezone_node(tz)
    if type(tz) is ZoneInfo:
        return _zone_node(tz)
    raise InexactError(f"its tzinfo is a {type(tz).__qualname__}, not a timezone or a ZoneInfo")


def _tz_from(node: object) -> tzinfo | None:
    if node is None:
        return None
    if type(node) is not dict:
        raise ValueError("field 'tz' must be an object or null")
    return _zone_from(node) if "zone" in node else _timezone_from(node)


def _clock_node(value: datetime | time) -> dict[str, Any]:
    return {"iso": value.replace(tzinfo=None).isoformat(), "fold": value.fold, "tz": _tz_node(value.tzinfo)}


def _datetime_from(node: Fields) -> datetime:
    text = field(node, "iso", str)
    value = datetime.fromisoformat(text)
    _checked(value, text, value.replace(tzinfo=None).isoformat())
    return value.replace(fold=field(node, "fold", int), tzinfo=_tz_from(node.get("tz")))


def _time_from(node: Fields) -> time:
    text = field(node, "iso", str)
    value = time.fromisoformat(text)
    _checked(value, text, value.replace(tzinfo=None).isoformat())
    return value.replace(fold=field(node, "fold", int), tzinfo=_tz_from(node.get("tz")))


def _date_from(node: Fields) -> date:
    value = date.fromisoformat(field(node, "iso", str))
    return _checked(value, node["iso"], value.isoformat())


def _timedelta_node(value: timedelta) -> dict[str, Any]:
    return {"days": value.days, "seconds": value.seconds, "microseconds": value.microseconds}


def _timedelta_from(node: Fields) -> timedelta:
    return timedelta(**{name: field(node, name, int) for name in ("days", "seconds", "microseconds")})


_PATHS: dict[str, type[PurePath]] = {
    kind.__name__: kind for kind in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
}


def _path_node(value: PurePath) -> dict[str, Any]:
    text = str(value)
    if type(value)(text) != value:  # pathlib's parts of some odd Windows paths do not survive str()
        raise InexactError(f"it does not equal the path {text!r:.100}")
    return {"type": type(value).__name__, "value": str_node(text)}


def _path_from(node: Fields) -> PurePath:
    """A concrete path of the other operating system comes back as its pure form."""
    kind = _PATHS[field(node, "type", str)]
    text = str_from(node.get("value"))
    try:
        return kind(text)
    except NotImplementedError:
        return (PureWindowsPath if kind is WindowsPath else PurePosixPath)(text)


def _numpy_node(value: object) -> dict[str, Any] | None:
    if isinstance(value, np.dtype):
        return {"$": "numpy.dtype", "dtype": _numpy_name(value)}
    if type(value) is np.str_:
        return {"$": "numpy", "dtype": "str", **pack_bytes(value.encode("utf-8", "surrogatepass"))}
    if type(value) is np.bytes_:
        return {"$": "numpy", "dtype": "bytes", **pack_bytes(value)}
    # A void scalar is a view of an array's row; a subclass is not what its dtype would give back.
    if not isinstance(value, np.generic) or type(value) is not value.dtype.type or isinstance(value, np.void):
        return None
    return {"$": "numpy", "dtype": _numpy_name(value.dtype), **pack_bytes(value.tobytes())}


def _numpy_name(dtype: np.dtype) -> str:
    name = numpy_name(dtype)
    if name is None:
        raise InexactError(f"numpy's {dtype!r:.80} has no exact name that means the same everywhere")
    return name


def _numpy_from(node: Fields) -> object:
    raw, name = unpack_bytes(node), field(node, "dtype", str)
    if name == "str":
        return np.str_(raw.decode("utf-8", "surrogatepass"))
    if name == "bytes":
        return np.bytes_(raw)
    dtype = numpy_dtype(name)
    if dtype.kind in "SU" or issubclass(dtype.type, np.void) or len(raw) != dtype.itemsize:
        raise ValueError(f"not the bytes of one {name}")
    value: object = np.frombuffer(raw, dtype)[0]
    return value


def _decimal_from(node: Fields) -> Decimal:
    value = Decimal(field(node, "value", str))
    return _checked(value, node["value"], str(value))


def _uuid_from(node: Fields) -> UUID:
    value = UUID(field(node, "value", str))
    return _checked(value, node["value"], str(value))


def _text(value: object) -> dict[str, Any]:
    return {"value": str(value)}


_BY_TAG["str"] = str_from
_BY_TAG["int"] = int_from
_BY_TAG["float"] = float_from
_BY_TAG["numpy"] = _numpy_from
_BY_TAG["numpy.dtype"] = lambda n: numpy_dtype(field(n, "dtype", str))

register(bytes, "bytes", pack_bytes, unpack_bytes)
register(bytearray, "bytearray", pack_bytes, lambda n: bytearray(unpack_bytes(n)))
register(
    complex,
    "complex",
    lambda v: {"real": float_node(v.real), "imag": float_node(v.imag)},
    lambda n: complex(float_from(n.get("real")), float_from(n.get("imag"))),
)
register(
    range,
    "range",
    lambda v: {"start": int_node(v.start), "stop": int_node(v.stop), "step": int_node(v.step)},
    lambda n: range(int_from(n.get("start")), int_from(n.get("stop")), int_from(n.get("step"))),
)
register(
    slice,
    "slice",
    _slice_node,
    lambda n: slice(*(_none_or_int(n[name]) for name in ("start", "stop", "step"))),
)
register(datetime, "datetime", _clock_node, _datetime_from)
register(date, "date", lambda v: {"iso": v.isoformat()}, _date_from)
register(time, "time", _clock_node, _time_from)
register(timedelta, "timedelta", _timedelta_node, _timedelta_from)
register(timezone, "timezone", _timezone_node, _timezone_from)
register(ZoneInfo, "ZoneInfo", _zone_node, _zone_from)
for _kind in _PATHS.values():
    _BY_TYPE[_kind] = ("path", _path_node)
_BY_TAG["path"] = _path_from
register(Decimal, "Decimal", _text, _decimal_from)
register(
    Fraction,
    "Fraction",
    lambda v: {"numerator": int_node(v.numerator), "denominator": int_node(v.denominator)},
    lambda n: Fraction(int_from(n.get("numerator")), int_from(n.get("denominator"))),
)
register(UUID, "UUID", _text, _uuid_from)
