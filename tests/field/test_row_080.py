"""google/orbax#394: a checkpoint copied to another store is judged incomplete and cleaned up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt import Checkpointer, catalog
from cloudckpt.errors import CloudckptError, NotFoundError
from cloudckpt.verify import verify
from tests.field.places import Place
from tests.servers.process import S3Server

W = torch.arange(1000, dtype=torch.float32)


def files_below(folder: Path) -> list[str]:
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    # The manifest first: the order in which a plain copy may well go.
    return sorted(found, key=lambda name: (not name.endswith("manifest.json"), name))


def steps_at(place: Place) -> list[int]:
    run = place.store("")
    try:
        return [entry.step for entry in catalog.list_steps(run) if entry.manifest]
    finally:
        run.close()


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_local_to_s3_and_back(place: Place, juicefs_s3: S3Server, tmp_path: Path, layout: str):
    local, bucket = Place(str(tmp_path / "origin")), place.root.removeprefix("s3://").partition("/")[0]
    local.save({"w": W, "n": 7}, step=1, layout=layout, config=local.config(chunk_bytes=1000, pack_bytes=1500))
    names = files_below(tmp_path / "origin")
    assert len(names) > 3
    assert names[0] == "step-1/manifest.json"
    client = juicefs_s3.client()
    for number, name in enumerate(names):
        client.upload_file(str(tmp_path / "origin" / name), bucket, f"run/{name}")
        if number < len(names) - 1:
            # While it is on its way it is seen, but never loaded in part, and nothing of it is removed.
            with pytest.raises(CloudckptError):
                check(place)
            assert len(place.keys("")) == number + 1
    check(place)

    back = Place(str(tmp_path / "back"))
    for name in names:
        target = tmp_path / "back" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, f"run/{name}", str(target))
        os.utime(target, (1e9, 1e9))
    client.close()
    # Nothing refers to where it once was.
    (tmp_path / "origin").rename(tmp_path / "gone")
    check(back)
    with pytest.raises(NotFoundError):
        local.read()
    for name in names:
        assert str(tmp_path).encode() not in (tmp_path / "back" / name).read_bytes()
    assert files_below(tmp_path / "back") == names


@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_a_run_that_is_being_copied_is_not_tidied_up(place: Place, juicefs_s3: S3Server, tmp_path: Path):
    """Nor later: pins go along, and new times say nothing."""
    origin, bucket = tmp_path / "origin", place.root.removeprefix("s3://").partition("/")[0]
    with Checkpointer(origin, incremental=True) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": W, "trained": W * step, "n": step})
        run.keep(1)
    client = juicefs_s3.client()
    settings = {"storage_options": place.options, "config": place.config(), "keep_last": 1}
    with Checkpointer(place.root, **settings) as copied:
        names = files_below(origin)
        for number, name in enumerate(names):
            client.upload_file(str(origin / name), bucket, f"run/{name}")
            if number in (0, len(names) // 2):
                assert len(place.keys("")) == number + 1
                assert copied.latest() in (None, 1, 2, 3)
        client.close()
        assert (copied.steps(), copied.latest()) == ([1, 2, 3], 3)
        target = {"w": torch.zeros(1000), "trained": torch.zeros(1000), "n": 0}
        assert copied.load(target) == 3
        assert torch.equal(target["w"], W)
        # Now somebody asks for it. Step 3 refers to the bytes of step 1, which is pinned besides.
        assert copied.prune() == [2]
        assert copied.load(target) == 3
        assert copied.load(target, 1) == 1
        assert target["n"] == 1
        copied.release(1)
        assert copied.prune() == [1]
        assert copied.load(target) == 3
        assert torch.equal(target["w"], W)


def check(place: Place) -> None:
    assert steps_at(place) == [1]
    target = {"w": torch.zeros(1000), "n": 0}
    assert place.load(target).step == 1
    assert torch.equal(target["w"], W)
    assert target["n"] == 7
    report = verify(place.url(), storage_options=place.options, config=place.config())
    if not report.ok:
        raise CloudckptError(str(report.faults))
    with cloudckpt.open_checkpoint(place.url(), storage_options=place.options, config=place.config()) as checkpoint:
        assert all("://" not in entry.key and not entry.key.startswith("/") for entry in checkpoint.manifest.objects)
