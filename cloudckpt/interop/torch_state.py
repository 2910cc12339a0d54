"""What is in an archive of ``torch.save``, as a state of references and plain values."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.values import Path, dotted
from cloudckpt.interop.collected import Collected
from cloudckpt.interop.foreign import ArrayRef, Encoded
from cloudckpt.interop.pickled_values import Left, Plain
from cloudckpt.interop.torch_archive import TorchArchive
from cloudckpt.interop.torch_tensors import SavedTensor

MAX_UNPICKLED_BYTES = 256 * 1024 * 1024
_GONE = object()


def state_of(archive: TorchArchive, found: Collected, name: str, *, allow_pickle: bool) -> tuple[Any, list[str]]:
    """The state, and what in it cannot be taken, by dotted path below ``name``; a `Left` stands in its place.

    With ``allow_pickle`` Python's own unpickler makes that, which executes what the archive says.
    """
    part = archive.part
    above = (name,) if name else ()

    def tensor(path: Path, saved: SavedTensor) -> ArrayRef:
        text = dotted((*above, *path))
        parts = found.parts(saved, part.key, part.object_nbytes, archive.storage_offset(saved), text)
        return found.refer(text, saved.dtype, saved.shape, parts)

    plain = Plain(tensor, archive.pickle_bytes)
    state = plain.value(archive.value)
    if not (plain.left and allow_pickle):
        return state, [f"{dotted((*above, *left.path)) or 'all of it'}: {left.reason}" for left in plain.left]
    whole = _unpickled(archive, plain.left)
    return _replaced(state, lambda left: _pickle_of(whole, left)), []


def without_left(state: Any) -> Any:
    """The state without what cannot be taken: that is left out of dicts, and None in sequences. Changes containers."""
    found = _replaced(state, lambda _: _GONE)
    return None if found is _GONE else found


def _replaced(value: Any, change: Callable[[Left], Any]) -> Any:
    if type(value) is Left:
        return change(value)
    if isinstance(value, dict):
        _replace_items(value, change)
    elif isinstance(value, list | deque):
        for index, item in enumerate(value):
            value[index] = _in_sequence(item, change)
    elif type(value) is tuple:
        return tuple([_in_sequence(item, change) for item in value])
    elif hasattr(value, "__dict__") and isinstance(vars(value), dict):
        _replace_items(vars(value), change)
    return value


def _replace_items(mapping: dict[Any, Any], change: Callable[[Left], Any]) -> None:
    for key in list(mapping):
        mapping[key] = _replaced(mapping[key], change)
        if mapping[key] is _GONE:
            del mapping[key]


def _in_sequence(value: Any, change: Callable[[Left], Any]) -> Any:
    found = _replaced(value, change)
    return None if found is _GONE else found


def _unpickled(archive: TorchArchive, left: Sequence[Left]) -> Any:
    part = archive.part
    if part.nbytes > MAX_UNPICKLED_BYTES:
        raise InvalidStateError(f"{archive.where}: {part.nbytes} bytes are too many to unpickle for {left[0]}")
    return torch.load(io.BytesIO(part.read(0, part.nbytes)), map_location="cpu", weights_only=False)


def _pickle_of(whole: Any, left: Left) -> Encoded:
    value = whole
    for step in left.path:
        holds = isinstance(value, Mapping | list | tuple | deque)
        value = value[step] if holds else getattr(value, step)
    return Encoded({"$": "pickle", **values.pickled(value, left.path)})
