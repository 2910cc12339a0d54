"""Resets, 500, 503, stalls, short bodies, answers twice or not at all: success or one clear error; whole or absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.errors import CorruptChunkError
from tests.ranks import RankPool
from tests.recipes.wire import KINDS, OTHERS, Tally, make_trial, run
from tests.servers.fault_proxy import fault_proxy
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3
from tests.servers.process import S3Server

NUM_QUICK, NUM_TRIALS = 40, 640
FIRST_OTHER, NUM_QUICK_OTHERS, NUM_OTHERS = 1000, 8, 160

Server = tuple[FaultyS3, str]


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    with faulty_s3() as server:
        yield server, server.bucket


@pytest.fixture(scope="module")
def juicefs(juicefs_s3: S3Server) -> Iterator[Server]:
    with fault_proxy(juicefs_s3) as server:
        yield server, juicefs_s3.make_bucket("wire")


@pytest.fixture(scope="module")
def moto(moto_s3: S3Server) -> Iterator[Server]:
    with fault_proxy(moto_s3) as server:
        yield server, moto_s3.make_bucket("wire")


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counted = Tally()
    yield counted
    print(f"\n{counted}")


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Callable[..., Sequence[Any]]:
    """One rank in this process, more in processes of their own, which start with the first test that needs them."""

    def run_on(num_ranks: int, function: Callable[..., Any], *args: Any) -> Sequence[Any]:
        if num_ranks == 1:
            return [function(*args)]
        ranks: RankPool = request.getfixturevalue("ranks")
        return ranks.run(num_ranks, function, *args)

    return run_on


def _trials(first: int, num_trials: int, num_quick: int) -> Iterator[Any]:
    """Three of five on the server that honours everything, the others on real ones behind a proxy."""
    for number in range(first, first + num_trials):
        name = ("own", "own", "own", "juicefs", "moto")[number % 5]
        marks = [pytest.mark.long] if number - first >= num_quick else []
        yield pytest.param(name, number, marks=marks, id=f"{name}-{number}")


@pytest.mark.parametrize(("name", "number"), [*_trials(0, NUM_TRIALS, NUM_QUICK)])
def test_whole_or_absent_on_a_bad_network(
    request: pytest.FixtureRequest, call: Callable[..., Any], tally: Tally, name: str, number: int
):
    server, bucket = request.getfixturevalue(name)
    run(make_trial(number), server, bucket, call, tally)


@pytest.mark.parametrize(("name", "number"), [*_trials(FIRST_OTHER, NUM_OTHERS, NUM_QUICK_OTHERS)])
def test_background_and_incremental_saves_on_a_bad_network(
    request: pytest.FixtureRequest, call: Callable[..., Any], tally: Tally, name: str, number: int
):
    server, bucket = request.getfixturevalue(name)
    run(make_trial(number, OTHERS), server, bucket, call, tally)


@pytest.mark.long
def test_every_kind_of_fault_was_met(tally: Tally):
    met = {name.partition(" ")[0] for name in tally.injected}
    assert met == set(KINDS)
    assert tally.outcomes.total() >= 500


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_bits_that_flip_on_the_way_are_read_again(
    own: Server, engine: str, compression: Any, caplog: pytest.LogCaptureFixture
):
    """What is stored is right: only bytes that are wrong each time they are read are held to be damaged."""
    server, bucket = own
    server.faults = []
    url, options = f"s3://{bucket}/flips-{engine}-{compression}", server.storage_options
    config = cloudckpt.Config(engine=engine, chunk_bytes=1024)
    state = {"w": torch.arange(10_000)}
    cloudckpt.save(state, url, storage_options=options, compression=compression, config=config)
    target = {"w": torch.zeros(10_000, dtype=torch.int64)}
    server.faults = [Fault("flip", "GET", "r0000", nbytes=10)]
    cloudckpt.load(target, url, storage_options=options, config=config)
    assert torch.equal(target["w"], state["w"])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "reading it again" in caplog.text
    server.faults = [Fault("flip", "GET", "r0000", nbytes=10, times=ALWAYS)]
    with pytest.raises(CorruptChunkError, match="checksum mismatch"):
        cloudckpt.load(target, url, storage_options=options, config=config)
    server.faults = []
