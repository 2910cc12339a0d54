"""Removing steps and leftovers, on every store."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

import cloudckpt
from cloudckpt import catalog, leases
from cloudckpt.errors import StoreError
from cloudckpt.format.keys import PIN
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.plan.retention import KeepLast
from cloudckpt.retention import Removal, Retention, is_pinned, pin, unpin
from cloudckpt.store.local import LocalStore
from cloudckpt.store.resolve import resolve
from tests.field.places import Place

DAY_S = 86400.0


def save(place: Place, *steps: int) -> None:
    for step in steps:
        place.save({"w": torch.full((500,), float(step))}, f"step-{step:08d}", step=step)


def run_of(place: Place):
    return resolve(place.root, place.options, place.config())


def prune(place: Place, *policies, age_s: float = DAY_S, **options) -> Removal:
    run = run_of(place)
    try:
        return Retention(run, policies, orphan_age_s=age_s).run(**options)
    finally:
        run.close()


@pytest.fixture
def in_two_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of the store."""
    real = Retention._store_time_s
    monkeypatch.setattr(Retention, "_store_time_s", lambda self: real(self) + 2 * DAY_S)


def test_steps_go_whole(place: Place):
    save(place, 1, 2, 3)
    before = {key for key in place.keys("") if key.startswith("step-00000003/")}
    removal = prune(place, KeepLast(1))
    assert removal.steps == (1, 2)
    assert (removal.num_objects, removal.failed, removal.faults) == (2, {}, {})
    assert set(place.keys("")) == before
    assert torch.equal(place.read("step-00000003")["w"], torch.full((500,), 3.0))


def test_a_dry_run_removes_nothing(place: Place):
    save(place, 1, 2)
    before = place.keys("")
    removal = prune(place, KeepLast(1), dry_run=True)
    assert (removal.steps, removal.num_objects) == ((1,), 1)
    assert removal.nbytes > 2000
    assert place.keys("") == before


def test_without_policies_no_step_goes(place: Place):
    save(place, 1, 2)
    assert prune(place) == Removal()


def test_pins(place: Place):
    save(place, 1, 2, 3)
    run = run_of(place)
    pin(run, "step-00000001")
    assert is_pinned(run, "step-00000001")
    assert not is_pinned(run, "step-00000002")
    assert prune(place, KeepLast(1)).steps == (2,)
    assert unpin(run, "step-00000001") is None
    assert prune(place, KeepLast(1)).steps == (1,)
    run.close()


def test_young_leftovers_and_stray_names_stay(place: Place, monkeypatch: pytest.MonkeyPatch):
    save(place, 1)
    run = run_of(place)
    strays = [
        "step-final/0123456789ab/r00000-000.zarr.zip",
        "step-00000001/notes.txt",
        "step-00000001/evals/0123456789ab.json",
        "step-00000002/report/x",
        "notes/step-00000001/0123456789ab/x",
        "README",
    ]
    leftovers = [
        "step-00000002/0123456789ab/r00000-000.zarr.zip",
        "step-00000002/0123456789ab.zarr/w/c/0",
        "step-00000002/.cloudckpt-probe-0123456789abcdef",
        "step-00000001/0123456789ab/r00000-000.zarr.zip",
        "step-00000001/0123456789ab.sync/1/here/0",
        ".cloudckpt-clock-00/now",
    ]
    for key in strays + leftovers:
        run.put(key, b"12345")
    before = place.keys("")
    assert prune(place) == Removal()
    assert place.keys("") == before
    real = Retention._store_time_s
    monkeypatch.setattr(Retention, "_store_time_s", lambda self: real(self) + 2 * DAY_S)
    removal = prune(place)
    assert (removal.num_objects, removal.nbytes) == (len(leftovers), 5 * len(leftovers))
    assert set(place.keys("")) == set(before) - set(leftovers)
    assert torch.equal(place.read("step-00000001")["w"], torch.full((500,), 1.0))
    run.close()


def test_an_attempt_that_still_writes_is_alive(place: Place, monkeypatch: pytest.MonkeyPatch):
    run = run_of(place)
    run.put("step-00000002/0123456789ab/r00000-000.zarr.zip", b"old")
    time.sleep(1.1)  # there are stores that count in whole seconds
    run.put("step-00000002/0123456789ab/r00001-000.zarr.zip", b"new")
    times_s = sorted(info.modified_s for info in run.list(""))
    assert times_s[1] - times_s[0] >= 1
    monkeypatch.setattr(Retention, "_store_time_s", lambda self: times_s[1] + 100)
    assert prune(place, age_s=100.5) == Removal()
    assert len(place.keys("")) == 2
    assert prune(place, age_s=99.5).num_objects == 2
    run.close()


