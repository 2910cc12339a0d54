"""The data types of torch and numpy, and what zarr calls them.

A type that zarr v3 cannot name, or whose elements are not whole bytes on their own, is *raw*: its
bytes are stored as ``uint8``, with a trailing dimension of ``itemsize`` when that is more than 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

from cloudckpt.errors import FormatError

# Their scales and zero points live outside of the tensor's bytes, so the bytes alone would lose them.
QUANTISED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})


@dataclass(frozen=True)
class DType:
    """One data type; ``name`` is torch's, without ``torch.``.

    ``zarr_name`` is None for a raw type. ``numpy`` is the type to view the bytes with, if there is one.
    """

    name: str
    itemsize: int
    zarr_name: str | None
    numpy: np.dtype | None

    @property
    def stored_name(self) -> str:
        """The ``data_type`` that goes into ``zarr.json``."""
        return self.zarr_name or "uint8"

    @property
    def trailing(self) -> tuple[int, ...]:
        """What the shape of the stored array has beyond the shape of the tensor."""
        return (self.itemsize,) if self.zarr_name is None and self.itemsize > 1 else ()


_NATIVE = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_RAW_ITEMSIZE = {
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}


def _table() -> dict[str, DType]:
    table = {}
    for name in _NATIVE:
        viewed = np.dtype(name).newbyteorder("<")
        table[name] = DType(name, viewed.itemsize, name, viewed)
    for name in _EXTENSIONS:
        viewed = np.dtype(getattr(ml_dtypes, name))
        table[name] = DType(name, viewed.itemsize, name, viewed)
    for name, itemsize in _RAW_ITEMSIZE.items():
        table[name] = DType(name, itemsize, None, None)
    return table


DTYPES: Mapping[str, DType] = MappingProxyType(_table())


def dtype(name: str) -> DType:
    """The type with torch's ``name``; FormatError for a name that this version does not know."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise FormatError(f"unknown data type {name!r}") from None


def fill_value(dtype: DType) -> bool | int | float | str | list[float]:
    """The zero of ``dtype`` as ``zarr.json`` wants it."""
    name = dtype.stored_name
    if name == "bool":
        return False
    if name.startswith("complex"):
        return [0.0, 0.0]
    if name == "float8_e8m0fnu":
        # This type has no zero; the bits are given, since rounding 0.0 to it is left open by the spec.
        return "0x00"
    return 0.0 if "float" in name else 0


def from_numpy(dtype: np.dtype) -> DType | None:
    """The type whose stored bytes are those of a numpy array; None: keep the array as raw bytes."""
    return _BY_NUMPY_NAME.get(numpy_name(dtype) or "")


# dtype.str of the types that are fixed by it; longdouble (f16, c32) differs between platforms.
_NUMPY_STR = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)|[<>][mM]8(\[\w{1,16}\])?|\|[SV]\d{1,9}|[<>]U\d{1,8}"
)


def numpy_name(dtype: np.dtype) -> str | None:
    """An exact name for a numpy type: ``dtype.str``, or the plain name of an ml_dtypes type.

    None for types that no name fixes: structured, object, longdouble and variable-length string types.
    """
    if dtype.isbuiltin == 2:
        return dtype.name if getattr(ml_dtypes, dtype.name, None) is dtype.type else None
    if dtype.fields or dtype.subdtype or dtype.metadata or not _NUMPY_STR.fullmatch(dtype.str):
        return None
    return dtype.str


def numpy_dtype(name: str) -> np.dtype:
    """The inverse of `numpy_name`; FormatError for anything that it does not return."""
    try:
        found = np.dtype(name if _NUMPY_STR.fullmatch(name) else getattr(ml_dtypes, name))
    except (AttributeError, TypeError, ValueError):
        found = None
    if found is None or numpy_name(found) != name:
        raise FormatError(f"unknown numpy data type {name!r}")
    return found


_BY_NUMPY_NAME = {numpy_name(d.numpy): d for d in DTYPES.values() if d.numpy is not None}
