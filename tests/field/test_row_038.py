"""fsspec/s3fs#786: a body cut off in mid-transfer gives a raw client error, or fewer bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from cloudckpt.config import MIB
from cloudckpt.errors import StoreError
from tests.field.places import Place
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3

W = torch.arange(MIB // 4, dtype=torch.int32) + 1
PACK = ".zarr.zip"


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


@pytest.fixture(params=["auto", "fsspec"])
def place(request: pytest.FixtureRequest, server: FaultyS3) -> Place:
    there = Place("s3://bkt/run", server.storage_options, request.param)
    there.save({"w": W}, config=there.config(chunk_bytes=MIB))
    return there


@pytest.mark.parametrize("kind", ["reset_body", "cut"])
def test_once_is_mended(place: Place, server: FaultyS3, kind: str):
    server.faults = [Fault(kind, "GET", PACK, nbytes=300 * 1024)]
    target = {"w": torch.zeros_like(W)}
    report = place.load(target)
    assert torch.equal(target["w"], W)
    assert server.faults[0].times == 0
    assert report.num_requests >= 2


@pytest.mark.parametrize("kind", ["reset_body", "cut"])
def test_always_is_an_error_that_names_tensor_key_and_range(place: Place, server: FaultyS3, kind: str):
    (key,) = (key for key in place.keys() if key.endswith(PACK))  # noqa: SIM118  # a method of ours
    server.faults = [Fault(kind, "GET", PACK, nbytes=0, times=ALWAYS)]
    num_requests = len(server.requests)
    target = {"w": torch.zeros_like(W)}
    with pytest.raises(StoreError) as caught:
        place.load(target, config=place.config(retry_deadline_s=1.0, request_timeout_s=0.5))
    assert (caught.value.key, caught.value.retryable) == (key, True)
    text = str(caught.value)
    assert "'w'" in text
    assert re.search(rf"bytes \d+ to \d+ of {key}", text)
    assert len(server.requests) - num_requests < 60
    assert torch.equal(target["w"], torch.zeros_like(W))
