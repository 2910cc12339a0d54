"""Targets that are one memory under several names, and files of others, which have one of these or each by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from cloudckpt.config import MIB
from cloudckpt.errors import InvalidStateError
from cloudckpt.format.manifest import Manifest
from cloudckpt.pytorch.sharded import ShardedTensor
from cloudckpt.pytorch.shards import LocalShard
from cloudckpt.store.base import Store, byte_view

Target: TypeAlias = torch.Tensor | ShardedTensor
Want: TypeAlias = tuple[int, LocalShard]

_WINDOW_BYTES = 8 * MIB


@dataclass(frozen=True)
class Twins:
    """Two stored arrays, by number, for one memory; and the dotted paths that this has."""

    numbers: tuple[int, int]
    texts: tuple[str, str]


def tied(lacking: Sequence[tuple[str, Target]], found: Iterable[Target]) -> set[str]:
    """Of targets that nothing is stored for, by dotted path, those that are the memory of one that is filled."""
    if not lacking:
        return set()
    filled = {_memory(target) for target in found}
    return {text for text, target in lacking if _memory(target) in filled}


def _memory(target: Target) -> tuple[Any, ...]:
    """Equal for views of one storage that are the same part of it, be it empty as on ranks that hold nothing."""
    if isinstance(target, ShardedTensor):
        target = target.local
    local = target.to_local() if isinstance(target, DTensor) else target
    return (local.untyped_storage()._cdata, local.storage_offset(), local.dtype, tuple(local.shape), local.stride())


def split_twins(manifest: Manifest, wants: Sequence[Want]) -> tuple[list[Want], list[Twins]]:
    """The wants with one for each memory, and pairs of arrays of which both were wanted there and one is left out.

    Raises InvalidStateError where the two are known to differ.
    """
    seen: dict[Any, Want] = {}
    kept, twins = [], []
    for number, shard in wants:
        first, other = seen.setdefault(shard.identity, (number, shard))
        if first == number or manifest.same_bytes(first, number):
            kept.append((number, shard))
        elif manifest.has_checksums:
            raise _differ(other.text, shard.text)
        else:
            twins.append(Twins((first, number), (other.text, shard.text)))
    return kept, twins


def check_twins(store: Store, manifest: Manifest, twins: Iterable[Twins]) -> None:
    """Read both of each pair, whose bytes each lie in one run. Raises InvalidStateError where they differ."""
    for pair in {pair.numbers: pair for pair in twins}.values():
        first, second = (_windows(store, manifest, number) for number in pair.numbers)
        if any(a != b for a, b in zip(first, second, strict=False)):
            raise _differ(*pair.texts)


def _windows(store: Store, manifest: Manifest, number: int) -> Iterator[bytes]:
    columns = manifest.columns
    start = manifest.arrays[number].first_chunk
    chunks = slice(start, start + manifest.grids[number].num_chunks)
    key = manifest.objects[int(columns.object[start])].key
    offset, nbytes = int(columns.byte_offset[start]), int(columns.nbytes[chunks].sum())
    for at in range(0, nbytes, _WINDOW_BYTES):
        parts = store.stream(key, offset + at, min(_WINDOW_BYTES, nbytes - at))
        yield b"".join(bytes(byte_view(part)) for part in parts)


def _differ(first: str, second: str) -> InvalidStateError:
    return InvalidStateError(
        f"{first!r} and {second!r} are the same memory in the target, but are stored as two tensors "
        "that differ: untie them, or load one of them only"
    )
