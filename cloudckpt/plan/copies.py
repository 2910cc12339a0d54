"""What a checkpoint's objects are called in a copy that stands by itself. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.keys import split_key
from cloudckpt.format.manifest import Manifest


def moved_objects(manifest: Manifest) -> tuple[ObjectEntry, ...]:
    """Objects of siblings become the checkpoint's own: attempts are random, so that their keys stay apart.

    Who wrote an object has no meaning, but must be below the world size, and a sibling may have been saved by more.
    """
    last = manifest.document.world_size - 1
    return tuple(
        entry if below == entry.key else replace(entry, key=below, rank=min(entry.rank, last))
        for entry in manifest.objects
        for below in (split_key(entry.key)[1],)
    )
