"""huggingface/diffusers#14719: of an export that replaces another, a reader gets the new weights only."""

from __future__ import annotations

import pytest
import torch

import cloudckpt
from cloudckpt.errors import AlreadyCommittedError
from tests.field.places import Place
from tests.safetensors_reader import INDEX, SINGLE, exported

OLD = {f"layer{i}": torch.full((100,), 1.0 + i) for i in range(3)}
NEW = {"layer0": torch.full((50,), 9.0)}
THREE = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def same(found: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor]) -> bool:
    return found is not None and found.keys() == expected.keys() and all(found[k].equal(expected[k]) for k in found)


def export(place: Place, name: str, limit: int, **arguments: bool) -> cloudckpt.ExportReport:
    options = {"src_options": place.options, "dst_options": place.options, "config": place.config()}
    return cloudckpt.export_hf(place.url(name), place.url("out"), max_shard_bytes=limit, **options, **arguments)


UNRELATED = ["README.md", "adapter_model.safetensors", "sub/model.safetensors"]


@pytest.mark.parametrize("place", ["local", "juicefs"], indirect=True)
def test_a_reader_gets_the_last_export_only(place: Place):
    place.save(OLD, "old")
    place.save(NEW, "new")
    other = {key: value + 10 for key, value in OLD.items()}
    place.save(other, "other")
    export(place, "old", 400)
    store = place.store("out")
    for key in UNRELATED:
        store.put(key, b"mine")
    store.close()

    with pytest.raises(AlreadyCommittedError, match=f"holds another export: {THREE[0]}"):
        export(place, "new", 10_000)
    assert same(exported(place.url("out"), place.options), OLD)

    report = export(place, "new", 10_000, overwrite=True)  # one file instead of three
    assert report.removed == sorted([*THREE, INDEX])
    assert same(exported(place.url("out"), place.options), NEW)
    assert place.keys("out") == sorted([*UNRELATED, SINGLE])

    report = export(place, "old", 400, overwrite=True)  # three instead of one
    assert report.removed == [SINGLE]
    assert same(exported(place.url("out"), place.options), OLD)
    assert place.keys("out") == sorted([*UNRELATED, *THREE, INDEX])

    report = export(place, "other", 400, overwrite=True)  # three others of the same names
    assert report.removed == []
    assert same(exported(place.url("out"), place.options), other)
    assert place.keys("out") == sorted([*UNRELATED, *THREE, INDEX])
