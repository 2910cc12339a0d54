"""TileDB-Inc/TileDB#1070: a fixed part size runs past 10,000 parts near the end of a huge upload."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cloudckpt.config import GIB, MIB, Config
from cloudckpt.store.parts import MAX_PARTS, MIN_PART_BYTES, part_size
from cloudckpt.transfer.upload import ChunkWrite, UploadJob, upload

SIZES = [
    100 * GIB,
    int(48.9 * GIB),
    10_000 * 5 * MIB,
    10_000 * 5 * MIB + 1,
    9_999 * 5 * MIB + 1,
    5 * MIB,
    5 * MIB + 1,
    1,
    0,
]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("part_bytes", [5 * MIB, 16 * MIB])
def test_parts_are_few_and_large_enough(nbytes: int, part_bytes: int):
    size = part_size(nbytes, part_bytes)
    count = -(-nbytes // size)
    assert count <= MAX_PARTS == 10_000
    # All but the last are of this size; the last has at least one byte.
    assert size >= MIN_PART_BYTES == 5 * MIB
    assert nbytes - (count - 1) * size >= 1 or nbytes == 0
    assert size == part_bytes or nbytes > part_bytes * 10_000


def test_the_part_size_of_100_gib_is_raised_before_the_first_byte():
    assert part_size(100 * GIB, 5 * MIB) >= 10.24 * MIB


@dataclass
class Recorder:
    """A store that takes note of what an upload is expected to be, and drops its bytes."""

    hints: list[int | None] = field(default_factory=list)

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> Recorder:
        self.hints.append(nbytes_hint)
        return self

    def write(self, data: Any) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@pytest.mark.parametrize("num_chunks", [100, 1])
def test_a_pack_says_how_large_it_will_be_before_its_first_byte(num_chunks: int):
    """Sizes only: the chunks claim 1 GiB each and hold 8 bytes."""
    writes = tuple(ChunkWrite(i, "w", f"w/c/{i}", GIB) for i in range(num_chunks))
    job = UploadJob("0" * 12, 0, writes, {"w": b"{}"}, {}, b"{}", None)
    recorder = Recorder()
    upload(
        recorder,  # type: ignore[arg-type]  # all of a store that is used here
        job,
        lambda write: np.zeros(8, dtype=np.uint8),
        layout="packed",
        config=Config(pack_bytes=200 * GIB),
        cancel=threading.Event(),
        advance=lambda nbytes: None,
        written=[],
    )
    (hint,) = recorder.hints
    assert hint is not None
    assert hint >= num_chunks * GIB
    assert -(-hint // part_size(hint, 5 * MIB)) <= MAX_PARTS
