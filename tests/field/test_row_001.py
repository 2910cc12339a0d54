"""zarr-developers/zarr-python#486: an absent chunk must not be read as the fill value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cloudckpt
from cloudckpt.errors import CloudckptError, CorruptChunkError, StoreError
from cloudckpt.verify import verify
from tests.field.places import Place
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3

W = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


def save_in_two_objects(place: Place) -> list[str]:
    commit = place.save({"w": W}, config=place.config(chunk_bytes=8, pack_bytes=8))
    assert commit.num_objects == 2
    with cloudckpt.open_checkpoint(place.url(), storage_options=place.options, config=place.config()) as checkpoint:
        return [entry.key for entry in checkpoint.manifest.objects]


def check_refused(place: Place, key: str, kind: type[CloudckptError]) -> None:
    target = {"w": torch.full((4,), 9.0)}
    with pytest.raises(kind) as caught:
        place.load(target)
    assert "'w'" in str(caught.value)
    assert key in str(caught.value)
    assert all(found in (9.0, right) for found, right in zip(target["w"].tolist(), W.tolist(), strict=True))
    with pytest.raises(kind) as caught:
        place.read()
    assert "'w'" in str(caught.value)
    assert key in str(caught.value)
    group = cloudckpt.open_zarr(place.url(), storage_options=place.options, config=place.config())
    with pytest.raises(kind, match=key):
        group["w"][...]
    group.store.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_deleted_object_is_an_error_that_names_tensor_and_object(place: Place, number: int):
    keys = save_in_two_objects(place)
    store = place.store()
    assert store.delete([keys[number]]) == {}
    check_refused(place, keys[number], CorruptChunkError)
    report = verify(place.url(), storage_options=place.options, config=place.config())
    assert not report.ok
    assert {(fault.path, fault.key) for fault in report.faults} == {("w", keys[number])}
    store.close()


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
@pytest.mark.parametrize(
    ("status", "code", "kind"), [(404, "NoSuchKey", CorruptChunkError), (403, "AccessDenied", StoreError)]
)
def test_so_is_one_that_the_store_answers_403_or_404_for(
    server: FaultyS3, engine: str, status: int, code: str, kind: type[CloudckptError]
):
    place = Place("s3://bkt/run", server.storage_options, engine)
    keys = save_in_two_objects(place)
    server.faults = [Fault("status", "GET", keys[0], times=ALWAYS, status=status, code=code)]
    check_refused(place, keys[0], kind)
