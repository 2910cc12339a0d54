"""verify(): every fault of a checkpoint is found and named."""

import os
import random

import numpy as np
import pytest
import torch
from crc32c import crc32c

import cloudckpt
from cloudckpt import verify as module
from cloudckpt.errors import CorruptChunkError, FormatError, NotFoundError, StoreError
from cloudckpt.format.box import Box
from cloudckpt.verify import verify
from tests.servers.faults import ALWAYS, Fault, faulty_s3


def make_state():
    return {"w": torch.arange(12.0).reshape(3, 4), "b": np.arange(5, dtype=">i2"), "n": 3}


@pytest.fixture(params=["packed", "zarr"])
def url(request, tmp_path):
    cloudckpt.save(make_state(), tmp_path, step=4, layout=request.param)
    return tmp_path


def data_files(url):
    return [path for path in sorted(url.rglob("*")) if path.is_file() and path.name != "manifest.json"]


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_sound_checkpoint(url):
    report = verify(url)
    assert report.ok
    assert (report.step, report.num_chunks, report.num_objects) == (4, 2, len(data_files(url)))
    assert report.nbytes == sum(path.stat().st_size for path in data_files(url))


def test_any_flipped_bit_of_any_object_is_found(url):
    bits = random.Random(5)
    for path in data_files(url):
        key = path.relative_to(url).as_posix()
        for byte in range(path.stat().st_size):
            bit = 8 * byte + bits.randrange(8)
            flip(path, bit)
            faults = verify(url).faults
            assert [fault.key for fault in faults] == [key], (key, bit)
            flip(path, bit)
    assert verify(url).ok


def test_a_damaged_chunk_is_named(tmp_path):
    config = cloudckpt.Config(chunk_bytes=64)
    cloudckpt.save({"m": {"w": torch.arange(64.0).reshape(8, 8)}}, tmp_path, config=config)
    manifest = cloudckpt.open_checkpoint(tmp_path).manifest
    offset = int(manifest.columns.byte_offset[1])
    (pack,) = data_files(tmp_path)
    flip(pack, 8 * (offset + 3))
    (fault,) = verify(tmp_path).faults
    assert (fault.path, fault.byte_offset) == ("m.w", offset)
    assert fault.box == manifest.grids[0].box(1)
    assert fault.box != Box((0, 0), (8, 8))
    assert "CRC-32C is" in fault.what
    text = str(fault)
    assert all(part in text for part in ("'m.w'", str(fault.box), fault.key, str(offset)))


def test_the_stored_checksum_is_checked_too(tmp_path):
    cloudckpt.save({"w": torch.arange(4.0)}, tmp_path, layout="zarr")
    flip(next(tmp_path.glob("*.zarr/w/c/0")), 8 * 17)
    (fault,) = verify(tmp_path).faults
    assert "stored checksum" in fault.what
    assert fault.path == "w"


def test_a_missing_pack_names_everything_in_it(tmp_path):
    """Row 1: zarr-developers/zarr-python#486."""
    cloudckpt.save(make_state(), tmp_path)
    data_files(tmp_path)[0].unlink()
    report = verify(tmp_path)
    assert [fault.path for fault in report.faults] == ["w", "b"]
    assert {fault.what for fault in report.faults} == {"the object is missing"}


def test_missing_objects_of_the_plain_layout(tmp_path):
    cloudckpt.save(make_state(), tmp_path, layout="zarr")
    next(tmp_path.glob("*.zarr/w/c/0/0")).unlink()
    next(tmp_path.glob("*.zarr/b/zarr.json")).unlink()
    report = verify(tmp_path)
    assert sorted((fault.path or "", fault.key.split("/", 1)[1]) for fault in report.faults) == [
        ("", "b/zarr.json"),
        ("w", "w/c/0/0"),
    ]


