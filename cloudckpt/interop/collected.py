"""What an opener has found so far: objects, arrays in them, and tensors made of those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cloudckpt.errors import FormatError
from cloudckpt.format.box import Box
from cloudckpt.format.dtypes import dtype
from cloudckpt.interop.foreign import ArrayRef, Foreign, ForeignArray, describe
from cloudckpt.interop.strided import MAX_RUNS, is_c_order, runs
from cloudckpt.interop.torch_tensors import SavedTensor
from cloudckpt.plan.virtual import Part, Stored, VirtualArray

_SHOWN = 20


class Collected:
    """Grows by what is found; ``problems`` and ``notes`` are for the user."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._objects: dict[str, tuple[int, int]] = {}  # number and size by key
        self._arrays: list[ForeignArray] = []
        self._made: dict[str, VirtualArray] = {}
        self._references: dict[VirtualArray, ArrayRef] = {}
        self._names: set[str] = set()
        self._known: dict[tuple[Any, ...], tuple[Part, ...]] = {}

    def object(self, key: str, nbytes: int) -> int:
        """The number of an object."""
        return self._objects.setdefault(key, (len(self._objects), nbytes))[0]

    def parts(self, tensor: SavedTensor, key: str, nbytes: int, storage_offset: int, name: str) -> tuple[Part, ...]:
        """A tensor as boxes of arrays, whose names are made of ``name``. The same tensor, twice, is of the same arrays.

        Raises FormatError for one that is in too many runs.
        """
        number = self.object(key, nbytes)
        identity = (number, storage_offset, tensor.dtype, tensor.shape, tensor.strides, tensor.first)
        if identity not in self._known:
            self._known[identity] = self._new_parts(tensor, number, storage_offset, name)
        return self._known[identity]

    def _new_parts(self, tensor: SavedTensor, number: int, storage_offset: int, name: str) -> tuple[Part, ...]:
        itemsize = dtype(tensor.dtype).itemsize
        if 0 in tensor.shape or is_c_order(tensor.shape, tensor.strides):
            place = storage_offset + (0 if 0 in tensor.shape else tensor.first * itemsize)
            return (self._part(name, tensor, tensor.shape, number, place),)
        found = runs(tensor.shape, tensor.strides, tensor.first, tensor.numel)
        if found is None:
            raise FormatError(f"strides {tensor.strides} of shape {tensor.shape} come to more than {MAX_RUNS} runs")
        parts = []
        for index, run in enumerate(found):
            whole = self._part(f"{name}#{index}", tensor, run.shape, number, storage_offset + run.first * itemsize)
            parts.append(Part(whole.stored, run.box, run.dims, run.start))
        return tuple(parts)

    def _part(self, name: str, tensor: SavedTensor, shape: tuple[int, ...], number: int, place: int) -> Part:
        stored = Stored(len(self._arrays), shape)
        self._arrays.append(ForeignArray(self._unique(name), tensor.dtype, shape, number, place))
        zero = (0,) * len(shape)
        return Part(stored, Box(zero, shape), tuple(range(len(shape))), zero)

    def refer(self, name: str, kind: str, shape: tuple[int, ...], parts: Sequence[Part]) -> ArrayRef:
        """What stands in the state for a tensor of these parts; the same for the same."""
        made = VirtualArray(kind, shape, tuple(parts))
        if made.source is not None:
            return ArrayRef(self._arrays[made.source.number].name)
        if made not in self._references:
            name = self._unique(f"made/{name}")  # with a slash, which the names in a manifest do not have
            self._made[name] = made
            self._references[made] = ArrayRef(name)
        return self._references[made]

    def _unique(self, name: str) -> str:
        """Different paths can have one dotted text."""
        found, count = name, 1
        while found in self._names:
            count += 1
            found = f"{name}#{count}"
        self._names.add(found)
        return found

    def check(self, what: str, advice: str = "") -> None:
        """FormatError with all problems, if there are any."""
        if not self.problems:
            return
        shown = [f"\n  {problem}" for problem in self.problems[:_SHOWN]]
        more = len(self.problems) - len(shown)
        raise FormatError(f"{what}:{''.join(shown)}{f'{chr(10)}  and {more} more' if more > 0 else ''}{advice}")

    def foreign(self, state: Mapping[Any, Any], step: int | None = None) -> Foreign:
        objects = [(key, nbytes) for key, (_, nbytes) in self._objects.items()]
        return Foreign(describe(objects, self._arrays, state, step=step), self._made, tuple(self.notes))


def listed(items: Iterable[object]) -> str:
    """The first few, for a message."""
    found = [str(item) for item in items]
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
