"""fsspec/s3fs#532: making a "directory" tries to create the bucket, or needs the right to list."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import pytest
import torch

from cloudckpt.errors import NotFoundError
from tests.field.places import Place
from tests.servers.faults import Answer, FaultyS3, Request, error
from tests.servers.process import S3Server

W = torch.arange(4.0)


class Restricted(FaultyS3):
    """A policy with PutObject and GetObject below ``p/`` and nothing else.

    Whoever may not list gets 403 for objects that are absent:
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html.
    """

    def answer(self, request: Request) -> Answer:
        bucket, _, key = unquote(urlsplit(request.target).path).lstrip("/").partition("/")
        if bucket == self.bucket:
            is_allowed = request.method in ("PUT", "GET", "HEAD", "POST") and key.startswith("p/")
            if not is_allowed or (request.method in ("GET", "HEAD") and key not in self.objects):
                return Answer(403) if request.method == "HEAD" else error(403, "AccessDenied")
        return super().answer(request)


@pytest.fixture
def restricted() -> Iterator[Restricted]:
    server = Restricted()
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_the_rights_to_put_and_get_below_the_prefix_are_enough(restricted: Restricted, engine: str, layout: str):
    place = Place("s3://bkt/p", restricted.storage_options, engine)
    place.save({"w": W}, "x", layout=layout)
    target = {"w": torch.zeros(4)}
    place.load(target, "x")
    assert torch.equal(target["w"], W)
    place.save({"w": W + 1}, "x", layout=layout, overwrite=True)
    assert torch.equal(place.read("x")["w"], W + 1)
    assert "p/x/manifest.json" in restricted.objects
    paths = {urlsplit(request.target).path for request in restricted.requests}
    assert all(path.startswith("/bkt/p/x/") for path in paths), "neither bucket nor prefix was asked about"
    assert not any("list-type" in request.target for request in restricted.requests)


@pytest.mark.parametrize("place", ["moto", "moto-fsspec"], indirect=True)
def test_a_mistyped_bucket_is_told_and_not_made(place: Place, moto_s3: S3Server):
    client = moto_s3.client()
    before = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
    mistyped = Place("s3://field-mistyped/p", place.options, place.engine)
    with pytest.raises(NotFoundError, match="no bucket 'field-mistyped'"):
        mistyped.save({"w": W}, "x")
    with pytest.raises(NotFoundError, match="no bucket 'field-mistyped'"):
        mistyped.load({"w": torch.zeros(4)}, "x")
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == before
    client.close()
