"""How an export is cut into files, what these are called, and in which order those of an earlier one go. Pure.

Readers look for ``model.safetensors`` first, and then for the index: what they find decides which export they see.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cloudckpt.errors import InvalidStateError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_EXPORTED = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(size: int | str) -> int:
    """Bytes: an int, or a text such as "5GB" (10**9 each) or "512 MiB" (2**20 each). Raises InvalidStateError."""
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None:
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWER[match[2].upper()])
    if type(size) is not int or size < 1:
        raise InvalidStateError(f"a size is a number of bytes, or a text such as '5GB' or '512MiB', not {size!r:.100}")
    return size


def split(sizes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """The numbers of the tensors in each file, as huggingface_hub's ``split_state_dict_into_shards_factory`` does it.

    In the order given; one that is larger than ``max_bytes`` has a file of its own, and those around it share one.
    """
    files: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for number, nbytes in enumerate(sizes):
        if nbytes > max_bytes:
            files.append([number])
            continue
        if filled + nbytes > max_bytes:
            files.append(current)
            current, filled = [], 0
        current.append(number)
        filled += nbytes
    if current:
        files.append(current)
    return files


def file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def of_export(keys: Collection[str], indexed: Collection[str]) -> set[str]:
    """Which objects at an export's place are of one: by their names, or since its index leads to them (``indexed``).

    Others, such as ``adapter_model.safetensors``, are somebody else's.
    """
    named = {key for key in keys if key == INDEX or _EXPORTED.fullmatch(key)}
    return named | {key for key in keys if key in indexed and "/" not in key and key.endswith(WEIGHTS_SUFFIX)}


@dataclass(frozen=True)
class Succession:
    """What is deleted of an earlier export, group by group, so that no reader ever sees a mixture of it with the new.

    ``first``: before anything is written. ``before_files``: before other files, such as a configuration, are replaced.
    ``last``: once the new export is there.
    """

    first: tuple[str, ...] = ()
    before_files: tuple[str, ...] = ()
    last: tuple[tuple[str, ...], ...] = ()

    @property
    def removed(self) -> list[str]:
        return sorted({*self.first, *self.before_files, *(key for group in self.last for key in group)})


def succeed(
    old: Collection[str], new: Sequence[str], *, indexed: Collection[str] | None, replaces_files: bool
) -> Succession:
    """``old``: weights and indexes that are there; ``new``: the files of weights that come.

    ``indexed``: the files that the index that is there refers to, None where that is not known. ``replaces_files``:
    whether other files of an earlier export get another content.

    The old export stays whole until the new one takes its place, at one point: where a new file would replace one
    that the old index leads to, that index goes first, and so does an old export whose other files are replaced.
    """
    has_single, has_index = SINGLE in old, INDEX in old
    clash = has_index and not has_single and (indexed is None or not {*indexed}.isdisjoint(new))
    first = (INDEX,) if clash else ()
    before_files: tuple[str, ...] = ()
    if replaces_files:
        # The index before the file that hides it: it may be that of a still older export.
        before_files = (*((INDEX,) if has_index and not clash else ()), *((SINGLE,) if has_single else ()))
    gone = {*first, *before_files, *new} | (set() if [*new] == [SINGLE] else {INDEX})
    stale = [key for key in sorted(old) if key not in gone]
    indexes = tuple(key for key in stale if key.endswith(INDEX_SUFFIX))
    single = tuple(key for key in stale if key == SINGLE)
    rest = tuple(key for key in stale if key not in {*indexes, *single})
    return Succession(first, before_files, tuple(group for group in (single, indexes, rest) if group))
