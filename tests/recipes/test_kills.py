"""A job that is killed at any point leaves the checkpoint before it whole, and its own absent or whole."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cloudckpt
from cloudckpt import catalog
from cloudckpt.config import MIB, Config
from cloudckpt.store.resolve import resolve
from tests.recipes.kills import CONFIG, Ended, Zygote, expected, save_job, value_at
from tests.servers.faults import Answer, Fault, FaultyS3, Request
from tests.servers.process import S3Server


@dataclass(frozen=True)
class Place:
    """An empty run, and a folder for the logs of events."""

    run: str
    options: Mapping[str, Any] | None
    logs: Path

    def events(self) -> list[str]:
        """Of the last trial; they end with the one that it was killed at."""
        log = self.logs / "events"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture(params=["local", "juicefs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "run"), None, tmp_path)
    server: S3Server = request.getfixturevalue("juicefs_s3")
    bucket = server.make_bucket(f"kills-{secrets.token_hex(4)}")
    return Place(f"s3://{bucket}/run", server.storage_options, tmp_path)


@pytest.fixture
def local_place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), None, tmp_path)


@pytest.fixture(autouse=True)
def no_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "WEAK_SETTLE_S", 0.001)


POINTS = pytest.mark.parametrize(
    "points", ["kinds", pytest.param("all", marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)


def first_and_last_of_each_kind(events: Sequence[str]) -> list[int]:
    first = {name: i for i, name in reversed([*enumerate(events)])}
    last = {name: i for i, name in enumerate(events)}
    return sorted({*first.values(), *last.values()})


def choose(points: str, events: Sequence[str]) -> Sequence[int]:
    return range(len(events)) if points == "all" else first_and_last_of_each_kind(events)


def save(place: Place, step: int, value: int, *, overwrite: bool = False, layout: str = "packed") -> None:
    cloudckpt.save(
        expected(value),
        f"{place.run}/step-{step}",
        step=step,
        overwrite=overwrite,
        layout=layout,
        storage_options=place.options,
        config=CONFIG,
    )


def attempt(
    zygote: Zygote,
    place: Place,
    step: int,
    value: int,
    *,
    at: int | None,
    how: str = "store",
    rank: int = 0,
    size: int = 1,
    **arguments: Any,
) -> list[Ended]:
    """A job of ``size`` ranks that saves, of which ``rank`` is killed at event ``at``."""
    log = place.logs / "events"
    common = (how, place.options, {"step": step, **arguments})
    calls = [
        (save_job, f"{place.run}/step-{step}", value, str(log if r == rank else place.logs / f"events-of-{r}"))
        + (at if r == rank else None, *common)
        for r in range(size)
    ]
    for _ in range(3):
        log.unlink(missing_ok=True)
        ended = zygote.run(calls)
        # Where the machine is busy a rank may really be late: no one was killed and nothing saved.
        if not any("not here within" in (e.raised or "") and e.signal is None for e in ended) or ended[rank].signal:
            break
    return ended


def check_saves(
    zygote: Zygote, place: Place, points: str, *, how: str, commit: str, rank: int = 0, size: int = 1, **arguments: Any
) -> int:
    """Kill new steps, each at another event; ``commit`` is the event that makes a step exist. Returns how many."""
    save(place, 1, 1)
    whole = attempt(zygote, place, 2, 2, at=None, how=how, rank=rank, size=size, **arguments)
    assert [ended.raised for ended in whole] == [None] * size
    assert value_at(f"{place.run}/step-2", place.options) == 2
    chosen = choose(points, place.events())
    for step, at in enumerate(chosen, start=3):
        ended = attempt(zygote, place, step, step, at=at, how=how, rank=rank, size=size, **arguments)
        events = place.events()
        where = f"killed at event {at}: {events[-1:]}"
        assert ended[rank].signal == signal.SIGKILL, where
        assert value_at(f"{place.run}/step-1", place.options) == 1, where
        found = value_at(f"{place.run}/step-{step}", place.options)
        if rank == 0:  # which commits
            assert found == (step if commit in events else None), where
        else:
            assert found in (None, step), where
        for survivor in (e for r, e in enumerate(ended) if r != rank):
            assert (survivor.raised or "RankError").startswith("RankError"), f"{where}: {survivor}"
            assert survivor.raised or found == step, where
        save(place, step, step + 1000, overwrite=found is not None, layout=arguments.get("layout", "packed"))
        assert value_at(f"{place.run}/step-{step}", place.options) == step + 1000, where
    store = resolve(place.run, place.options, CONFIG)
    steps = {entry.step: entry.manifest for entry in catalog.list_steps(store)}
    store.close()
    assert list(steps) == list(range(1, len(chosen) + 3))
    assert None not in steps.values()
    return len(chosen)


@POINTS
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_killed_at_a_call_of_the_store(zygote: Zygote, place: Place, points: str, layout: str):
    commit = "after put_if_absent"
    assert check_saves(zygote, place, points, how="store", commit=commit, layout=layout) >= 12


@POINTS
def test_killed_at_a_system_call(zygote: Zygote, local_place: Place, points: str):
    """Between any two of write (also half-way), fsync, link, rename, unlink and mkdir."""
    assert check_saves(zygote, local_place, points, how="system", commit="after link") >= 20


@POINTS
@pytest.mark.parametrize("how", ["store", "system"])
def test_overwriting_is_all_or_nothing(zygote: Zygote, place: Place, points: str, how: str):
    if how == "system" and place.options:
        pytest.skip("no system calls to end at: the bytes leave by a socket")
    commit = "after put" if how == "store" else "after replace"
    save(place, 1, 1)
    attempt(zygote, place, 1, 2, at=None, how=how, overwrite=True)
    whole = place.events()
    # Packs are renamed too: only the last rename is the manifest's.
    num_renames = whole.count(commit)
    current = 2
    for value, at in enumerate(choose(points, whole), start=3):
        ended = attempt(zygote, place, 1, value, at=at, how=how, overwrite=True)
        where = f"killed at event {at}: {place.events()[-1]}"
        assert ended[0].signal == signal.SIGKILL, where
        current = value if place.events().count(commit) == num_renames else current
        assert value_at(f"{place.run}/step-1", place.options) == current, where
    save(place, 1, 5000, overwrite=True)
    assert value_at(f"{place.run}/step-1", place.options) == 5000


@pytest.mark.parametrize(
    ("rank", "names"),
    [
        (0, ["after size", "after upload.write", "before upload.close", "before put_if_absent", "after put_if_absent"]),
        (1, ["before open_upload", "after upload.write", "after upload.close"]),
    ],
)
def test_one_of_two_ranks_is_killed(zygote: Zygote, local_place: Place, monkeypatch, rank: int, names: list[str]):
    monkeypatch.setattr(f"{__name__}.choose", lambda points, events: [events.index(n) for n in names if n in events])
    done = check_saves(
        zygote, local_place, "kinds", how="store", commit="after put_if_absent", rank=rank, size=2, layout="packed"
    )
    assert done >= len(names) - 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_is_killed_at_any_call(zygote: Zygote, place: Place, rank: int, layout: str):
    done = check_saves(
        zygote, place, "all", how="store", commit="after put_if_absent", rank=rank, size=2, layout=layout
    )
    assert done >= 10


class KillingS3(FaultyS3):
    """Kills its client before or after it does what request number ``at`` asks for. Only counts while ``armed``."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.at: int | None = None
        self.armed = False
        self.pids: list[int] = []
        self.started = threading.Event()

    def arm(self, at: int | None) -> None:
        self.events, self.at, self.armed = [], at, True
        self.started.clear()

    def meet(self, pids: Sequence[int]) -> None:
        self.pids = [*pids]
        self.started.set()

    def take_fault(self, request: Request) -> Fault | None:
        return Fault("reset") if self._event(f"before {_label(request)}") else super().take_fault(request)

    def answer(self, request: Request) -> Answer:
        answer = super().answer(request)
        self._event(f"after {_label(request)}")
        return answer

    def _event(self, name: str) -> bool:
        if not self.armed:
            return False
        with self.lock:
            self.events.append(name)
            if self.at != len(self.events) - 1:
                return False
        assert self.started.wait(30)
        os.kill(self.pids[0], signal.SIGKILL)
        self.armed = False
        return True