def test_what_overwriting_has_replaced_goes_by_age(place: Place, in_two_days: None):
    save(place, 1)
    place.save({"w": torch.zeros(5)}, "step-00000001", step=1, overwrite=True)
    assert len(place.keys("")) == 3
    assert prune(place).num_objects == 1
    assert torch.equal(place.read("step-00000001")["w"], torch.zeros(5))


def test_directories_that_are_being_saved_to_stay(place: Place, in_two_days: None):
    save(place, 1, 2)
    run = run_of(place)
    run.put("step-00000003/0123456789ab/r00000-000.zarr.zip", b"12345")
    busy = ["step-00000001", "step-00000003"]
    assert prune(place, KeepLast(1), busy=busy) == Removal()
    assert len(place.keys("")) == 5
    run.close()


def test_leases_of_the_dead_go_before_what_they_name(place: Place, in_two_days: None):
    save(place, 1, 2)
    run = run_of(place)
    lease = msgspec.json.encode({"format": leases.FORMAT, "step_dirs": ["step-00000001", "step-00000003"]})
    run.put("step-00000003/0123456789ab/lease", lease)
    removal = prune(place, KeepLast(1))
    assert removal.steps == (1,)
    assert directories(place) == ["step-00000002"]
    run.close()


def test_leases_of_the_living_keep_what_they_name(place: Place):
    save(place, 1, 2)
    run = run_of(place)
    lease = msgspec.json.encode({"format": leases.FORMAT, "step_dirs": ["step-00000001"]})
    run.put("step-00000003/0123456789ab/lease", lease)
    retention = Retention(run, [KeepLast(1)], orphan_age_s=DAY_S)
    removal = retention.run()
    assert (removal.steps, removal.num_objects) == ((1,), 0)
    assert directories(place) == ["step-00000001", "step-00000002", "step-00000003"]
    run.delete(["step-00000003/0123456789ab/lease"])
    assert retention.run().num_objects == 1
    assert directories(place) == ["step-00000002"]
    run.close()


def directories(place: Place) -> list[str]:
    return sorted({key.partition("/")[0] for key in place.keys("")})


def test_nothing_goes_beside_a_manifest_that_cannot_be_read(place: Place):
    save(place, 1, 2, 3)
    run = run_of(place)
    run.put("step-00000002/manifest.json", b'{"format":"cloudckpt","version":"9.0"')
    before = place.keys("")
    removal = prune(place, KeepLast(1))
    assert removal.steps == ()
    (text,) = removal.complaints()
    assert "step-00000002" in text
    assert place.keys("") == before
    # Damage behind the head shows only to those who read on.
    data = bytearray(run.get("step-00000003/manifest.json"))
    data[-100] ^= 1
    run.put("step-00000002/manifest.json", bytes(data))
    assert list(prune(place, KeepLast(2)).faults) == ["step-00000002"]
    assert set(place.keys("")) >= set(before)
    run.close()


def test_a_step_that_was_replaced_in_the_meantime_stays(place: Place, monkeypatch: pytest.MonkeyPatch):
    save(place, 1, 2)
    real = Retention._victims

    def replace_first(self, *arguments):
        place.save({"w": torch.zeros(5)}, "step-00000001", step=1, overwrite=True)
        return real(self, *arguments)

    monkeypatch.setattr(Retention, "_victims", replace_first)
    assert prune(place, KeepLast(1)).steps == ()
    assert torch.equal(place.read("step-00000001")["w"], torch.zeros(5))


def test_temporary_files_of_other_hosts(tmp_path: Path):
    run = Place(str(tmp_path))
    save(run, 1)
    left = tmp_path / "step-00000001" / ".cloudckpt-tmp-elsewhere-1.77.0123"
    left.write_bytes(b"123")
    dead = tmp_path / "step-00000002/0123456789ab/.cloudckpt-tmp-elsewhere-1.77.0123"
    dead.parent.mkdir(parents=True)
    dead.write_bytes(b"1234")
    assert prune(run) == Removal()
    for path in (left, dead):
        os.utime(path, (1e9, 1e9))
    assert (prune(run).num_objects, left.exists(), dead.exists()) == (2, False, False)


