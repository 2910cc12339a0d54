"""A copy that is killed at any point leaves each step at its destination absent or whole, and is taken up again."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cloudckpt
from cloudckpt import catalog
from cloudckpt.verify import verify
from tests.recipes.kills import (
    CONFIG,
    STORE_CALLS,
    Doomed,
    Ended,
    Killer,
    Zygote,
    expected,
    kill_at_system_calls,
    value_at,
)
from tests.servers.process import S3Server

STEPS = (2, 3)


def copy_job(
    src: str, dst: str, log: str, at: int | None, how: str, options: Mapping[str, Any] | None, overwrite: bool
) -> cloudckpt.CopyReport:
    """Copy a run; killed at event ``at`` (None: never) of either store, or of the local disk."""
    from cloudckpt import _copy

    killer = Killer(log, at)
    if how == "store":
        real = _copy.resolve
        _copy.resolve = lambda *args: Doomed(real(*args), STORE_CALLS, killer, "")  # type: ignore[assignment,return-value]
    else:
        kill_at_system_calls(killer)
    return cloudckpt.copy(src, dst, dst_options=options, overwrite=overwrite, config=CONFIG)


@dataclass(frozen=True)
class Copying:
    """A run of two steps, each of several objects, and where it is copied to."""

    zygote: Zygote
    src: str
    dst: str
    options: Mapping[str, Any] | None
    log: Path
    how: str

    def run(self, at: int | None, *, overwrite: bool = False) -> Ended:
        self.log.unlink(missing_ok=True)
        call = (copy_job, self.src, self.dst, str(self.log), at, self.how, self.options, overwrite)
        return self.zygote.run([call])[0]

    def events(self) -> list[str]:
        return self.log.read_text().splitlines()

    def values(self) -> list[int | None]:
        return [value_at(f"{self.dst}/step-{step}", self.options) for step in STEPS]

    def to(self, dst: str) -> Copying:
        return Copying(self.zygote, self.src, dst, self.options, self.log, self.how)


@pytest.fixture(params=["local-system", "local-store", "juicefs-store"])
def copying(request: pytest.FixtureRequest, tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> Copying:
    monkeypatch.setattr(catalog, "WEAK_SETTLE_S", 0.001)
    src = str(tmp_path / "src")
    for step in STEPS:
        cloudckpt.save(expected(step), f"{src}/step-{step}", step=step, config=CONFIG)
    place, how = request.param.split("-")
    if place == "local":
        return Copying(zygote, src, str(tmp_path / "dst"), None, tmp_path / "events", how)
    server: S3Server = request.getfixturevalue("juicefs_s3")
    bucket = server.make_bucket(f"copies-{secrets.token_hex(4)}")
    return Copying(zygote, src, f"s3://{bucket}/dst", server.storage_options, tmp_path / "events", how)


POINTS = pytest.mark.parametrize(
    "points", ["some", pytest.param("all", marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)


def choose(points: str, copying: Copying) -> Sequence[int]:
    """All, or on a local disk the first and the last event of each kind, on S3 every second of the last ones."""
    events = copying.events()
    if points == "all":
        return range(len(events))
    first = {name: i for i, name in reversed([*enumerate(events)])}
    last = {name: i for i, name in enumerate(events)}
    if copying.options is not None:
        return sorted(last.values())[::2]
    return sorted({*last.values(), *first.values()})


@POINTS
def test_a_killed_copy_is_taken_up_again(copying: Copying, points: str):
    assert copying.run(None).raised is None
    assert copying.values() == [*STEPS]
    chosen = choose(points, copying)
    assert len(chosen) > 5
    for at in chosen:
        trial = copying.to(f"{copying.dst}-{at}")
        ended = trial.run(at)
        where = f"killed at event {at}: {trial.events()[-1:]}"
        # What runs in threads may come in another order, and the last events not at all.
        assert ended.signal == signal.SIGKILL or trial.values() == [*STEPS], where
        left = trial.values()
        assert left in ([None, None], [2, None], [2, 3]), where
        again = trial.run(None)
        assert again.raised is None, where
        assert trial.values() == [*STEPS], where
        assert again.returned.steps_present == [value for value in left if value is not None], where
        for step in STEPS:
            assert verify(f"{trial.dst}/step-{step}", storage_options=trial.options).ok, where


@pytest.mark.parametrize("copying", ["local-system", "local-store"], indirect=True)
@POINTS
def test_a_killed_overwrite_leaves_the_old_or_the_new(copying: Copying, points: str):
    def fill(dst: str) -> None:
        for step in STEPS:
            url = f"{dst}/step-{step}"
            cloudckpt.save(expected(step + 10), url, step=step, storage_options=copying.options, config=CONFIG)

    fill(copying.dst)
    assert copying.run(None, overwrite=True).raised is None
    assert copying.values() == [*STEPS]
    for at in choose(points, copying):
        trial = copying.to(f"{copying.dst}-{at}")
        fill(trial.dst)
        ended = trial.run(at, overwrite=True)
        where = f"killed at event {at}: {trial.events()[-1:]}"
        assert ended.signal == signal.SIGKILL or trial.values() == [*STEPS], where
        assert trial.values() in ([12, 13], [2, 13], [2, 3]), where
        assert trial.run(None, overwrite=True).raised is None, where
        assert trial.values() == [*STEPS], where
