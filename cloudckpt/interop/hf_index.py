"""Which files of a folder are a model in Hugging Face's layout. Pure: names and documents in, decisions out."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import FormatError, InvalidStateError, NotFoundError
from cloudckpt.format.keys import MANIFEST, check_key

SUFFIX = ".safetensors"
SUFFIXES = (SUFFIX, ".json")
"""Of URLs that name a file, or an index, and not the folder that they are in."""

_INDEX = re.compile(r".*\.safetensors\.index(\.[^.]+)?\.json", re.DOTALL)
_SHARD = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})\.safetensors", re.DOTALL)
_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt)", re.DOTALL)

_PREFERRED = (
    "model.safetensors",  # before its index, as transformers has it
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",  # before the single file, as diffusers has it
    "diffusion_pytorch_model.safetensors",
)


@dataclass(frozen=True)
class Choice:
    """``index``: the document that says which files there are; without one, ``files`` are all of them."""

    index: str | None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose(names: Collection[str], where: str) -> Choice:
    """What of the objects of a folder, by their names, is the model.

    The first there is of ``model.safetensors``, its index, the index of ``diffusion_pytorch_model.safetensors``, the
    file itself; else the only index; else all safetensors files, and sets of numbered ones must be complete.

    Raises NotFoundError where there is none, InvalidStateError where there are several indexes, FormatError where
    numbered files are missing.
    """
    files = sorted(name for name in names if name.endswith(SUFFIX))
    indexes = sorted(filter(_INDEX.fullmatch, names))
    chosen = next((name for name in _PREFERRED if name in names), None)
    if chosen is None and len(indexes) > 1:
        raise InvalidStateError(f"{where} holds several indexes, pass the URL of one: {', '.join(indexes)}")
    if chosen is None and indexes:
        chosen = indexes[0]
    if chosen is not None:
        notes = _beside(chosen, indexes, where)
        return Choice(chosen, notes=notes) if chosen in indexes else Choice(None, (chosen,), notes)
    if not files:
        raise NotFoundError(f"{where} holds no safetensors files{_hint(names)}")
    if missing := _missing_numbers(files):
        raise FormatError(
            f"{where} has no index, and of the numbered files {len(missing)} are not there: {', '.join(missing)}"
        )
    note = f"{where} has no index: its {len(files)} safetensors files are taken together ({shortened(files)})"
    return Choice(None, tuple(files), (note,) if len(files) > 1 and not _is_one_set(files) else ())


def _beside(chosen: str, indexes: Sequence[str], where: str) -> tuple[str, ...]:
    others = [name for name in indexes if name != chosen]
    return (f"{where}: {chosen} is taken, not {shortened(others)}",) if others else ()


def stray_note(names: Iterable[str], taken: Collection[str], where: str) -> tuple[str, ...]:
    """A note on the safetensors files that are not taken, if there are any."""
    stray = sorted(name for name in names if name.endswith(SUFFIX) and name not in taken)
    return (f"{where}: safetensors files that do not belong to the model are ignored: {shortened(stray)}",) * bool(
        stray
    )


def shortened(names: Collection[str], limit: int = 8) -> str:
    """For notes; errors name all."""
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _missing_numbers(files: Sequence[str]) -> list[str]:
    """The names that complete sets of numbered files would have and that are not there."""
    found: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, files)):
        found.setdefault((match[1], match[3]), set()).add(int(match[2]))
    missing = []
    for (stem, total), numbers in found.items():
        if int(total) > 100_000:
            raise FormatError(f"{stem}-...-of-{total}{SUFFIX}: no model has so many files")
        absent = sorted(set(range(1, int(total) + 1)) - numbers)
        missing += [f"{stem}-{number:0{len(total)}d}-of-{total}{SUFFIX}" for number in absent]
    return missing


def _is_one_set(files: Sequence[str]) -> bool:
    matches = [_SHARD.fullmatch(name) for name in files]
    return all(matches) and len({(match[1], match[3]) for match in matches if match}) == 1


def _hint(names: Collection[str]) -> str:
    """What is there instead, and what reads it."""
    pickles = sorted(name for name in names if _PICKLE.fullmatch(name))
    if pickles:
        return f" but pickles ({shortened(pickles)}): see `cloudckpt import torch`"
    if ".metadata" in names:
        return ": it is a checkpoint of torch.distributed.checkpoint, see `cloudckpt import dcp`"
    if MANIFEST in names:
        return ": it is a checkpoint of cloudckpt, see cloudckpt.load"
    return ""


def parse_index(data: bytes, where: str) -> dict[str, str]:
    """The file of each tensor. Sizes that an index states count for nothing. Raises FormatError."""
    try:
        index = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the index is not valid JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(f"{where}: the index has no weight_map, an object of tensor names and file names")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise FormatError(f"{where}: the file of tensor {name!r:.200} must be a string, not {file!r:.100}")
    for file in dict.fromkeys(weight_map.values()):
        try:
            check_key(file)
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from None
        if "/" in file:
            raise FormatError(f"{where}: the file {file!r:.200} is not beside the index")
        if _PICKLE.fullmatch(file):
            raise FormatError(f"{where}: the file {file!r:.200} is a pickle: see `cloudckpt import torch`")
    return weight_map


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.200} is there twice")
        found[name] = value
    return found


def unite(stored: Mapping[str, Sequence[str]], where: str) -> dict[str, str]:
    """The file of each tensor where no index says it. Raises FormatError for tensors that two files have."""
    files: dict[str, str] = {}
    twice = []
    for file, names in stored.items():
        for name in names:
            if name in files:
                twice.append(f"  {name!r} is in {files[name]} and in {file}")
            files[name] = file
    if twice:
        lines = [
            f"{where} has no index, and files that hold tensors of the same name; pass the URL of one file:",
            *twice,
        ]
        raise FormatError("\n".join(lines))
    return files


def check_complete(
    weight_map: Mapping[str, str], files: Sequence[str], stored: Mapping[str, Sequence[str]], where: str
) -> None:
    """Whether all is there that the index names. ``stored``: the tensors of those ``files`` that are there.

    Raises FormatError that lists every file and every tensor that is not.
    """
    holders: dict[str, list[str]] = {}
    for file, names in stored.items():
        for name in names:
            holders.setdefault(name, []).append(file)
    absent = {name: file for name, file in weight_map.items() if file not in holders.get(name, ())}
    lost = [file for file in files if file not in stored]
    if not absent and not lost:
        return
    lines = [f"{where} names what is not there; nothing was loaded:", *(f"  file {file}" for file in lost)]
    for name, file in absent.items():
        others = f" ({', '.join(holders[name])} has it)" if name in holders else ""
        lines.append(f"  tensor {name!r} in {file}{others}")
    raise FormatError("\n".join(lines))


def unlisted_note(weight_map: Mapping[str, str], stored: Mapping[str, Sequence[str]], where: str) -> tuple[str, ...]:
    """A note on tensors that are in the files and not taken, if there are any."""
    unlisted = [
        f"{name!r} in {file}" for file, names in stored.items() for name in names if weight_map.get(name) != file
    ]
    return (f"{where} does not list tensors of its files, which are left out: {shortened(unlisted)}",) * bool(unlisted)
