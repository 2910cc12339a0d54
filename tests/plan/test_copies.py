"""What objects are called in a copy that stands by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.manifest import Manifest
from cloudckpt.plan.copies import moved_objects


def entry(key: str, rank: int) -> ObjectEntry:
    return ObjectEntry(key=key, nbytes=1, crc32c=2, rank=rank)


def test_objects_of_siblings_become_own_ones():
    objects = (entry("a/r0", 1), entry("../step-00000003/b/r7", 7), entry("../step-2/c/r1", 1))
    manifest: Any = SimpleNamespace(objects=objects, document=SimpleNamespace(world_size=2))
    assert moved_objects(cast("Manifest", manifest)) == (entry("a/r0", 1), entry("b/r7", 1), entry("c/r1", 1))
