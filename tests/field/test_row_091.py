"""fsspec/s3fs#500: temporary credentials expire in the middle of a long save, or between two saves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt.config import KIB, MIB, Config
from cloudckpt.errors import CloudckptError, NotFoundError, RankError, StoreError
from tests.field.places import Place
from tests.ranks import RankPool
from tests.servers.faults import Answer, FaultyS3, Request, error
from tests.sharding import error_of, make_mesh, shard

W = torch.arange(12 * MIB // 4, dtype=torch.int32)
TEXT = "[default]\naws_access_key_id = {0}\naws_secret_access_key = {0}\naws_session_token = {0}\n"


class Expiring(FaultyS3):
    """Credentials are good for ``num_good`` requests. Whoever is refused finds others in the file, if ``rotates``.

    ``only``: what counts are requests whose target contains this. ``num_good_later``: of those that follow the first.
    """

    def __init__(
        self,
        credentials: Path,
        num_good: int,
        *,
        rotates: bool = True,
        only: str = "",
        num_good_later: int | None = None,
    ) -> None:
        super().__init__()
        self.credentials, self.num_good, self.rotates, self.only = credentials, num_good, rotates, only
        self.num_good_later = num_good if num_good_later is None else num_good_later
        self.number, self.used, self.num_refused = 0, 0, 0
        self.write()

    def write(self) -> None:
        fresh = self.credentials.with_suffix(".new")
        fresh.write_text(TEXT.format(f"key{self.number}"))
        fresh.replace(self.credentials)

    def answer(self, request: Request) -> Answer:
        match = re.search(r"Credential=key(\d+)/", request.headers.get("authorization", ""))
        assert match is not None
        with self.lock:
            if int(match[1]) == self.number and self.only in request.target:
                self.used += 1
            if int(match[1]) < self.number or self.used > self.num_good:
                self.num_refused += 1
                if self.rotates and int(match[1]) == self.number:
                    self.number, self.used, self.num_good = self.number + 1, 0, self.num_good_later
                    self.write()
                return Answer(400) if request.method == "HEAD" else error(400, "ExpiredToken")
        return super().answer(request)


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return path


def started(server: Expiring) -> Iterator[Expiring]:
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(credentials: Path, request: pytest.FixtureRequest) -> Iterator[Expiring]:
    yield from started(Expiring(credentials, **request.param))


@pytest.fixture(params=["auto", "fsspec"])
def place(request: pytest.FixtureRequest, server: Expiring) -> Place:
    return Place("s3://bkt/run", {"endpoint_url": server.endpoint_url}, request.param)


@pytest.mark.parametrize("server", [{"num_good": 5}], indirect=True, ids=["every-5"])
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_credentials_that_last_five_requests(place: Place, server: Expiring, layout: str):
    config = place.config(chunk_bytes=256 * KIB, pack_bytes=600 * KIB)
    state = {"w": W[:300_000]}
    for name in ("step-1", "step-2"):
        place.save(state, name, layout=layout, config=config)
        target = {"w": torch.zeros_like(state["w"])}
        place.load(target, name, config=config)
        assert torch.equal(target["w"], state["w"])
    assert server.number >= 3, "they expired again and again"


@pytest.mark.parametrize(
    "server", [{"num_good": 1, "num_good_later": 100, "only": "partNumber"}], indirect=True, ids=["parts"]
)
def test_credentials_that_expire_between_the_parts_of_an_upload(place: Place, server: Expiring):
    progress: list[tuple[int, int]] = []
    place.save(
        {"w": W}, config=place.config(part_bytes=5 * MIB), progress=lambda done, total: progress.append((done, total))
    )
    assert server.number == 1
    assert progress[-1] == (W.nbytes, W.nbytes)
    assert all(done <= total for done, total in progress), "what is sent again does not count twice"
    target = {"w": torch.zeros_like(W)}
    place.load(target)
    assert torch.equal(target["w"], W)


@pytest.mark.parametrize("server", [{"num_good": 5, "rotates": False}], indirect=True, ids=["for-good"])
def test_credentials_that_stay_expired_are_tried_once(place: Place, server: Expiring):
    with pytest.raises(StoreError) as caught:
        place.save({"w": W}, config=place.config(part_bytes=5 * MIB))
    assert "ExpiredToken" in str(caught.value) or "400" in str(caught.value)
    assert not caught.value.retryable
    # One for each of the parts in flight, two that would undo what was sent; not one again and again.
    assert server.num_refused <= 8
    assert not any(key.endswith("manifest.json") for key in server.objects)
    server.num_good = 10**9
    with pytest.raises(NotFoundError):
        place.read()
    place.save({"w": W})
    assert torch.equal(place.read()["w"], W)


def save_on_ranks(endpoint_url: str, credentials: str) -> CloudckptError | None:
    os.environ["AWS_SHARED_CREDENTIALS_FILE"] = credentials
    state: dict[str, Any] = {"w": shard(W, make_mesh((2,)), [Shard(0)])}
    options = {"endpoint_url": endpoint_url}
    return error_of(
        lambda: cloudckpt.save(state, "s3://bkt/run/ranks", storage_options=options, config=Config(chunk_bytes=MIB))
    )


@pytest.mark.parametrize("rotates", [True, False])
def test_all_ranks_go_on_or_raise(ranks: RankPool, credentials: Path, rotates: bool):
    for server in started(Expiring(credentials, 3, rotates=rotates)):
        errors = ranks.run(2, save_on_ranks, server.endpoint_url, str(credentials))
        if rotates:
            assert errors == [None, None]
            assert server.number >= 1
        else:
            assert all(isinstance(found, (StoreError, RankError)) for found in errors)
        assert ("run/ranks/manifest.json" in server.objects) == rotates
