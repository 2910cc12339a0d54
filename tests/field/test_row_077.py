"""safetensors/safetensors#450: what the format lacks is told of at once, all of it, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import PerRank
from cloudckpt.errors import InvalidStateError
from tests.field.places import Place
from tests.safetensors_reader import exported

FINE = {"w": torch.ones(3), "c64": torch.tensor([1 + 2j, 3 - 4j])}
LACKING: dict[str, Any] = {
    "c128": torch.ones(2, dtype=torch.complex128),
    "c32": torch.ones(8, dtype=torch.uint8).view(torch.complex32),
    "bits": torch.ones(4, dtype=torch.uint8).view(torch.bits8),
    "nothing": None,
    "step": 7,
    "names": ["a", "b"],
    "rng": PerRank(1),
}


@pytest.mark.parametrize("place", ["local", "juicefs"], indirect=True)
def test_all_that_is_lacking_is_listed_and_nothing_is_written(place: Place):
    place.save({"model": FINE, "rest": LACKING})
    options = {"src_options": place.options, "dst_options": place.options, "config": place.config()}
    with pytest.raises(InvalidStateError, match="no place for 7 of 9 keys") as raised:
        cloudckpt.export_hf(place.url(), place.url("out"), **options)
    told = str(raised.value).splitlines()
    assert "include" in told[0]
    assert told[1:] == [
        "'rest.c128': complex128 [2]",
        "'rest.c32': complex32 [2]",
        "'rest.bits': bits8 [4]",
        "'rest.nothing': None",
        "'rest.step': int",
        "'rest.names': list",
        "'rest.rng': PerRank",
    ]
    assert place.keys("out") == []

    rename = [("model.{name}", "{name}")]
    cloudckpt.export_hf(place.url(), place.url("out"), include="model", rename=rename, **options)
    found = exported(place.url("out"), place.options)
    assert found is not None
    assert found.keys() == FINE.keys()
    assert all(found[key].equal(FINE[key]) for key in FINE)
    again = cloudckpt.read(place.url(), ["rest.c128", "rest.nothing"], storage_options=place.options)
    assert again["rest"]["c128"].equal(LACKING["c128"])
    assert again["rest"]["nothing"] is None
