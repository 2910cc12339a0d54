"""zarr data types for bfloat16 and the float8 family, with the numpy types of ml_dtypes.

zarr finds them by entry points wherever cloudckpt is installed. Importing this module registers them too.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.core.buffer.cpu import Buffer
from zarr.core.dtype.common import DTypeJSON, HasEndianness, HasItemSize  # the bytes codec asks for these two
from zarr.core.dtype.wrapper import TBaseDType
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined]  # where newer versions have it
except ImportError:
    from zarr.dtype import DataTypeValidationError

__all__ = [
    "ALL",
    "BFloat16",
    "Buffer",
    "Float8E4M3FN",
    "Float8E4M3FNUZ",
    "Float8E5M2",
    "Float8E5M2FNUZ",
    "Float8E8M0FNU",
]

_HEX = re.compile(r"0x[0-9a-fA-F]+")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class _Float(ZDType[np.dtype[Any], np.generic], HasItemSize):
    """What the types have in common; ``_scalar`` is the type of their elements."""

    _scalar: ClassVar[type[np.generic]]

    @classmethod
    def _native(cls) -> np.dtype[Any]:
        return np.dtype(cls._scalar)

    @property
    def item_size(self) -> int:
        return self._native().itemsize

    @classmethod
    def from_native_dtype(cls, dtype: TBaseDType) -> Self:
        if dtype != cls._native():
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        return self._native()

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise DataTypeValidationError(f"zarr version 2 has no {cls._zarr_v3_name}, but {data!r} was given")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: int) -> str:  # type: ignore[override]  # overloaded there, by version
        if zarr_format != 3:
            raise ValueError(f"zarr version {zarr_format} has no {self._zarr_v3_name}")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (bool, int, float, np.number, self._scalar))

    def cast_scalar(self, data: object) -> np.generic:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} cannot be a {self._zarr_v3_name}")
        scalar: np.generic = self._native().type(data)
        return scalar

    def default_scalar(self) -> np.generic:
        """The element whose bits are zero: float8_e8m0fnu has no number zero."""
        return self._from_bits(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> np.generic:  # noqa: ARG002  # zarr's signature
        if isinstance(data, str):
            if _HEX.fullmatch(data):
                return self._from_bits(int(data, 16))
            if data in _NON_FINITE:
                return self.cast_scalar(_NON_FINITE[data])
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:  # noqa: ARG002  # zarr's signature
        scalar = self.cast_scalar(data)
        value = float(scalar)
        if math.isfinite(value):
            return value
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        # A nan has a sign and a payload: only its bits give it back.
        return f"0x{int.from_bytes(scalar.tobytes(), 'little'):0{2 * self.item_size}x}"

    def _from_bits(self, bits: int) -> np.generic:
        try:
            raw = bits.to_bytes(self.item_size, "little")
        except OverflowError:
            raise ValueError(f"{bits:#x} is too long for a {self._zarr_v3_name}") from None
        scalar: np.generic = np.frombuffer(raw, self._native())[0]
        return scalar


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness):
    """Has a byte order in zarr.json, as types of several bytes must; ml_dtypes knows only this machine's."""

    _zarr_v3_name = "bfloat16"
    _scalar = ml_dtypes.bfloat16
    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))

    def to_native_dtype(self) -> np.dtype[Any]:
        if self.endianness != "little":
            raise ValueError("big-endian bfloat16 is not supported")
        return self._native()


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_Float):
    _zarr_v3_name = "float8_e4m3fn"
    _scalar = ml_dtypes.float8_e4m3fn
    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_Float):
    _zarr_v3_name = "float8_e5m2"
    _scalar = ml_dtypes.float8_e5m2
    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_Float):
    _zarr_v3_name = "float8_e4m3fnuz"
    _scalar = ml_dtypes.float8_e4m3fnuz
    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fnuz))


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_Float):
    _zarr_v3_name = "float8_e5m2fnuz"
    _scalar = ml_dtypes.float8_e5m2fnuz
    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2fnuz))


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(_Float):
    _zarr_v3_name = "float8_e8m0fnu"
    _scalar = ml_dtypes.float8_e8m0fnu
    dtype_cls = type(np.dtype(ml_dtypes.float8_e8m0fnu))


ALL: tuple[type[_Float], ...] = (
    BFloat16,
    Float8E4M3FN,
    Float8E5M2,
    Float8E4M3FNUZ,
    Float8E5M2FNUZ,
    Float8E8M0FNU,
)


def _register() -> None:
    for kind in ALL:
        if kind._zarr_v3_name not in data_type_registry.contents:
            data_type_registry.register(kind._zarr_v3_name, kind)


# zarr 3.1 and 3.2 collect data types from entry points but never load them. They do load buffer classes
# from entry points, and before they read any metadata: `Buffer`, zarr's own, is there to import this module.
_register()
