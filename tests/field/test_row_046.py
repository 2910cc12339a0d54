"""awslabs/s3-connector-for-pytorch#295: a manifest published by copy and delete is lost where copy fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cloudckpt
from tests.field.places import Place
from tests.servers.faults import Answer, FaultyS3, Request, error

NAME = "my run+lr=0.1/step 1"
W = torch.arange(100.0)


class WithoutCopy(FaultyS3):
    """Copy answers NotFound though the source is there."""

    def answer(self, request: Request) -> Answer:
        return error(404, "NoSuchKey") if "x-amz-copy-source" in request.headers else super().answer(request)


@pytest.fixture
def server() -> Iterator[WithoutCopy]:
    running = WithoutCopy()
    running.start()
    yield running
    running.stop()


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_the_commit_is_one_conditional_put_of_the_final_key(server: WithoutCopy, engine: str, layout: str):
    place = Place("s3://bkt/a b+c=d", server.storage_options, engine)
    place.save({"w": W}, NAME, layout=layout)
    assert torch.equal(place.read(NAME)["w"], W)
    manifest = f"a b+c=d/{NAME}/manifest.json"
    puts = [r for r in server.requests if r.method == "PUT" and r.key == manifest]
    assert [request.headers.get("if-none-match") for request in puts] == ["*"]
    assert not any("x-amz-copy-source" in request.headers for request in server.requests)
    # It is the last thing that is written.
    writes = [r.key for r in server.requests if r.method in ("PUT", "POST", "DELETE") and "probe" not in r.key]
    assert writes[-1] == manifest
    assert all(key.startswith(f"a b+c=d/{NAME}/") for key in server.objects)


@pytest.mark.parametrize("place", ["local", "juicefs", "juicefs-fsspec", "moto", "moto-fsspec"], indirect=True)
def test_prefixes_with_odd_letters_work_everywhere(place: Place):
    commit = place.save({"w": W}, NAME)
    assert commit.url.endswith(NAME)
    target = {"w": torch.zeros(100)}
    place.load(target, NAME)
    assert torch.equal(target["w"], W)
    group = cloudckpt.open_zarr(place.url(NAME), storage_options=place.options, config=place.config())
    assert group["w"][...].tolist() == W.tolist()
    group.store.close()
