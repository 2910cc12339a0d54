"""How much of a copy is under way at a time, and what stops it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.config import KIB, MIB, Config
from cloudckpt.errors import StoreError
from cloudckpt.store.base import Buffer
from cloudckpt.store.memory import MemoryStore
from cloudckpt.store.parts import parts_in_flight
from cloudckpt.transfer.copying import DamagedObjectError, ObjectCopy, Widths, copy_objects


@given(
    sizes=st.lists(st.integers(0, 200 * MIB), max_size=100),
    memory_bytes=st.integers(1, 2048 * MIB),
    num_threads=st.integers(1, 64),
    read_bytes=st.integers(1, 64 * MIB),
    buffered=st.integers(0, 16 * MIB),
)
def test_what_is_under_way_fits_into_memory(
    sizes: list[int], memory_bytes: int, num_threads: int, read_bytes: int, buffered: int
):
    config = Config(memory_bytes=memory_bytes, num_threads=num_threads, read_bytes=read_bytes)
    widths = Widths.of(sizes, lambda nbytes: min(nbytes, buffered), config)
    assert min(widths.num_objects, widths.num_ranges, widths.range_bytes) >= 1
    assert widths.num_objects <= max(1, min(len(sizes), num_threads))
    num_ranges = widths.num_objects * widths.num_ranges
    streams = min(num_threads, num_ranges) * min(widths.range_bytes, buffered)
    part = min(max(sizes, default=0), config.part_bytes)
    sent = widths.num_objects * (parts_in_flight(config.part_bytes, widths.sending) + 2) * part
    # One range and three parts, whatever the budget.
    assert num_ranges * widths.range_bytes + streams <= max(memory_bytes // 2, 2 * MIB)
    assert sent <= max(memory_bytes // 2, 3 * part)


class Counted(MemoryStore):
    """Counts the bytes of ranges that were read and not yet written."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lock = threading.Lock()
        self.held = self.peak = 0

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Buffer]:
        with self.lock:
            self.held += nbytes
            self.peak = max(self.peak, self.held)
        yield from super().stream(key, byte_offset, nbytes)


def stores() -> tuple[Counted, MemoryStore]:
    return Counted(f"memory://{secrets.token_hex(8)}"), MemoryStore(f"memory://{secrets.token_hex(8)}")


def objects(store: MemoryStore, sizes: list[int]) -> list[ObjectCopy]:
    copies = []
    for number, nbytes in enumerate(sizes):
        data = secrets.token_bytes(nbytes)
        store.put(f"a/{number}", data)
        copies.append(ObjectCopy(number, f"a/{number}", f"b/{number}", nbytes, crc32c(data)))
    return copies


def run(source: Any, target: Any, copies: list[ObjectCopy], config: Config, **arguments: Any) -> list[ObjectCopy]:
    arguments = {"there": {}, "trust_sizes": False, "advance": lambda _: None, **arguments}
    widths = Widths.of([copy.nbytes for copy in copies], source.buffered_bytes, config)
    return copy_objects(source, target, copies, widths=widths, config=config, **arguments)


def test_objects_of_all_sizes():
    source, target = stores()
    copies = objects(source, [0, 1, MIB, MIB + 1, 5 * MIB, 7 * MIB + 3, 300 * KIB])
    config = Config(part_bytes=5 * MIB, read_bytes=MIB, memory_bytes=16 * MIB, num_threads=3)
    done: list[int] = []
    sent = run(source, target, copies, config, advance=done.append)
    assert {*sent} == {*copies}
    assert sum(done) == sum(copy.nbytes for copy in copies)
    for copy in copies:
        assert target.get(copy.target) == source.get(copy.source)


def test_reading_does_not_run_ahead_of_writing():
    source, target = stores()
    copies = objects(source, [8 * MIB] * 6)
    config = Config(part_bytes=5 * MIB, read_bytes=MIB, memory_bytes=16 * MIB, num_threads=3)
    real = target.open_upload

    def open_upload(key: str, nbytes_hint: int | None = None) -> Any:
        upload = real(key, nbytes_hint)
        write = upload.write

        def counted(data: Buffer) -> None:
            write(data)
            with source.lock:
                source.held -= len(data)  # type: ignore[arg-type]

        upload.write = counted
        return upload

    target.open_upload = open_upload  # type: ignore[method-assign]
    run(source, target, copies, config)
    assert source.held == 0
    assert source.peak <= 8 * MIB


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: None, "is missing"),
        (lambda data: data[:-1], "is cut off"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its CRC-32C is"),
    ],
    ids=["missing", "cut", "flipped"],
)
@pytest.mark.parametrize("nbytes", [1000, 7 * MIB])
def test_a_damaged_object_is_named_and_not_written(change: Any, what: str, nbytes: int):
    source, target = stores()
    copies = objects(source, [10, nbytes, 10])
    data = change(source.get("a/1"))
    source.delete(["a/1"])
    if data is not None:
        source.put("a/1", data)
    with pytest.raises(DamagedObjectError, match=rf"object a/1: it.*{what.removeprefix('it')}") as caught:
        run(source, target, copies, Config(part_bytes=5 * MIB, read_bytes=MIB))
    assert caught.value.number == 1
    assert "b/1" not in [found.key for found in target.list("")]


def test_an_object_that_is_gone_from_the_target_is_sent():
    source, target = stores()
    copies = objects(source, [1000])
    assert run(source, target, copies, Config(), there={"b/0": 1000}) == copies
    assert run(source, target, copies, Config(), there={"b/0": 1000}) == []


def test_a_failing_store_ends_it():
    source, target = stores()
    copies = objects(source, [1000] * 50)

    def fail(key: str, data: Buffer) -> None:
        raise StoreError("the disk is full", key=key)

    target.put = fail  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="the disk is full"):
        run(source, target, copies, Config(num_threads=2))
    assert source.counts.gets <= 10
