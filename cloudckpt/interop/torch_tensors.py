"""Tensors in the pickles of ``torch.save``: which bytes of which storage they are, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import FormatError
from cloudckpt.format.dtypes import dtype
from cloudckpt.interop.pickle_reader import PERSISTENT, Global, Inert

# torch/storage.py, _dtype_to_storage_type_map().
STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "BFloat16": "bfloat16",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
_PLAIN_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
_REBUILD = "torch._utils._rebuild_"
REBUILDERS = frozenset(
    {
        *(_REBUILD + name for name in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")),
        "torch._tensor._rebuild_from_type_v2",
    }
)


class UnsupportedTensorError(FormatError):
    """A tensor whose elements do not lie in one strided memory; the text says what it is."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """``key``: of its storage, ``numel`` elements in all; ``first``: its first element there. All in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    key: str
    numel: int


def saved_tensor(value: Inert) -> SavedTensor:
    """What one of `REBUILDERS` would make.

    UnsupportedTensorError for sparse, quantised, meta and wrapped tensors; ValueError, TypeError and such for arguments
    that torch never writes.
    """
    name, args = value.kind, value.args
    if name == "torch._tensor._rebuild_from_type_v2":
        function, cls, args, _ = args
        if cls.name not in _PLAIN_CLASSES:
            raise UnsupportedTensorError(f"a tensor subclass, {cls.name}")
        return saved_tensor(Inert(function.name, args))
    if name not in REBUILDERS:
        raise UnsupportedTensorError(f"no plain tensor but what {name} makes")
    if name.startswith(_REBUILD + "parameter"):
        if type(args[0]) is not Inert:
            raise ValueError("a parameter of no tensor")
        return saved_tensor(args[0])
    return _strided(name, args)


def _strided(name: str, args: Sequence[Any]) -> SavedTensor:
    storage, first, shape, strides = args[0], args[1], _ints(args[2]), _ints(args[3])
    given = _dtype(args[6]) if name.endswith("_v3") else None
    flags = args[7:8] if given else args[6:7]
    if flags and flags[0]:
        raise UnsupportedTensorError(
            f"a tensor with a pending {' and '.join(map(str, flags[0]))}; call resolve_conj() or resolve_neg() first"
        )
    kind, key, numel = _storage(storage)
    kind = given or kind
    itemsize = dtype(kind).itemsize
    if given:
        numel //= itemsize
    if type(first) is not int or first < 0 or len(shape) != len(strides):
        raise ValueError("a tensor without a place")
    count = math.prod(shape)
    last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if count else first
    if count and last >= numel:
        raise ValueError(f"a tensor that reaches to element {last} of a storage of {numel}")
    return SavedTensor(kind, shape, strides, first, key, numel)


def _storage(value: Any) -> tuple[str, str, int]:
    """``(dtype, key, number of elements)``; of bytes where the storage has no type."""
    if type(value) is not Inert or value.kind != PERSISTENT or not isinstance(value.args, tuple):
        raise ValueError("a tensor without a storage")
    tag, cls, key, _, numel = value.args[:5]
    if tag != "storage" or type(key) is not str or type(numel) is not int or not 0 <= numel < 2**62:
        raise ValueError("a malformed storage")
    name = cls.name.rpartition(".")[2].removesuffix("Storage")
    if name == "Untyped":
        return "uint8", key, numel
    if name not in STORAGES:
        raise UnsupportedTensorError(f"a tensor of a {cls.name}")
    return STORAGES[name], key, numel


def _dtype(value: Any) -> str:
    if type(value) is not Global or not value.name.startswith("torch."):
        raise ValueError("a tensor without a dtype")
    return value.name.removeprefix("torch.")


def _ints(value: Any) -> tuple[int, ...]:
    if type(value) is Inert and value.kind == "torch.Size":
        (value,) = value.args
    if not isinstance(value, tuple | list) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise ValueError("a malformed shape")
    return tuple(value)
