"""An export that is killed at any point leaves the old one, the new one or none; never a mixture."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.errors import NotFoundError
from cloudckpt.store.resolve import resolve
from tests.recipes.kills import CONFIG, STORE_CALLS, Doomed, Ended, Killer, Zygote, kill_at_system_calls
from tests.safetensors_reader import exported
from tests.servers.process import S3Server

KEYS = ("a", "b", "c")
LIMITS = {1: 10_000, 2: 900, 3: 400}
"""By the number of files, what one may hold."""


def weights(value: int) -> dict[str, torch.Tensor]:
    return {key: torch.full((100,), float(value)) for key in KEYS}


def export_job(src: str, dst: str, log: str, at: int | None, how: str, options: Any, limit: int, files: str) -> None:
    """Export; killed at event ``at`` (None: never) of a store that is opened, or of the local disk."""
    from cloudckpt import _export_hf

    killer = Killer(log, at)
    if how == "store":
        real = _export_hf.resolve
        _export_hf.resolve = lambda *args: Doomed(real(*args), STORE_CALLS, killer, "")  # type: ignore[assignment,return-value]
    else:
        kill_at_system_calls(killer)
    cloudckpt.export_hf(
        src, dst, dst_options=options, overwrite=True, max_shard_bytes=limit, files=files, config=CONFIG
    )


@dataclass(frozen=True)
class Exporting:
    """Checkpoints of the values 1 and 2, each with a configuration, and where they are exported to."""

    zygote: Zygote
    folder: Path
    dst: str
    options: Mapping[str, Any] | None
    how: str

    def run(self, value: int, count: int, dst: str, at: int | None) -> Ended:
        log = self.folder / "events"
        log.unlink(missing_ok=True)
        config = str(self.folder / f"files-{value}")
        call = (export_job, str(self.folder / f"c{value}"), dst, str(log), at, self.how, self.options)
        return self.zygote.run([(*call, LIMITS[count], config)])[0]

    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()

    def copy(self, place: str, other: str) -> None:
        source, target = resolve(place, self.options), resolve(other, self.options)
        for found in source.list(""):
            target.put(found.key, source.get(found.key))
        source.close()
        target.close()

    def value_at(self, dst: str) -> int | None:
        """Whose weights a reader gets; they must be whole, and go with the configuration."""
        found = exported(dst, self.options)
        if found is None:
            return None
        value = int(found["a"][0])
        assert found.keys() == weights(value).keys()
        assert all(found[key].equal(tensor) for key, tensor in weights(value).items())
        store = resolve(dst, self.options)
        try:
            assert json.loads(store.get("config.json")) == {"value": value}
        except NotFoundError as error:
            raise AssertionError("weights without their configuration") from error
        finally:
            store.close()
        return value


@pytest.fixture(params=["local-store", "local-system", "juicefs-store"])
def exporting(request: pytest.FixtureRequest, tmp_path: Path, zygote: Zygote) -> Exporting:
    for value in (1, 2):
        cloudckpt.save(weights(value), tmp_path / f"c{value}", config=CONFIG)
        (tmp_path / f"files-{value}").mkdir()
        (tmp_path / f"files-{value}" / "config.json").write_text(json.dumps({"value": value}))
    place, how = request.param.split("-")
    if place == "local":
        return Exporting(zygote, tmp_path, str(tmp_path / "dst"), None, how)
    server: S3Server = request.getfixturevalue("juicefs_s3")
    bucket = server.make_bucket(f"exports-{secrets.token_hex(4)}")
    return Exporting(zygote, tmp_path, f"s3://{bucket}/dst", server.storage_options, how)


def chosen_events(events: Sequence[str], points: str) -> list[int]:
    """All; or the last of each kind, and where something has just been written or deleted."""
    if points == "all":
        return [*range(len(events))]
    last = {name: i for i, name in enumerate(events) if name.startswith("before")}
    changes = ("after put", "after delete", "after upload.close")
    return sorted({*last.values(), *(i for i, name in enumerate(events) if name in changes)})


def check(exporting: Exporting, before: int, after: int, points: str) -> None:
    first = f"{exporting.dst}-{before}-{after}"
    assert exporting.run(1, before, first, None).raised is None
    assert exporting.value_at(first) == 1
    exporting.copy(first, f"{first}-old")
    assert exporting.run(2, after, first, None).raised is None
    assert exporting.value_at(first) == 2
    chosen = chosen_events(exporting.events(), points)
    assert len(chosen) > 8
    for at in chosen:
        dst = f"{first}-{at}"
        exporting.copy(f"{first}-old", dst)
        ended = exporting.run(2, after, dst, at)
        where = f"killed at event {at}: {exporting.events()[-1:]}"
        found = exporting.value_at(dst)
        # What runs in threads may come in another order, and the last events not at all.
        assert ended.signal == signal.SIGKILL or found == 2, where
        assert found in (None, 1, 2), where
        assert exporting.run(2, after, dst, None).raised is None, where
        assert exporting.value_at(dst) == 2, where


@pytest.mark.parametrize("exporting", ["local-store"], indirect=True)
@pytest.mark.parametrize(("before", "after"), [(3, 3), (1, 3), (3, 1)])
def test_old_new_or_nothing(exporting: Exporting, before: int, after: int):
    check(exporting, before, after, "some")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_old_new_or_nothing_at_every_event(exporting: Exporting, before: int, after: int):
    check(exporting, before, after, "all" if exporting.options is None else "some")
