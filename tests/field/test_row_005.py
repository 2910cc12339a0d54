"""fsspec/s3fs#851: a cached listing hides new objects, shows deleted ones, and breaks replaced ones."""

from __future__ import annotations

import pytest
import s3fs
import torch

from cloudckpt import catalog
from cloudckpt.errors import NotFoundError
from tests.field.places import Place
from tests.ranks import RankPool


def save_value(place: Place, value: float, overwrite: bool) -> str:
    return place.save({"w": torch.full((4,), value)}, overwrite=overwrite).commit_id


def delete_manifest(place: Place) -> dict[str, str]:
    store = place.store()
    try:
        return store.delete([catalog.MANIFEST])
    finally:
        store.close()


@pytest.mark.parametrize("kind", ["auto", "fsspec", "passed-in"])
@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_what_another_process_does_is_seen_at_once(place: Place, ranks: RankPool, kind: str):
    ours = Place(place.root, place.options, "auto" if kind == "passed-in" else kind)
    filesystem = None
    if kind == "passed-in":
        filesystem = s3fs.S3FileSystem(**place.options, use_listings_cache=True, skip_instance_cache=True)
        ours = Place(place.root, {"fs": filesystem})
        filesystem.pipe_file(f"{place.root}/step-1/note", b"1")
        assert len(filesystem.find(f"{place.root}/step-1")) == 1
    run = ours.store("")
    with pytest.raises(NotFoundError):
        ours.read()
    assert [entry.step for entry in catalog.list_steps(run) if entry.manifest] == []

    ranks.run(1, save_value, place, 1.0, False)
    assert ours.read()["w"].tolist() == [1.0] * 4
    assert [entry.step for entry in catalog.list_steps(run) if entry.manifest] == [1]
    target = {"w": torch.zeros(4)}
    ours.load(target)
    assert target["w"].tolist() == [1.0] * 4

    ranks.run(1, save_value, place, 2.0, True)
    ours.load(target)
    assert target["w"].tolist() == [2.0] * 4
    assert [entry.manifest.document.step for entry in catalog.list_steps(run) if entry.manifest] == [None]

    assert ranks.run(1, delete_manifest, place) == [{}]
    with pytest.raises(NotFoundError, match="never committed"):
        ours.load(target)
    assert [entry.step for entry in catalog.list_steps(run) if entry.manifest] == []
    run.close()
