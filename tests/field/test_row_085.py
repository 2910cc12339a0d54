"""equinor/ert#12083: names longer than a file system allows must neither fail nor meet."""

from __future__ import annotations

import zipfile
from io import BytesIO

import msgspec
import pytest
import torch

import cloudckpt
from cloudckpt.format import keys, values
from cloudckpt.format.array_names import array_names
from tests.field.places import Place

NAMES = [
    "n" * 254,
    "n" * 256,
    "n" * 300,
    "層" * 200,
    "p" * 250 + "a",
    "p" * 250 + "b",
    "/".join(["x" * 100] * 10),
    "P" * 250 + "a",
]


def test_long_names_become_short_distinct_names():
    names = array_names([("model", name) for name in NAMES])
    assert len({name.lower() for name in names}) == len(NAMES)
    for name in names:
        assert len(name.encode()) <= 160
        key = keys.chunk_key(f"{keys.plain_root(keys.new_attempt())}/{name}", (1234567,) * 4)
        assert max(len(part) for part in key.split("/")) <= 255
        assert len(keys.check_key(key)) < 256


def test_the_true_names_stand_in_the_tree():
    state = {"model": dict.fromkeys(NAMES, 1)}
    found = values.decode(msgspec.json.decode(msgspec.json.encode(values.encode(state))))
    assert list(found["model"]) == NAMES


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("place", ["local", "juicefs", "moto-fsspec"], indirect=True)
def test_all_round_trip_with_their_true_names(place: Place, layout: str):
    long_run = "/".join(["r" * 100] * 7)
    tensors = {name: torch.full((3,), number, dtype=torch.int16) for number, name in enumerate(NAMES)}
    place.save({"model": tensors, "plain": {name: name for name in NAMES}}, long_run, layout=layout)

    target = {
        "model": {name: torch.full((3,), -1, dtype=torch.int16) for name in NAMES},
        "plain": dict.fromkeys(NAMES, ""),
    }
    place.load(target, long_run)
    for number, name in enumerate(NAMES):
        assert target["model"][name].tolist() == [number] * 3
        assert target["plain"][name] == name
    assert list(place.read(long_run)["model"]) == NAMES

    with cloudckpt.open_checkpoint(place.url(long_run), storage_options=place.options, config=place.config()) as found:
        infos = [found.arrays[name] for name in found.arrays]
        assert {info.path for info in infos} == {f"model.{name}" for name in NAMES}
        assert len({info.name.lower() for info in infos}) == len(NAMES)
        stored = [entry.key for entry in found.manifest.objects]
        if layout == "packed":
            stored += zipfile.ZipFile(BytesIO(found.store.get(stored[0]))).namelist()
    assert all(len(part.encode()) <= 255 for key in stored for part in key.split("/"))
    longest = max(len(place.url(long_run)) + 1 + len(key) for key in stored)
    assert longest < 1024
    assert layout == "packed" or longest > 900
