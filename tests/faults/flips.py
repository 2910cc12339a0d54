"""Single bits of a stored checkpoint, by what they are part of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cloudckpt
from cloudckpt.format.codec import CHECKSUM_BYTES
from cloudckpt.format.keys import MANIFEST
from cloudckpt.format.manifest import Manifest


@dataclass(frozen=True)
class Region:
    """Bytes of one object that are one thing. ``chunk``: the row of the chunk table that they belong to, if any."""

    key: str
    what: str
    chunk: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Flip:
    region: Region
    bit: int

    @property
    def byte_offset(self) -> int:
        return self.bit // 8

    def turn(self, url: Path) -> None:
        """A second time it undoes the first."""
        path = url / self.region.key
        with path.open("r+b") as file:
            file.seek(self.byte_offset)
            (byte,) = file.read(1)
            file.seek(self.byte_offset)
            file.write(bytes([byte ^ 1 << self.bit % 8]))


def manifest_of(url: Path) -> Manifest:
    with cloudckpt.open_checkpoint(url) as checkpoint:
        return checkpoint.manifest


def regions(url: Path) -> list[Region]:
    """Every byte of every object of a checkpoint, once."""
    manifest = manifest_of(url)
    found = [Region(MANIFEST, "manifest", None, 0, (url / MANIFEST).stat().st_size)]
    columns = manifest.columns
    for number, entry in enumerate(manifest.objects):
        position = 0
        for chunk in sorted((columns.object == number).nonzero()[0].tolist(), key=columns.byte_offset.__getitem__):
            start, end = int(columns.byte_offset[chunk]), int(columns.byte_offset[chunk] + columns.nbytes[chunk])
            found += [
                Region(entry.key, "outside", None, position, start),
                Region(entry.key, "payload", chunk, start, end - CHECKSUM_BYTES),
                Region(entry.key, "checksum", chunk, end - CHECKSUM_BYTES, end),
            ]
            position = end
        found.append(Region(entry.key, "outside", None, position, entry.nbytes))
    return [region for region in found if region.start < region.end]


def flips(url: Path, count: int, seed: int) -> Iterator[Flip]:
    """``count`` of them, no bit twice; no object gets its second before each has its first."""
    dice = random.Random(seed)
    by_object: dict[str, list[Region]] = {}
    for region in regions(url):
        by_object.setdefault(region.key, []).append(region)
    objects = [*by_object.values()]
    for found in objects:
        dice.shuffle(found)
    dice.shuffle(objects)
    done: set[tuple[str, int]] = set()
    for turn in itertools.count():
        for found in objects:
            region = found[turn % len(found)]
            bit = dice.randrange(8 * region.start, 8 * region.end)
            if (region.key, bit) in done:
                continue
            done.add((region.key, bit))
            yield Flip(region, bit)
            if len(done) == count:
                return
