"""Copies of checkpoints and runs between stores of every kind."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import cloudckpt
from cloudckpt import catalog, leases
from cloudckpt.config import MIB, Config
from cloudckpt.errors import (
    AlreadyCommittedError,
    CorruptChunkError,
    FormatError,
    InvalidStateError,
    NotFoundError,
    StoreError,
)
from cloudckpt.format.manifest import _tail, decode_manifest
from cloudckpt.store.local import LocalStore
from cloudckpt.store.resolve import resolve
from cloudckpt.verify import verify
from tests.servers.faults import Fault, faulty_s3
from tests.servers.process import S3Server

CONFIG = Config(chunk_bytes=64 * 1024, pack_bytes=300 * 1024, retry_deadline_s=20.0)
PARTS = Config(chunk_bytes=MIB, part_bytes=5 * MIB, read_bytes=MIB, retry_deadline_s=20.0)


@dataclass(frozen=True)
class Place:
    root: str
    options: Mapping[str, Any] | None = None

    def below(self, name: str) -> Place:
        return Place(f"{self.root}/{name}", self.options)

    def sizes(self) -> dict[str, int]:
        store = resolve(self.root, self.options, CONFIG)
        try:
            return {found.key: found.nbytes for found in store.list("")}
        finally:
            store.close()

    def delete(self, *keys: str) -> None:
        store = resolve(self.root, self.options, CONFIG)
        try:
            assert store.delete(keys) == {}
        finally:
            store.close()


def state(value: int, numel: int = 100_000) -> dict[str, Any]:
    return {"w": torch.arange(numel, dtype=torch.float32) + value, "b": torch.full((3,), value), "n": value}


def save(place: Place, value: int = 1, *, numel: int = 100_000, **arguments: Any) -> Any:
    arguments = {"config": CONFIG, "step": value, **arguments}
    return cloudckpt.save(state(value, numel), place.root, storage_options=place.options, **arguments)


def copy(src: Place, dst: Place, **arguments: Any) -> cloudckpt.CopyReport:
    arguments = {"config": CONFIG, **arguments}
    return cloudckpt.copy(src.root, dst.root, src_options=src.options, dst_options=dst.options, **arguments)


def check(place: Place, value: int, numel: int = 100_000) -> None:
    found = cloudckpt.read(place.root, storage_options=place.options)
    assert torch.equal(found["w"], state(value, numel)["w"])
    assert (found["b"].tolist(), found["n"]) == ([value] * 3, value)
    assert verify(place.root, storage_options=place.options, config=CONFIG).faults == ()


@pytest.fixture
def src(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "src"))


@pytest.fixture
def dst(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "dst"))


@pytest.fixture(params=["local", "memory", "juicefs", "moto", "fsspec"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "elsewhere"))
    if request.param in ("memory", "fsspec"):
        from fsspec.implementations.dirfs import DirFileSystem
        from fsspec.implementations.local import LocalFileSystem

        if request.param == "memory":
            return Place(f"memory://{secrets.token_hex(4)}")
        return Place("there", {"fs": DirFileSystem(str(tmp_path / "fsspec"), LocalFileSystem(auto_mkdir=True))})
    server: S3Server = request.getfixturevalue(f"{request.param}_s3")
    return Place(f"s3://{server.make_bucket(f'copy-{secrets.token_hex(4)}')}/there", server.storage_options)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_there_and_back(src: Place, dst: Place, elsewhere: Place, layout: str):
    commit = save(src, layout=layout)
    report = copy(src, elsewhere)
    assert (report.steps, report.steps_present) == ([1], [])
    assert report.num_objects == commit.num_objects
    check(elsewhere, 1)
    copy(elsewhere, dst)
    check(dst, 1)
    assert dst.sizes() == src.sizes()
    assert (Path(src.root) / "manifest.json").read_bytes() == (Path(dst.root) / "manifest.json").read_bytes()


def test_objects_of_many_parts(src: Place, juicefs_s3: S3Server, dst: Place):
    save(src, numel=5_000_000, config=PARTS)
    bucket = juicefs_s3.make_bucket(f"copy-{secrets.token_hex(4)}")
    there = Place(f"s3://{bucket}/parts", juicefs_s3.storage_options)
    seen: list[tuple[int, int]] = []
    report = copy(src, there, config=PARTS, progress=lambda done, total: seen.append((done, total)))
    assert report.num_objects == 1
    assert seen[-1] == (report.nbytes, report.nbytes)
    copy(there, dst, config=PARTS)
    check(dst, 1, 5_000_000)


def test_a_run_with_all_that_lies_in_it(src: Place, dst: Place):
    for value in (3, 20, 100):
        save(src.below(f"step-{value}"), value)
    save(src.below("step-7"), 7)
    (Path(src.root) / "step-7/manifest.json").unlink()
    (Path(src.root) / "notes").mkdir()
    (Path(src.root) / "notes/x").write_text("x")
    report = copy(src, dst)
    assert report.steps == [3, 20, 100]
    run = resolve(dst.root)
    assert [(entry.step, entry.name) for entry in catalog.list_steps(run)] == [
        (value, f"step-{value}") for value in (3, 20, 100)
    ]
    assert not (Path(dst.root) / "notes").exists()
    for value in (3, 20, 100):
        check(dst.below(f"step-{value}"), value)
    save(src.below("step-200"), 200)
    again = copy(src, dst)
    assert (again.steps, again.steps_present) == ([200], [3, 20, 100])
    assert again.nbytes == sum(n for key, n in src.below("step-200").sizes().items() if key != "manifest.json")


def test_what_is_there_is_used_again(src: Place, dst: Place):
    save(src, layout="zarr")
    copy(src, dst)
    keys = [key for key in dst.sizes() if key != "manifest.json"]
    dst.delete("manifest.json", keys[0])
    (Path(dst.root) / keys[1]).write_bytes(b"short")
    damaged = Path(dst.root) / keys[2]
    damaged.write_bytes(bytes(byte ^ 1 for byte in damaged.read_bytes()))
    report = copy(src, dst)
    assert report.num_objects == 3
    assert report.nbytes_present > 0
    check(dst, 1)


def test_sizes_may_be_trusted(src: Place, dst: Place, monkeypatch: pytest.MonkeyPatch):
    save(src, layout="zarr")
    copy(src, dst)
    dst.delete("manifest.json")
    key = next(key for key in dst.sizes() if "/c/" in key)
    whole = (Path(dst.root) / key).read_bytes()
    (Path(dst.root) / key).write_bytes(bytes(len(whole)))
    report = copy(src, dst, trust_sizes=True)
    assert (report.num_objects, report.steps) == (0, [1])
    assert [fault.key for fault in verify(dst.root).faults] == [key]


def test_objects_that_a_committed_copy_lacks_are_sent(src: Place, dst: Place):
    save(src)
    copy(src, dst)
    key = next(key for key in dst.sizes() if key != "manifest.json")
    dst.delete(key)
    report = copy(src, dst)
    assert (report.steps, report.steps_present, report.num_objects) == ([], [1], 1)
    check(dst, 1)


def test_another_checkpoint_is_in_the_way(src: Place, dst: Place):
    save(src, 1)
    save(dst, 2)
    before = dst.sizes()
    with pytest.raises(AlreadyCommittedError, match=r"dst already holds another checkpoint .*overwrite=True"):
        copy(src, dst)
    assert dst.sizes() == before
    check(dst, 2)
    copy(src, dst, overwrite=True)
    check(dst, 1)


def test_a_manifest_that_cannot_be_read_is_in_the_way(src: Place, dst: Place):
    save(src)
    Path(dst.root).mkdir()
    (Path(dst.root) / "manifest.json").write_bytes(b"{")
    with pytest.raises(AlreadyCommittedError, match=r"in the way of the copy: .*dst: the manifest is damaged"):
        copy(src, dst)
    copy(src, dst, overwrite=True)
    check(dst, 1)


def test_of_a_run_nothing_is_copied_where_a_step_is_in_the_way(src: Place, dst: Place):
    for value in (1, 2):
        save(src.below(f"step-{value}"), value)
    save(dst.below("step-2"), 5, step=2)
    with pytest.raises(AlreadyCommittedError, match="step-2 already holds another"):
        copy(src, dst)
    assert not (Path(dst.root) / "step-1").exists()


def test_wrong_places(src: Place, dst: Place):
    with pytest.raises(NotFoundError, match="src is neither a checkpoint nor a run with a committed step"):
        copy(src, dst)
    save(src)
    save(dst.below("step-1"))
    with pytest.raises(InvalidStateError, match="onto itself"):
        copy(src, src)
    with pytest.raises(InvalidStateError, match="is a run: copy the checkpoint"):
        copy(src, dst)
    with pytest.raises(InvalidStateError, match=r"is a checkpoint: the run .* needs a place of its own"):
        copy(dst, src)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("config", [CONFIG, PARTS], ids=["put", "upload"])
def test_a_damaged_source_is_never_committed(src: Place, dst: Place, config: Config):
    save(src, numel=3_000_000, config=config)
    with cloudckpt.open_checkpoint(src.root) as checkpoint:
        manifest = checkpoint.manifest
    chunk = 5
    entry = manifest.objects[int(manifest.columns.object[chunk])]
    offset = int(manifest.columns.byte_offset[chunk])
    flip(Path(src.root) / entry.key, offset + 17)
    with pytest.raises(CorruptChunkError, match=r"cannot copy .*tensor 'w' .*checksum mismatch") as caught:
        copy(src, dst, config=config)
    assert (caught.value.array, caught.value.key, caught.value.byte_offset) == ("w", entry.key, offset)
    assert "manifest.json" not in dst.sizes()
    assert entry.key not in dst.sizes()
    flip(Path(src.root) / entry.key, offset + 17)
    copy(src, dst, config=config)
    check(dst, 1, 3_000_000)


def test_damage_outside_of_chunks_and_objects_that_are_gone(src: Place, dst: Place):
    save(src)
    key = next(key for key in src.sizes() if key != "manifest.json")
    path = Path(src.root) / key
    flip(path, path.stat().st_size - 1)
    with pytest.raises(FormatError, match="damage outside of the chunks"):
        copy(src, dst)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptChunkError, match="cut off at byte"):
        copy(src, dst)
    path.unlink()
    with pytest.raises(CorruptChunkError, match="the object is missing"):
        copy(src, dst)
    assert "manifest.json" not in dst.sizes()


def test_of_a_run_the_whole_steps_are_copied_before_the_error(src: Place, dst: Place):
    for value in (1, 2, 3):
        save(src.below(f"step-{value}"), value)
    key = next(key for key in src.below("step-2").sizes() if key != "manifest.json")
    flip(Path(src.root) / "step-2" / key, 200)
    with pytest.raises(CorruptChunkError, match="step-2"):
        copy(src, dst)
    check(dst.below("step-1"), 1)
    check(dst.below("step-3"), 3)
    assert not (Path(dst.root) / "step-2/manifest.json").exists()
    (Path(src.root) / "step-3/manifest.json").write_bytes(b"{")
    with pytest.raises(FormatError, match=r"2 of 3 steps could not be copied:\n.*step-2.*\n.*step-3: the manifest is"):
        copy(src, dst)


def test_fields_of_later_versions_are_kept(src: Place, dst: Place):
    save(src)
    path = Path(src.root) / "manifest.json"
    fields = msgspec.json.decode(path.read_bytes())
    del fields["sha256"]
    fields |= {"version": "1.99", "colour": [1.0, -0.0]}
    body = msgspec.json.encode(fields)[:-1]
    path.write_bytes(body + _tail(body))
    copy(src, dst)
    copied = (Path(dst.root) / "manifest.json").read_bytes()
    assert copied == path.read_bytes()
    assert decode_manifest(copied, "here").document.version == "1.99"
    check(dst, 1)


def save_steps(run: Place, *values: int) -> None:
    """Of which ``w``, in many packs, never changes, and so is written by the first alone."""
    for value in values:
        changing = {**state(0), "b": torch.full((3,), float(value)), "n": value}
        cloudckpt.save(changing, run.below(f"step-{value}").root, step=value, incremental=True, config=CONFIG)


def check_step(place: Place, value: int) -> None:
    found = cloudckpt.read(place.root, storage_options=place.options)
    assert torch.equal(found["w"], state(0)["w"])
    assert (found["b"].tolist(), found["n"]) == ([value] * 3, value)
    assert verify(place.root, storage_options=place.options, config=CONFIG).faults == ()


def referred(place: Place) -> set[str]:
    with cloudckpt.open_checkpoint(place.root, storage_options=place.options) as checkpoint:
        return {entry.key for entry in checkpoint.manifest.objects if entry.key.startswith("../")}


def test_the_copy_of_a_checkpoint_stands_by_itself(src: Place, elsewhere: Place, dst: Place):
    save_steps(src, 1, 2, 3)
    assert referred(src.below("step-3"))
    copy(src.below("step-3"), elsewhere)
    check_step(elsewhere, 3)
    assert referred(elsewhere) == set()
    copy(elsewhere, dst)
    check_step(dst, 3)
    with cloudckpt.open_checkpoint(dst.root) as copied, cloudckpt.open_checkpoint(src.below("step-3").root) as original:
        assert copied.manifest.document.commit_id == original.manifest.document.commit_id
        assert copied.manifest.nbytes_new == original.manifest.nbytes_new
    again = copy(src.below("step-3"), elsewhere)
    assert (again.steps, again.steps_present, again.num_objects) == ([], [3], 0)


def test_the_copy_of_a_run_is_as_small_as_the_run(src: Place, elsewhere: Place):
    save_steps(src, 1, 2, 3)
    # What later steps refer to comes along, also where its own step is gone.
    (Path(src.root) / "step-1/manifest.json").unlink()
    report = copy(src, elsewhere)
    assert report.steps == [2, 3]
    kept = referred(src.below("step-3"))
    assert referred(elsewhere.below("step-3")) == kept
    manifests = {f"step-{value}/manifest.json" for value in (2, 3)}
    copied = elsewhere.sizes()
    assert manifests < {*copied} == {*src.sizes()}
    assert report.nbytes == sum(nbytes for key, nbytes in copied.items() if key not in manifests)
    (Path(src.root) / "step-1").rename(Path(src.root) / "gone")
    for value in (2, 3):
        check_step(elsewhere.below(f"step-{value}"), value)
    (Path(src.root) / "gone").rename(Path(src.root) / "step-1")
    again = copy(src, elsewhere)
    assert (again.steps_present, again.nbytes) == ([2, 3], 0)


def test_references_are_taken_up_again_too(src: Place, dst: Place):
    save_steps(src, 1, 2)
    copy(src, dst)
    for value in (1, 2):
        (Path(dst.root) / f"step-{value}/manifest.json").unlink()
    wrong = next(Path(dst.root).glob("step-1/*/*.zip"))
    flip(wrong, 100)
    report = copy(src, dst)
    assert (report.steps, report.num_objects) == ([1, 2], 1)
    for value in (1, 2):
        check_step(dst.below(f"step-{value}"), value)


def test_a_copy_made_whole_replaces_one_with_references(src: Place, dst: Place):
    save_steps(src, 1, 2)
    copy(src, dst)
    assert referred(dst.below("step-2"))
    report = copy(src.below("step-2"), dst.below("step-2"))
    assert report.steps == [2]
    assert referred(dst.below("step-2")) == set()
    check_step(dst.below("step-2"), 2)


def test_a_lease_keeps_what_a_copy_into_a_run_relies_on(src: Place, dst: Place, monkeypatch: pytest.MonkeyPatch):
    save_steps(src, 1, 2)
    seen: list[Any] = []
    real = catalog.commit_bytes

    def commit(*arguments: Any, **options: Any) -> None:
        run = resolve(dst.root)
        seen.extend((lease.step_dir, lease.step_dirs) for lease in leases.live(run))
        run.close()
        real(*arguments, **options)

    monkeypatch.setattr(catalog, "commit_bytes", commit)
    copy(src, dst)
    assert seen == [("step-1", {"step-1"}), ("step-2", {"step-1", "step-2"})]
    assert not list(Path(dst.root).rglob("lease"))


def test_a_copy_that_passed_for_dead_is_not_committed(src: Place, dst: Place, monkeypatch: pytest.MonkeyPatch):
    save_steps(src, 1)
    from cloudckpt import _copy

    real = _copy.copy_objects

    def slow(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        for lease in Path(dst.root).rglob("lease"):
            lease.unlink()
        return found

    monkeypatch.setattr(_copy, "copy_objects", slow)
    with pytest.raises(StoreError, match=r"the lease .* was removed"):
        copy(src, dst)

    def swept(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        next(Path(dst.root).rglob("*.zip")).unlink()
        return found

    monkeypatch.setattr(_copy, "copy_objects", swept)
    with pytest.raises(StoreError, match=r"1 objects, such as .*zip, were removed or changed while"):
        copy(src, dst)
    assert "step-1/manifest.json" not in dst.sizes()


def test_a_step_that_is_removed_while_its_run_is_copied_is_left_out(
    src: Place, dst: Place, monkeypatch: pytest.MonkeyPatch
):
    for value in (1, 2):
        save(src.below(f"step-{value}"), value)
    from cloudckpt import _copy

    real = _copy._copy_step

    def step(*arguments: Any, **options: Any) -> None:
        (Path(src.root) / "step-2/manifest.json").unlink(missing_ok=True)
        real(*arguments, **options)

    monkeypatch.setattr(_copy, "_copy_step", step)
    assert copy(src, dst).steps == [1]


def test_a_pin_travels_with_its_checkpoint(src: Place, dst: Place):
    for value in (1, 2):
        save(src.below(f"step-{value}"), value)
    (Path(src.root) / "step-1/keep").write_text("pinned")
    copy(src, dst)
    assert (Path(dst.root) / "step-1/keep").read_text() == "pinned"
    assert not (Path(dst.root) / "step-2/keep").exists()
    (Path(src.root) / "step-2/keep").write_text("pinned")
    assert copy(src, dst).steps_present == [1, 2]
    assert (Path(dst.root) / "step-2/keep").exists()


FAULTS = [
    Fault("reset", method="GET", contains=".zip", times=2),
    Fault("status", method="GET", contains=".zip", status=503, code="SlowDown", times=2),
    Fault("cut", method="GET", contains=".zip", nbytes=100_000, times=2),
    Fault("reset_body", method="GET", contains="manifest.json", nbytes=50),
    Fault("status", method="PUT", contains="r00000", times=2),
    Fault("reset", method="PUT", contains="r00000", times=2),
    Fault("lost_reply", method="PUT", contains="r00000"),
    Fault("lost_reply", method="POST", contains="uploadId"),
    Fault("lost_reply", method="PUT", contains="manifest.json"),
    Fault("status", method="HEAD"),
]


@pytest.mark.parametrize("numel", [100_000, 3_000_000], ids=["put", "parts"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.method}-{fault.contains}")
def test_faults_on_the_wire(src: Place, dst: Place, fault: Fault, numel: int):
    save(src, numel=numel, config=PARTS)
    with faulty_s3() as server:
        there = Place(f"s3://{server.bucket}/there", server.storage_options)
        server.faults.append(replace(fault))
        assert copy(src, there, config=PARTS).steps == [1]
        check(there, 1, numel)
        server.faults.append(replace(fault))
        copy(there, dst, config=PARTS)
    check(dst, 1, numel)


def test_a_source_that_errs_once_is_told_from_damage(src: Place, dst: Place, monkeypatch: pytest.MonkeyPatch):
    save(src)
    real = LocalStore.stream
    flips = iter([4])

    def stream(store: LocalStore, key: str, byte_offset: int, nbytes: int) -> Iterator[Any]:
        for part in real(store, key, byte_offset, nbytes):
            data = bytearray(memoryview(part))  # type: ignore[arg-type]
            data[0] ^= next(flips, 0)
            yield data

    monkeypatch.setattr(LocalStore, "stream", stream)
    with pytest.raises(StoreError, match="but it is right when read again") as caught:
        copy(src, dst)
    assert caught.value.retryable
    copy(src, dst)
    check(dst, 1)


def test_a_run_that_went_back_keeps_its_order_and_its_pins(src: Place, dst: Place):
    run = cloudckpt.Checkpointer(src.root)
    run.save(100, state(1))
    run.keep(100)
    run.save(20, state(2))
    copy(src, dst)
    copied = cloudckpt.Checkpointer(dst.root, keep_last=1)
    assert copied.latest() == run.latest() == 20
    copied.save(30, state(3))
    copied.prune()
    assert copied.steps() == [30, 100]
