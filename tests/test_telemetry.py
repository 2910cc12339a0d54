"""What saves and loads tell of themselves: stage times, one line per rank, spans and metrics."""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt import telemetry
from cloudckpt.errors import CorruptChunkError, StoreError
from cloudckpt.telemetry import Recorder, slowest
from tests.ranks import RankPool
from tests.servers.faults import ALWAYS, Fault, faulty_s3
from tests.sharding import make_mesh, shard

STATE = {"w": torch.arange(100_000), "step": 7}


class Collected:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])

    def spans(self) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found

    def points(self) -> dict[tuple[str, str], Any]:
        """By name of the metric, and the values of the attributes."""
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            (metric.name, *point.attributes.values()): point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """OpenTelemetry with providers of this test's own, instead of those of the process, which are set up once."""
    found = Collected()
    monkeypatch.setattr(trace, "get_tracer", found.tracers.get_tracer)
    monkeypatch.setattr(metrics, "get_meter", found.meters.get_meter)
    telemetry._instruments.cache_clear()
    yield found
    telemetry._instruments.cache_clear()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "cloudckpt"]


def stages_in(line: str) -> list[str]:
    return re.findall(r"(\w+) \d+\.\d{3} s[,;]", line)


def test_a_stage_within_another_one_is_no_part_of_it():
    recorder = Recorder("save", "url", 0, 1)
    with recorder.stage("wait"):
        with recorder.stage("upload"), recorder.stage("commit"):
            pass
        with recorder.stage("upload"):
            pass
    record = recorder.finished(None)
    assert [stage.name for stage in record.stages] == ["wait", "upload", "commit", "upload", "wait", "upload", "wait"]
    assert list(record.seconds) == ["wait", "upload", "commit"]
    times = [(stage.start_ns, stage.end_ns) for stage in record.stages]
    assert all(end <= later for (_, end), (later, _) in itertools.pairwise(times))
    assert sum(record.seconds.values()) <= (record.end_ns - record.start_ns) / 1e9


def test_the_slowest_rank_of_each_stage_counts():
    assert slowest([{"upload": 1.0, "wait": 3.0}, {"upload": 2.0, "wait": 1.0}, {"commit": 4.0}]) == {
        "upload": 2.0,
        "wait": 3.0,
        "commit": 4.0,
    }


def test_one_line_for_a_save_and_one_for_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "cloudckpt")
    commit = cloudckpt.save(STATE, tmp_path / "x", step=7)
    assert list(commit.seconds) == ["wait", "describe", "upload", "commit"]
    assert all(value >= 0 for value in commit.seconds.values())
    report = cloudckpt.load({"w": torch.zeros(100_000, dtype=torch.int64), "step": 0}, tmp_path / "x")
    assert list(report.seconds) == ["manifest", "compare", "plan", "read"]
    saved, loaded = lines(caplog)
    assert saved.startswith(f"saved {tmp_path}/x step 7, rank 0 of 1: 0.8 MB in ")
    assert stages_in(saved) == [*commit.seconds]
    assert saved.endswith("requests, 0 retries")
    assert loaded.startswith(f"loaded {tmp_path}/x step 7, rank 0 of 1: 0.8 MB in ")
    assert stages_in(loaded) == [*report.seconds, "finish"]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_background_save_tells_of_its_copy(
    tmp_path: Path, executor: Any, caplog: pytest.LogCaptureFixture, collected: Collected
):
    caplog.set_level(logging.INFO, "cloudckpt")
    commit = cloudckpt.async_save(STATE, tmp_path / "x", step=7, executor=executor).result()
    assert set(commit.seconds) == {"wait", "describe", "stage", "upload", "commit"}
    (line,) = lines(caplog)
    assert line.startswith(f"saved {tmp_path}/x step 7, rank 0 of 1")
    assert stages_in(line) == [*commit.seconds]
    # Also those of the helper are emitted by this process, whose OpenTelemetry it is that was set up.
    assert len(collected.spans()["cloudckpt.save"]) == 1


