"""Files of ``torch.save``: one archive, of any nested state."""

from __future__ import annotations

from typing import Any

from cloudckpt.errors import InvalidStateError
from cloudckpt.interop.collected import Collected
from cloudckpt.interop.foreign import Foreign, Origin
from cloudckpt.interop.ranges import Part, Ranges, prefetch
from cloudckpt.interop.torch_archive import first_reads, open_archive
from cloudckpt.interop.torch_state import state_of, without_left

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
ALONE = "data"
"""The key of a state that is no dict."""


def open_torch(origin: Origin) -> Foreign:
    """What a file of ``torch.save`` holds. Nothing of it is executed, unless ``origin.allow_pickle``.

    Raises NotFoundError; FormatError for files of another kind, and for one that only code can read, naming what it
    would call and where.
    """
    store, name = origin.store, origin.name
    if name is None:
        raise InvalidStateError(
            f"{store.url}: name a file of torch.save, one that ends in {', '.join(SUFFIXES)}; for a folder of a"
            " distributed checkpoint use dcp"
        )
    nbytes = store.size(name)
    where = f"{name} of {store.url}"
    ranges = Ranges(store, name, nbytes)
    prefetch({ranges: first_reads(0, nbytes)}, num_threads=origin.config.num_threads)
    archive = open_archive(Part(ranges, 0, nbytes), where)
    found = Collected()
    state, left = state_of(archive, found, "", allow_pickle=origin.allow_pickle)
    found.problems += left
    found.check(
        f"{where} cannot be read without executing code, which nothing here does",
        "\nSave the state_dict() alone, as tensors and plain values; or, if you trust the file, pass allow_pickle=True",
    )
    return found.foreign(_as_dict(without_left(state)))


def _as_dict(state: Any) -> dict[Any, Any]:
    return state if isinstance(state, dict) else {ALONE: state}
