"""Where chunks lie that are there already, so that a save may refer to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from cloudckpt.format.codec import DIGEST_BYTES
from cloudckpt.format.document import ObjectEntry
from cloudckpt.format.grid import Ints
from cloudckpt.format.keys import key_in_run, key_seen_from
from cloudckpt.format.manifest import Manifest

DigestColumn = npt.NDArray[np.uint8]
"""One row of `DIGEST_BYTES` a chunk."""


@dataclass(frozen=True, eq=False)
class Places:
    """Row i is about chunk ``chunk[i]`` of a save's plan, in ascending order; ``object`` counts in ``objects``."""

    objects: tuple[ObjectEntry, ...]
    chunk: Ints
    object: Ints
    byte_offset: Ints
    nbytes: Ints
    crc32c: npt.NDArray[np.uint32]
    digest: DigestColumn

    @staticmethod
    def none() -> Places:
        empty = np.zeros(0, dtype=np.int64)
        return Places((), empty, empty, empty, empty, empty.astype(np.uint32), digest_column([]))

    @staticmethod
    def of_base(base: Manifest, rows: Ints) -> Places:
        """``rows``: for every chunk of the plan the row of the base's chunk table that it may equal, -1 for none."""
        columns = base.columns
        if columns.digest is None:
            return Places.none()
        chunk = np.nonzero(rows >= 0)[0]
        at = rows[chunk]
        return Places(
            base.objects,
            chunk,
            columns.object[at],
            columns.byte_offset[at],
            columns.nbytes[at],
            columns.crc32c[at],
            columns.digest[at],
        )

    def find(self, chunk: int, digest: bytes) -> int | None:
        """The row of a chunk if it has this digest."""
        row = int(np.searchsorted(self.chunk, chunk))
        if row < len(self.chunk) and self.chunk[row] == chunk and self.digest[row].tobytes() == digest:
            return row
        return None

    def in_run(self, step_dir: str) -> Places:
        """With keys relative to the run, from those of the checkpoint in ``step_dir``."""
        return self._renamed(lambda key: key_in_run(step_dir, key))

    def seen_from(self, step_dir: str) -> Places:
        """The inverse of `in_run`."""
        return self._renamed(lambda key: key_seen_from(step_dir, key))

    def _renamed(self, rename: Callable[[str], str]) -> Places:
        objects = tuple(msgspec.structs.replace(entry, key=rename(entry.key)) for entry in self.objects)
        return replace(self, objects=objects)


@dataclass(frozen=True)
class KeptSave:
    """A committed save, and the plan that it was made by: what a rank still knows the digests of."""

    plan_id: str
    commit_id: str


@dataclass(frozen=True, eq=False)
class Base:
    """The committed checkpoint that an incremental save refers to. ``places``: None if all ranks have kept theirs."""

    step_dir: str
    step: int | None
    places: Places | None


def digest_column(digests: list[bytes]) -> DigestColumn:
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