def test_spans_and_metrics(tmp_path: Path, collected: Collected):
    with collected.tracers.get_tracer("training").start_as_current_span("step") as outer:
        cloudckpt.save(STATE, tmp_path / "x", step=7)
    cloudckpt.load({"w": torch.zeros(100_000, dtype=torch.int64), "step": 0}, tmp_path / "x")
    spans = collected.spans()
    (save,), (load,) = spans["cloudckpt.save"], spans["cloudckpt.load"]
    assert save.parent is not None
    assert save.parent.span_id == outer.get_span_context().span_id
    assert dict(save.attributes) == {
        "cloudckpt.url": str(tmp_path / "x"),
        "cloudckpt.rank": 0,
        "cloudckpt.world_size": 1,
        "cloudckpt.step": 7,
        "cloudckpt.bytes": save.attributes["cloudckpt.bytes"],
        "cloudckpt.requests": save.attributes["cloudckpt.requests"],
        "cloudckpt.retries": 0,
    }
    assert save.attributes["cloudckpt.bytes"] > 800_000
    (upload,) = spans["cloudckpt.save.upload"]
    assert upload.parent.span_id == save.get_span_context().span_id
    assert save.start_time <= upload.start_time <= upload.end_time <= save.end_time
    assert spans["cloudckpt.load.read"][0].parent.span_id == load.get_span_context().span_id
    points = collected.points()
    assert points["cloudckpt.operation.duration", "save", "success"].count == 1
    assert points["cloudckpt.operation.duration", "load", "success"].count == 1
    assert points["cloudckpt.stage.duration", "save", "commit"].count == 1
    assert points["cloudckpt.bytes", "save"].value == save.attributes["cloudckpt.bytes"]
    assert points["cloudckpt.requests", "load"].value == load.attributes["cloudckpt.requests"]


def test_what_failed_is_told_too(tmp_path: Path, collected: Collected, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "cloudckpt")
    cloudckpt.save(STATE, tmp_path / "x")
    (pack,) = (tmp_path / "x").glob("*/*.zip")
    pack.write_bytes(b"\0" * pack.stat().st_size)
    with pytest.raises(CorruptChunkError):
        cloudckpt.load({"w": torch.zeros(100_000, dtype=torch.int64), "step": 0}, tmp_path / "x")
    assert lines(caplog)[-1].startswith(f"load failed: {tmp_path}/x, rank 0 of 1")
    assert "CorruptChunkError" in lines(caplog)[-1]
    (load,) = collected.spans()["cloudckpt.load"]
    assert load.status.status_code is trace.StatusCode.ERROR
    assert "CorruptChunkError" in load.status.description
    assert collected.points()["cloudckpt.operation.duration", "load", "error"].count == 1


def test_without_opentelemetry_there_are_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    telemetry._instruments.cache_clear()
    caplog.set_level(logging.INFO, "cloudckpt")
    cloudckpt.save(STATE, tmp_path / "x")
    assert len(lines(caplog)) == 1
    telemetry._instruments.cache_clear()


def test_no_secrets_and_the_retries(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "cloudckpt")
    with faulty_s3() as server:
        config = cloudckpt.Config(retry_deadline_s=30.0)
        server.faults = [Fault("status", "PUT", "manifest", status=503, code="SlowDown", times=2)]
        cloudckpt.save(STATE, "s3://bkt/run", storage_options=server.storage_options, config=config)
        assert lines(caplog)[-1].endswith(", 2 retries")
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        server.faults = [Fault("status", "PUT", "manifest", status=503, code="SlowDown", times=ALWAYS)]
        hasty = cloudckpt.Config(retry_deadline_s=8.0)
        with pytest.raises(StoreError):
            cloudckpt.save(STATE, "s3://bkt/other", storage_options=server.storage_options, config=hasty)
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1, "a request that fails again and again is told of once"
    assert "try 5 failed" in warned[0]
    assert "SlowDown" in warned[0]
    assert "test-secret" not in caplog.text


def save_on_ranks(url: str) -> tuple[dict[str, float], list[str]]:
    told: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    log, handler = logging.getLogger("cloudckpt"), Collect()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        state = {"w": shard(torch.arange(100_000), make_mesh((2,)), [Shard(0)])}
        commit = cloudckpt.save(state, url, step=3)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return commit.seconds, told


def test_each_rank_has_its_line_and_all_know_the_slowest(ranks: RankPool, tmp_path: Path):
    outcomes = ranks.run(2, save_on_ranks, str(tmp_path / "x"))
    assert outcomes[0][0] == outcomes[1][0]
    assert set(outcomes[0][0]) == {"wait", "describe", "upload", "commit"}
    for rank, (_, told) in enumerate(outcomes):
        (line,) = [text for text in told if text.startswith("saved")]
        assert f"step 3, rank {rank} of 2: 0.4 MB in " in line
        assert ("commit" in line) == (rank == 0)
