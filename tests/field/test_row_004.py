"""fsspec/filesystem_spec#2045: errors inside a batch's results, and ranges that come back short without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

import cloudckpt
from cloudckpt.errors import CorruptChunkError, StoreError
from tests.field.places import Place

STATE = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 10, "c": torch.arange(4.0) + 20}


class Swapped(DirFileSystem):
    """A filesystem whose positional arguments come in another order, and that gives errors back instead of raising."""

    def cat_file(self, path: str, end: int | None = None, start: int | None = None, **kwargs: Any) -> bytes:
        return bytes(super().cat_file(path, start=start, end=end, **kwargs))

    def cat_ranges(self, *args: Any, on_error: str = "return", **kwargs: Any) -> list[bytes]:
        return super().cat_ranges(*args, on_error="return", **kwargs)


def save_in_three_objects(place: Place) -> list[str]:
    place.save(STATE, config=place.config(pack_bytes=16))
    with cloudckpt.open_checkpoint(place.url(), storage_options=place.options, config=place.config()) as checkpoint:
        return [entry.key for entry in checkpoint.manifest.objects]


def targets() -> dict[str, torch.Tensor]:
    return {name: torch.full((4,), -1.0) for name in STATE}


@pytest.mark.parametrize("place", ["local", "juicefs", "juicefs-fsspec"], indirect=True)
def test_a_missing_object_in_the_middle_is_named(place: Place):
    check_missing(place)


def test_a_missing_object_of_a_filesystem_passed_in_is_named(tmp_path: Path):
    check_missing(passed_in(tmp_path))


def passed_in(folder: Path) -> Place:
    return Place("run", {"fs": Swapped(path=str(folder), fs=LocalFileSystem(), skip_instance_cache=True)})


def check_missing(place: Place) -> None:
    keys = save_in_three_objects(place)
    assert len(keys) == 3
    found = targets()
    place.load(found)
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)
    store = place.store()
    store.delete([keys[1]])
    with pytest.raises(CorruptChunkError, match="'b'") as caught:
        place.load(targets())
    assert (caught.value.array, caught.value.key) == ("b", keys[1])
    assert keys[1] in str(caught.value)
    store.close()


@pytest.mark.parametrize("place", ["local", "juicefs", "juicefs-fsspec"], indirect=True)
def test_a_short_object_is_named(place: Place):
    check_short(place)


def test_a_short_object_of_a_filesystem_passed_in_is_named(tmp_path: Path):
    check_short(passed_in(tmp_path))


def check_short(place: Place) -> None:
    keys = save_in_three_objects(place)
    store = place.store()
    whole = store.get(keys[1])
    with cloudckpt.open_checkpoint(place.url(), storage_options=place.options, config=place.config()) as checkpoint:
        start = int(checkpoint.manifest.columns.byte_offset[1])
    store.put(keys[1], whole[: start + 10])
    with pytest.raises(StoreError, match=f"ends at byte {start + 10}, not {start + 16}") as short:
        b"".join(bytes(part) for part in store.stream(keys[1], start, 16))
    assert short.value.key == keys[1]
    with pytest.raises(CorruptChunkError, match=f"'b'.*ends at byte {start + 10}") as caught:
        place.load(targets())
    assert (caught.value.array, caught.value.key, caught.value.byte_offset) == ("b", keys[1], start)
    # Padded to the old size it is caught by its checksum.
    store.put(keys[1], whole[: start + 10].ljust(len(whole), b"\0"))
    with pytest.raises(CorruptChunkError, match=r"'b'.*checksum"):
        place.load(targets())
    store.close()
