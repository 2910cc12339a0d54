"""Arrays that are made of boxes of stored arrays: what rename rules turn the stored ones into.

No element is touched here. A virtual array says, for each of its parts, which box of which stored
array it is, and how the dims of the two belong together; a want on it becomes wants on those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.document import MAX_DIMS
from cloudckpt.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored array. ``flat``: it is stored as one dim, its elements those of ``shape`` in C order."""

    number: int
    shape: tuple[int, ...]
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """``box`` of a virtual array is a box of a stored one.

    ``dims[k]`` is the dim of the virtual array that runs along dim k of the stored one, or None
    where the part is a single index of it; ``start[k]`` is the index at which the part begins. Dims
    of the virtual array that are in no ``dims`` have extent 1 in ``box``.
    """

    stored: Stored
    box: Box
    dims: tuple[int | None, ...]
    start: tuple[int, ...]

    def stored_box(self, inner: Box) -> Box:
        """Where a box inside of ``box`` is in the stored array."""
        offset, shape = [], []
        for dim, start in zip(self.dims, self.start, strict=True):
            offset.append(start if dim is None else start + inner.offset[dim] - self.box.offset[dim])
            shape.append(1 if dim is None else inner.shape[dim])
        return Box(tuple(offset), tuple(shape))


@dataclass(frozen=True, slots=True)
class VirtualArray:
    """``dtype`` is torch's name. The parts tile the array; parts without elements may be left out."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def source(self) -> Stored | None:
        """The stored array that this is, neither cut nor turned; None if it is not one."""
        if len(self.parts) != 1:
            return None
        part = self.parts[0]
        same = part.stored.shape == self.shape and part.dims == tuple(range(len(self.shape)))
        return part.stored if same and not any(part.start) else None


def stored_array(number: int, dtype: str, shape: tuple[int, ...], *, flat: bool = False) -> VirtualArray:
    zero = (0,) * len(shape)
    part = Part(Stored(number, shape, flat), Box(zero, shape), tuple(range(len(shape))), zero)
    return VirtualArray(dtype, shape, (part,))


def array_of(manifest: Manifest, node: Mapping[str, Any]) -> VirtualArray:
    """What a leaf of the stored tree refers to. FormatError if its ``logical_shape`` does not fit the stored array."""
    number = manifest.array_number(node)
    entry = manifest.arrays[number]
    logical = node.get("logical_shape") if node["$"] == "tensor" else None
    if logical is None:
        return stored_array(number, entry.dtype, entry.shape)
    if (
        not isinstance(logical, list)
        or not all(type(extent) is int and extent >= 0 for extent in logical)
        or len(logical) > MAX_DIMS
        or math.prod(extent or 1 for extent in logical) >= 2**58  # what torch can count in bytes, too
    ):
        raise FormatError(f"array {entry.name!r}: malformed logical shape")
    if entry.shape != (math.prod(logical),):
        raise FormatError(f"array {entry.name!r}: logical shape {logical} does not fit its stored shape {entry.shape}")
    return stored_array(number, entry.dtype, tuple(logical), flat=len(logical) != 1)


def stack(arrays: Sequence[VirtualArray], dim: int) -> VirtualArray:
    """A new dim ``dim`` along which the arrays stand, as ``numpy.stack``."""
    first = _alike(arrays)
    dim = _checked(dim, len(first.shape) + 1)
    parts = [
        Part(
            part.stored,
            Box(_inserted(part.box.offset, dim, i), _inserted(part.box.shape, dim, 1)),
            tuple(d if d is None or d < dim else d + 1 for d in part.dims),
            part.start,
        )
        for i, array in enumerate(arrays)
        for part in array.parts
    ]
    return VirtualArray(first.dtype, _inserted(first.shape, dim, len(arrays)), tuple(parts))


def unstack(array: VirtualArray, dim: int) -> list[VirtualArray]:
    """The arrays that stand along ``dim``."""
    dim = _checked(dim, len(array.shape))
    return [_selected(array, dim, i) for i in range(array.shape[dim])]


def concatenate(arrays: Sequence[VirtualArray], dim: int) -> VirtualArray:
    """As ``numpy.concatenate``; the arrays may differ in extent along ``dim``."""
    first = arrays[0]
    dim = _checked(dim, len(first.shape))
    parts, position = [], 0
    for array in arrays:
        if (array.dtype, _dropped(array.shape, dim)) != (first.dtype, _dropped(first.shape, dim)):
            raise _differ(first, array)
        parts += [replace(part, box=_shifted(part.box, dim, position)) for part in array.parts]
        position += array.shape[dim]
    return VirtualArray(first.dtype, _changed(first.shape, dim, position), tuple(parts))


def split(array: VirtualArray, dim: int, sizes: Sequence[int] | int) -> list[VirtualArray]:
    """Parts of the given extents along ``dim``, or that many parts of equal extent."""
    dim = _checked(dim, len(array.shape))
    extent = array.shape[dim]
    if isinstance(sizes, int):
        if sizes < 1 or extent % sizes:
            raise InvalidStateError(f"dim {dim} of shape {array.shape} does not divide into {sizes} equal parts")
        sizes = [extent // sizes] * sizes
    if any(size < 0 for size in sizes) or sum(sizes) != extent:
        raise InvalidStateError(f"parts of {tuple(sizes)} do not make up dim {dim} of shape {array.shape}")
    found, position = [], 0
    for size in sizes:
        found.append(_narrowed(array, dim, position, size))
        position += size
    return found


def permute(array: VirtualArray, dims: Sequence[int]) -> VirtualArray:
    """Dim k of the result is dim ``dims[k]`` of ``array``, as ``numpy.transpose`` and ``torch.permute``."""
    count = len(array.shape)
    order = tuple(d + count if d < 0 else d for d in dims)
    if sorted(order) != list(range(count)):
        raise InvalidStateError(f"dims {tuple(dims)} are no permutation of the {count} dims of shape {array.shape}")
    place = {old: new for new, old in enumerate(order)}
    parts = [
        replace(
            part,
            box=Box(_permuted(part.box.offset, order), _permuted(part.box.shape, order)),
            dims=tuple(None if d is None else place[d] for d in part.dims),
        )
        for part in array.parts
    ]
    return VirtualArray(array.dtype, _permuted(array.shape, order), tuple(parts))


def parts_of(array: VirtualArray, wanted: Box) -> Iterator[tuple[Part, Box]]:
    """The parts that a box meets, and the common box in the coordinates of ``array``."""
    for part in array.parts:
        common = part.box.intersect(wanted)
        if common is not None:
            yield part, common


def _selected(array: VirtualArray, dim: int, index: int) -> VirtualArray:
    parts = []
    for part in array.parts:
        within = index - part.box.offset[dim]
        if not 0 <= within < part.box.shape[dim]:
            continue
        box = Box(_dropped(part.box.offset, dim), _dropped(part.box.shape, dim))
        start = tuple(s + within if d == dim else s for d, s in zip(part.dims, part.start, strict=True))
        dims = tuple(None if d is None or d == dim else d - (d > dim) for d in part.dims)
        parts.append(Part(part.stored, box, dims, start))
    return VirtualArray(array.dtype, _dropped(array.shape, dim), tuple(parts))


def _narrowed(array: VirtualArray, dim: int, offset: int, size: int) -> VirtualArray:
    window = Box(_changed((0,) * len(array.shape), dim, offset), _changed(array.shape, dim, size))
    parts = [
        Part(part.stored, _shifted(common, dim, -offset), part.dims, part.stored_box(common).offset)
        for part, common in parts_of(array, window)
    ]
    return VirtualArray(array.dtype, window.shape, tuple(parts))


def _alike(arrays: Sequence[VirtualArray]) -> VirtualArray:
    first = arrays[0]
    for array in arrays[1:]:
        if (array.dtype, array.shape) != (first.dtype, first.shape):
            raise _differ(first, array)
    return first


def _differ(a: VirtualArray, b: VirtualArray) -> InvalidStateError:
    return InvalidStateError(f"{a.dtype} {a.shape} and {b.dtype} {b.shape} do not go into one tensor")


def _checked(dim: int, dims: int) -> int:
    if not -dims <= dim < dims:
        raise InvalidStateError(f"there is no dim {dim} among {dims}")
    return dim % dims


def _inserted(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim:])


def _dropped(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _changed(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _permuted(values: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[d] for d in order)


def _shifted(box: Box, dim: int, by: int) -> Box:
    return Box(_changed(box.offset, dim, box.offset[dim] + by), box.shape)
