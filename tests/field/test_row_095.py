"""duckdb/duckdb-httpfs#377: buckets with dots and private endpoints need path-style addressing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.field.places import Place
from tests.ranks import RankPool
from tests.servers.faults import Answer, FaultyS3, Request, error

W = torch.arange(8.0)


class Private(FaultyS3):
    """An endpoint below a base path; knows its bucket by the path alone, never by the host."""

    bucket = "a.b-c"
    base = "/object/store"

    def answer(self, request: Request) -> Answer:
        if not request.target.startswith(f"{self.base}/"):
            return error(404, "NoSuchBucket")
        return super().answer(Request(request.method, request.target[len(self.base) :], request.headers, request.body))

    @property
    def storage_options(self) -> dict[str, Any]:
        return {**super().storage_options, "endpoint_url": f"{self.endpoint_url}{self.base}"}


@pytest.fixture
def server() -> Iterator[Private]:
    running = Private()
    running.start()
    yield running
    running.stop()


def save_shards(place: Place) -> list[float]:
    """Options travel to every rank; each loads what another one saved."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    place.save({"w": distribute_tensor(W, mesh, [Shard(0)], src_data_rank=None)})
    found = distribute_tensor(torch.zeros(8), mesh, [Shard(0)], src_data_rank=None)
    place.load({"w": found})
    return found.to_local().tolist()


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_a_bucket_with_dots_at_an_endpoint_with_a_base_path(server: Private, ranks: RankPool, engine: str):
    place = Place("s3://a.b-c/run", server.storage_options, engine)
    assert ranks.run(2, save_shards, place) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert torch.equal(place.read()["w"], W)
    assert all(request.target.startswith("/object/store/a.b-c/run/") for request in without_lists(server))
    # No region was named anywhere.
    found = {re.search(r"Credential=[^/]+/\d+/([^/]+)/s3/", r.headers["authorization"])[1] for r in server.requests}
    assert found == {"us-east-1"}
    written_by = {r.key.rpartition("/")[2] for r in server.requests if r.method == "PUT" and "probe" not in r.key}
    assert written_by == {"r00000-000.zarr.zip", "r00001-000.zarr.zip", "manifest.json"}


def without_lists(server: Private) -> list[Request]:
    return [request for request in server.requests if "list-type" not in request.target]


@pytest.mark.parametrize("place", ["juicefs", "juicefs-fsspec", "moto", "moto-fsspec"], indirect=True)
def test_real_servers_at_a_port_of_this_machine(place: Place, request: pytest.FixtureRequest):
    server = request.getfixturevalue("juicefs_s3" if "juicefs" in request.node.name else "moto_s3")
    bucket = server.make_bucket(f"a.b-c-{os.urandom(4).hex()}")
    dotted = Place(f"s3://{bucket}/run", place.options, place.engine)
    dotted.save({"w": W})
    assert torch.equal(dotted.read()["w"], W)


def test_the_command_line_takes_the_same_settings_from_the_environment(server: Private):
    place = Place("s3://a.b-c/run", server.storage_options)
    place.save({"w": W}, step=1, name="step-00000001")
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": server.storage_options["endpoint_url"],
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
    }
    command = [sys.executable, "-m", "cloudckpt", "show", place.url("step-00000001"), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [array["shape"] for array in shown["arrays"]] == [[8]]
