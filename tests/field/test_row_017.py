"""marin-community/marin#9213: one rank's storage error reaches all ranks in seconds, and the next save works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt.errors import CloudckptError, RankError
from tests.ranks import RankPool
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3
from tests.sharding import blank, error_of, make_mesh, same_bits, shard

URL = "s3://bkt/run/step-00000003"
FULL = torch.arange(64.0).reshape(8, 8)
MOST_SECONDS = 20.0
"""Far less than ``rank_timeout_s``, which is what would pass if nobody told the others."""


@pytest.fixture
def faulty() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


@pytest.fixture
def healthy() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


def config(engine: str) -> cloudckpt.Config:
    return cloudckpt.Config(engine=engine, retry_deadline_s=1.0)


def save_twice(faulty: dict[str, Any], healthy: dict[str, Any], engine: str) -> tuple[CloudckptError | None, float]:
    state = {"w": shard(FULL, make_mesh((4,)), [Shard(0)])}
    start = time.monotonic()
    error = error_of(lambda: cloudckpt.save(state, URL, storage_options=faulty, config=config(engine)))
    seconds = time.monotonic() - start
    cloudckpt.save(state, URL, storage_options=healthy, config=config(engine))
    return error, seconds


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_a_put_that_fails_for_good(ranks: RankPool, faulty: FaultyS3, healthy: FaultyS3, engine: str):
    faulty.faults = [Fault("status", "PUT", "r00002", ALWAYS, 503, "SlowDown")]
    for error, seconds in ranks.run(4, save_twice, faulty.storage_options, healthy.storage_options, engine):
        assert isinstance(error, RankError)
        assert list(error.causes) == [2]
        assert "SlowDown" in error.causes[2]
        assert "rank 2" in str(error)
        assert "r00002" in str(error)
        assert seconds < MOST_SECONDS
    assert not any("manifest" in key for key in faulty.objects)
    found = cloudckpt.read(URL, storage_options=healthy.storage_options)
    assert torch.equal(found["w"], FULL)


def load_twice(
    faulty: dict[str, Any], healthy: dict[str, Any], engine: str
) -> tuple[CloudckptError | None, float, bool]:
    mesh = make_mesh((4,))
    target = {"w": blank(FULL, mesh, [Shard(0)]), "step": 0}
    start = time.monotonic()
    error = error_of(lambda: cloudckpt.load(target, URL, storage_options=faulty, config=config(engine)))
    seconds = time.monotonic() - start
    assert target["step"] == 0
    cloudckpt.load(target, URL, storage_options=healthy, config=config(engine))
    right = same_bits(target["w"].to_local(), shard(FULL, mesh, [Shard(0)]).to_local())
    return error, seconds, right and target["step"] == 9


def save_once(options: dict[str, Any]) -> None:
    state = {"w": shard(FULL, make_mesh((4,)), [Shard(0)]), "step": 9}
    cloudckpt.save(state, URL, storage_options=options)


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_a_read_that_fails_for_good(ranks: RankPool, faulty: FaultyS3, healthy: FaultyS3, engine: str):
    ranks.run(4, save_once, healthy.storage_options)
    faulty.objects, faulty.modified = dict(healthy.objects), dict(healthy.modified)
    faulty.faults = [Fault("status", "GET", "r00002", ALWAYS, 503, "SlowDown")]
    for error, seconds, right in ranks.run(4, load_twice, faulty.storage_options, healthy.storage_options, engine):
        assert isinstance(error, RankError)
        assert list(error.causes) == [2]
        assert "SlowDown" in error.causes[2]
        assert "'w'" in str(error)
        assert seconds < MOST_SECONDS
        assert right
