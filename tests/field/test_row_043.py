"""minio/minio#13318: a "complete" repeated after a lost reply gets NoSuchUpload though the object is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cloudckpt.config import MIB
from cloudckpt.errors import NotFoundError, StoreError
from tests.field.places import Place
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3

W = torch.arange(12 * MIB // 4, dtype=torch.int32)


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


@pytest.fixture(params=["auto", "fsspec"])
def place(request: pytest.FixtureRequest, server: FaultyS3) -> Place:
    return Place("s3://bkt/run", server.storage_options, request.param)


def test_a_save_whose_reply_to_complete_got_lost_has_succeeded(place: Place, server: FaultyS3):
    server.faults = [Fault("lost_reply", "POST", "uploadId=")]
    place.save({"w": W}, config=place.config(part_bytes=5 * MIB))
    assert server.faults[0].times == 0
    assert server.count("POST", "uploadId=") == 2
    target = {"w": torch.zeros_like(W)}
    place.load(target)
    assert torch.equal(target["w"], W)


def test_an_upload_that_really_vanished_fails_the_save(place: Place, server: FaultyS3):
    server.faults = [Fault("status", "POST", "uploadId=", status=404, code="NoSuchUpload", times=ALWAYS)]
    with pytest.raises(StoreError, match="NoSuchUpload"):
        place.save({"w": W}, config=place.config(part_bytes=5 * MIB, retry_deadline_s=2.0))
    with pytest.raises(NotFoundError):
        place.read()
    server.faults = []
    place.save({"w": W}, config=place.config(part_bytes=5 * MIB))
    assert torch.equal(place.read()["w"], W)