def test_heads_are_read_by_one_short_read_each(place: Place):
    save(place, 1, 2, 3)
    run = run_of(place)
    steps = catalog.find_steps(run)
    assert [saved.step for saved in steps.committed] == [3, 2, 1]
    assert run.counts.gets == 3
    assert run.counts.bytes_fetched == 3 * 512
    known = {saved.name: saved for saved in steps.committed}
    save(place, 4)
    assert [s.step for s in catalog.find_steps(run, known).committed] == [4, 3, 2, 1]
    assert run.counts.gets == 4
    run.close()


def test_manifests_are_read_once_as_long_as_they_stand(tmp_path: Path):
    run = Place(str(tmp_path))
    save(run, 1, 2, 3)
    store = run_of(run)
    retention = Retention(store, [KeepLast(2)], orphan_age_s=DAY_S)
    retention.run(sweep=False)
    save(run, 4)
    before = store.counts
    assert retention.run(sweep=False).steps == (2,)
    whole = store.counts.bytes_fetched - before.bytes_fetched
    size = (tmp_path / "step-00000004/manifest.json").stat().st_size
    # The victim's and the new step's; the rest are heads.
    assert whole < 2 * size + 20 * 512


def test_a_pin_travels_and_is_no_fault(place: Place):
    save(place, 1)
    run = run_of(place)
    pin(run, "step-00000001")
    assert f"step-00000001/{PIN}" in place.keys("")
    assert cloudckpt.open_checkpoint(place.url("step-00000001"), storage_options=place.options).step == 1
    run.close()


def test_what_a_manifest_only_claims_to_be_its_own_stays(tmp_path: Path):
    run = Place(str(tmp_path))
    save(run, 1, 2)
    (tmp_path / "step-00000002/notes.txt").write_bytes(b"mine")
    manifest = decode_manifest((tmp_path / "step-00000001/manifest.json").read_bytes(), "here")
    claimed = replace(manifest.objects[0], key="../step-00000002/notes.txt", nbytes=4)
    document = replace(manifest.document, objects=(*manifest.objects, claimed))
    (tmp_path / "step-00000001/manifest.json").write_bytes(Manifest(document).encode())
    assert prune(run, KeepLast(1)).steps == (1,)
    assert (tmp_path / "step-00000002/notes.txt").exists()
    assert not (tmp_path / "step-00000001").exists()


def test_a_step_that_comes_back_with_its_old_times_is_new(tmp_path: Path):
    """``rsync -a`` and rclone bring them along, objects first."""
    run = Place(str(tmp_path))
    save(run, 1)
    (back,) = (tmp_path / "step-00000001").rglob("*.zip")
    os.utime(back, (1e9, 1e9))
    manifest = tmp_path / "step-00000001/manifest.json"
    manifest.rename(tmp_path / "not yet")
    assert prune(run) == Removal()
    (tmp_path / "not yet").rename(manifest)
    assert torch.equal(run.read("step-00000001")["w"], torch.full((500,), 1.0))


def test_a_second_name_of_a_step_is_not_a_second_step(tmp_path: Path):
    run = Place(str(tmp_path))
    save(run, 1, 2)
    (tmp_path / "step-2").symlink_to("step-00000002")
    assert prune(run, KeepLast(1)).steps == (1,)
    assert torch.equal(run.read("step-2")["w"], torch.full((500,), 2.0))


def test_a_dry_run_tells_what_dead_leases_do_not_keep(place: Place, in_two_days: None):
    save(place, 1, 2)
    run = run_of(place)
    for step_dirs in (["step-00000001"], 1):
        lease = msgspec.json.encode({"format": leases.FORMAT, "step_dirs": step_dirs})
        run.put("step-00000003/0123456789ab/lease", lease)
        dry = prune(place, KeepLast(1), dry_run=True)
        assert (dry.steps, dry.num_objects) == ((1,), 2)
    assert prune(place, KeepLast(1)) == dry
    run.close()


def test_a_dry_run_needs_no_rights_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Place(str(tmp_path))
    save(run, 1, 2)

    def refuse(self, key, data):
        raise StoreError("read-only", key=key, retryable=False)

    monkeypatch.setattr(LocalStore, "put", refuse)
    assert prune(run, KeepLast(1), dry_run=True).steps == (1,)
    with pytest.raises(StoreError, match="read-only"):
        prune(run, KeepLast(1))