@pytest.mark.parametrize("kept", [0, 100, 200, -1], ids=str)
def test_a_short_pack(tmp_path, kept):
    cloudckpt.save(make_state(), tmp_path)
    (pack,) = data_files(tmp_path)
    data = pack.read_bytes()
    pack.write_bytes(data[:kept])
    columns = cloudckpt.open_checkpoint(tmp_path).manifest.columns
    size = pack.stat().st_size
    lost = [path for path, end in zip(["w", "b"], columns.byte_offset + columns.nbytes, strict=True) if end > size]
    report = verify(tmp_path)
    assert [fault.path for fault in report.faults] == (lost or [None])
    assert f"cut off at byte {size}" in report.faults[0].what


def test_an_object_that_has_grown(url):
    path = data_files(url)[-1]
    path.write_bytes(path.read_bytes() + b"x")
    (fault,) = verify(url).faults
    assert "bytes, not" in fault.what


def test_all_faults_at_once(tmp_path):
    cloudckpt.save({name: torch.arange(3.0) for name in "abde"}, tmp_path, layout="zarr")
    next(tmp_path.glob("*.zarr/a/c/0")).unlink()
    flip(next(tmp_path.glob("*.zarr/b/c/0")), 5)
    short = next(tmp_path.glob("*.zarr/d/c/0"))
    short.write_bytes(short.read_bytes()[:-1])
    assert sorted(fault.path for fault in verify(tmp_path).faults) == ["a", "b", "d"]


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (404, "NoSuchKey")], ids=str)
def test_an_object_that_the_server_does_not_give(status, code):
    """Row 1: zarr-developers/zarr-python#486. Nobody gets fill values."""
    with faulty_s3() as server:
        url, options = "s3://bkt/step-00000001", server.storage_options
        state = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
        cloudckpt.save(state, url, layout="zarr", storage_options=options)
        server.faults.append(Fault("status", "GET", "a/c/0", ALWAYS, status, code))
        (fault,) = verify(url, storage_options=options).faults
        assert (fault.path, fault.box) == ("a", Box((0,), (2,)))
        assert fault.key.endswith("a/c/0")
        group = cloudckpt.open_zarr(url, storage_options=options)
        target = {"a": torch.zeros(2), "b": torch.zeros(2)}
        for use in (
            lambda: cloudckpt.read(url, storage_options=options),
            lambda: cloudckpt.load(target, url, storage_options=options),
            lambda: group["a"][...],
        ):
            with pytest.raises((StoreError, CorruptChunkError), match=r"'a'.*a/c/0"):
                use()
        group.store.close()


def test_large_objects_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    config = cloudckpt.Config(chunk_bytes=256)
    cloudckpt.save({"w": torch.arange(1024.0), "v": torch.ones(700)}, tmp_path, config=config)
    assert verify(tmp_path).ok
    (pack,) = data_files(tmp_path)
    bits = random.Random(6)
    for bit in bits.sample(range(8 * pack.stat().st_size), 40):
        flip(pack, bit)
        assert len(verify(tmp_path).faults) == 1, bit
        flip(pack, bit)
    pack.write_bytes(pack.read_bytes()[:2500])
    assert len(verify(tmp_path).faults) > 5


def test_memory_stays_within_the_budget(tmp_path, monkeypatch):
    held = []
    budget = module.ByteBudget.acquire

    def acquire(self, nbytes):
        held.append(nbytes)
        return budget(self, nbytes)

    monkeypatch.setattr(module.ByteBudget, "acquire", acquire)
    cloudckpt.save({"w": torch.zeros(3_000_000)}, tmp_path)
    assert verify(tmp_path).ok
    assert max(held) <= module.SEGMENT_BYTES


def test_progress_reaches_the_end(url):
    seen = []
    report = verify(url, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.nbytes, report.nbytes)


def test_joined_checksums():
    for first, second in ((0, 5), (7, 0), (1000, 777), (3, 2**16 + 1)):
        a, b = os.urandom(first), os.urandom(second)
        assert module._joined(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)


def test_no_checkpoint(tmp_path):
    with pytest.raises(NotFoundError):
        verify(tmp_path / "none")
    (tmp_path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(FormatError):
        verify(tmp_path)


def test_compressed_and_sharded(tmp_path, ranks):
    from tests.interop import saved

    ranks.run(4, saved.save_irregular, tmp_path, "packed", "zstd")
    report = verify(tmp_path)
    assert report.ok
    assert report.num_objects == 4