def _label(request: Request) -> str:
    name = request.key.rpartition("/")[2]
    kind = "part" if "partNumber" in request.query else "upload" if request.method == "POST" else ""
    kind = kind or ("manifest" if name == "manifest.json" else "probe" if "probe" in name else "object")
    return f"{request.method} {kind}{' end' if request.method == 'POST' and 'uploadId' in request.query else ''}"


@POINTS
@pytest.mark.parametrize("engine", ["auto", pytest.param("fsspec", marks=pytest.mark.long)])
def test_killed_at_a_request(zygote: Zygote, tmp_path: Path, points: str, engine: str):
    """Within a multipart upload too: before and after the server has done what it was asked for."""
    server, numel = KillingS3(), 3 * MIB
    arguments = {"config": Config(chunk_bytes=MIB, part_bytes=5 * MIB, retry_deadline_s=10.0, engine=engine)}
    options = server.storage_options
    server.start()
    try:
        urls = [f"s3://bkt/run/step-{step}" for step in (1, 2)]
        call = (save_job, urls[1], 2, str(tmp_path / "log"), None, "nothing", options, arguments, numel)
        cloudckpt.save(expected(1, numel), urls[0], storage_options=options, **arguments)
        server.arm(None)
        assert zygote.run([call], server.meet)[0].raised is None
        events = server.events
        assert "after PUT part" in events
        assert "after POST upload end" in events
        for at in choose(points, events):
            server.objects = {key: data for key, data in server.objects.items() if key.startswith("run/step-1/")}
            server.arm(at)
            ended = zygote.run([call], server.meet)
            where = f"killed at event {at}: {server.events}"
            assert ended[0].signal == signal.SIGKILL, where
            server.armed = False
            assert value_at(urls[0], options, numel) == 1, where
            found = value_at(urls[1], options, numel)
            assert found == (2 if "after PUT manifest" in server.events else None), where
            cloudckpt.save(
                expected(3, numel), urls[1], overwrite=found is not None, storage_options=options, **arguments
            )
            assert value_at(urls[1], options, numel) == 3, where
    finally:
        server.stop()
