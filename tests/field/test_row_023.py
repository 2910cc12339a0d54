"""boto/botocore#3352: newer clients send checksums by default that other stores refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cloudckpt import catalog
from cloudckpt.config import MIB
from tests.field.places import Place
from tests.servers.faults import Answer, FaultyS3, Request, error


class Refusing(FaultyS3):
    """Refuses checksum headers and trailers, and aws-chunked bodies."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._refusal = error(status, "NotImplemented" if status == 501 else "InvalidArgument")

    def answer(self, request: Request) -> Answer:
        return self._refusal if self._has_checksum(request) else super().answer(request)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Refusing]:
    running = Refusing(request.param)
    running.start()
    yield running
    running.stop()


# All requests of the plain layout are among those of the packed one.
@pytest.mark.parametrize(
    ("server", "engine", "layout"),
    [
        (400, "auto", "packed"),
        (501, "auto", "packed"),
        (501, "fsspec", "packed"),
        (400, "auto", "zarr"),
        (400, "fsspec", "zarr"),
        pytest.param(400, "fsspec", "packed", marks=pytest.mark.long),
        pytest.param(501, "auto", "zarr", marks=pytest.mark.long),
        pytest.param(501, "fsspec", "zarr", marks=pytest.mark.long),
    ],
    indirect=["server"],
)
def test_save_load_and_delete_pass_without_any_setting(server: Refusing, engine: str, layout: str):
    place = Place("s3://bkt/run", server.storage_options, engine)
    state = {"small": torch.arange(4.0), "large": torch.arange(11 * MIB // 4, dtype=torch.int32)}
    config = place.config(part_bytes=5 * MIB)
    place.save(state, layout=layout, config=config)
    assert (server.count("POST", "uploadId=") > 0) is (layout == "packed")
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    place.load(found, config=config)
    assert all(torch.equal(found[name], state[name]) for name in state)
    place.save(state, layout=layout, config=config, overwrite=True)
    store = place.store()
    assert store.delete([catalog.MANIFEST, *place.keys()]) == {}
    store.close()
    assert server.objects == {}
    assert not any(server._has_checksum(request) for request in server.requests)
