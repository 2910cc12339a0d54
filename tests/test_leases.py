"""What is in use of a run: by committed manifests, and by saves that are running."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt import catalog, leases
from cloudckpt.errors import StoreError
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve

ATTEMPT = "0123456789ab"


@pytest.fixture
def run(tmp_path: Path) -> Store:
    frozen = torch.arange(100.0)
    for step in (1, 2):
        state = {"frozen": frozen, "w": torch.full((9,), float(step))}
        cloudckpt.save(state, tmp_path / f"step-{step:08d}", step=step, incremental=True)
    return resolve(tmp_path)


def objects_of(run: Store, step_dir: str) -> set[str]:
    return {info.key.removeprefix(f"{step_dir}/") for info in run.list(step_dir)} - {"manifest.json"}


def test_what_manifests_list_is_in_use(run: Store):
    used = leases.in_use(run)
    first, second = objects_of(run, "step-00000001"), objects_of(run, "step-00000002")
    assert used.objects == {"step-00000001": first, "step-00000002": second}
    assert used.step_dirs == frozenset()
    assert all(used.holds("step-00000001", key) for key in first)
    assert not used.holds("step-00000001", f"{ATTEMPT}/r00000-000.zarr.zip")
    run.delete(["step-00000001/manifest.json"])
    assert leases.in_use(run).objects == used.objects  # the second refers to it
    run.delete(["step-00000002/manifest.json"])
    assert leases.in_use(run).objects == {}


def test_no_manifest_is_read_twice(run: Store):
    uses: leases.Uses = {}
    leases.in_use(run, uses)
    before = run.counts.bytes_fetched
    assert leases.in_use(run, uses).objects.keys() == {"step-00000001", "step-00000002"}
    assert run.counts.bytes_fetched - before <= 4 * catalog.HEAD_BYTES
    run.delete(["step-00000002/manifest.json"])
    leases.in_use(run, uses)
    assert [step_dir for step_dir, _ in uses] == ["step-00000001"]


def test_leases_hold_whole_steps(run: Store, tmp_path: Path):
    checkpoint = resolve(tmp_path / "step-00000003")
    lease = leases.HeldLease(checkpoint, ATTEMPT)
    lease.take({"step-00000002", "step-00000001"})
    (found,) = leases.live(run)
    assert (found.step_dir, found.attempt) == ("step-00000003", ATTEMPT)
    assert found.key == f"step-00000003/{ATTEMPT}/lease"
    assert found.step_dirs == {"step-00000001", "step-00000002"}
    assert found.modified_s > 0
    used = leases.in_use(run)
    assert used.step_dirs == found.step_dirs
    assert used.holds("step-00000002", "anything")
    assert not used.holds("step-00000003", "anything")
    lease.release()
    assert leases.live(run) == ()


DEEP = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b'{"format": "other", "step_dirs": []}', b'{"step_dirs": 1}', pytest.param(DEEP, id="deep")],
)
def test_a_lease_that_cannot_be_read_holds_everything(run: Store, content: bytes):
    run.put(f"step-00000003/{ATTEMPT}/lease", content)
    assert leases.in_use(run).holds("step-00000001", "anything")


def test_so_does_one_that_belongs_to_somebody_else(run: Store, monkeypatch: pytest.MonkeyPatch):
    run.put(f"step-00000003/{ATTEMPT}/lease", b"")
    real = run.get

    def get(key: str) -> bytes:
        if key.endswith("/lease"):
            raise StoreError("not yours", key=key, retryable=retryable)
        return real(key)

    monkeypatch.setattr(run, "get", get)
    retryable = False
    assert leases.in_use(run).holds("step-00000001", "anything")
    retryable = True
    with pytest.raises(StoreError, match="not yours"):
        leases.in_use(run)


def test_leases_in_steps_on_another_disk(run: Store, tmp_path: Path):
    (tmp_path / "step-00000002").rename(tmp_path / "elsewhere")
    (tmp_path / "step-00000002").symlink_to(tmp_path / "elsewhere")
    leases.HeldLease(resolve(tmp_path / "step-00000002"), ATTEMPT).take({"step-00000001"})
    assert leases.in_use(run).step_dirs == {"step-00000001"}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"format": "cloudckpt", "version": "9.0"}', pytest.param(DEEP, id="deep")]
)
def test_a_manifest_that_cannot_be_read_holds_everything(run: Store, content: bytes):
    run.put("step-00000003/manifest.json", content)
    assert leases.in_use(run).holds("step-00000001", "anything")


def test_a_lease_that_was_removed_stops_the_commit(run: Store, tmp_path: Path):
    lease = leases.HeldLease(resolve(tmp_path / "step-00000003"), ATTEMPT)
    with lease.committing():
        pass  # nothing is relied on
    lease.take({"step-00000001"})
    run.delete([found.key for found in leases.live(run)])
    with pytest.raises(StoreError, match="passed for dead"), lease.committing():
        pytest.fail("the commit must not be tried")


def test_heads(run: Store, tmp_path: Path):
    head = catalog.read_head(run, "step-00000002")
    manifest = catalog.read_manifest(resolve(tmp_path / "step-00000002"))
    document = manifest.document
    assert (head.commit_id, head.attempt, head.step, head.branch) == (document.commit_id, document.attempt, 2, 0)
    assert head.topology == document.topology
    # Of another writer, whose fields come in another order.
    data = b'{"padding":"' + b"x" * 2000 + b'",' + manifest.encode()[1:]
    run.put("step-00000003/manifest.json", data)
    assert catalog.read_head(run, "step-00000003").commit_id == document.commit_id


@pytest.mark.parametrize("change", [b"-5", b"9" * 30, b'2,"branch":-3', b'2,"branch":' + b"9" * 19])
def test_heads_of_what_cannot_be(run: Store, change: bytes):
    data = run.get("step-00000002/manifest.json")
    run.put("step-00000002/manifest.json", data.replace(b'"step":2', b'"step":' + change, 1))
    steps = catalog.find_steps(run)
    assert [saved.step for saved in steps.committed] == [1]
    assert "impossible" in steps.faults["step-00000002"]
