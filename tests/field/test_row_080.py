"""google/orbax#394: a checkpoint copied to another store is judged incomplete and cleaned up."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt import Checkpointer, catalog
from cloudckpt.errors import CloudckptError, NotFoundError
from cloudckpt.verify import verify
from tests.field.places import Place
from tests.servers.process import S3Server, find_binary

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


Tool = Callable[[str, str, str], None]
"""Copies what a pattern matches below one place to another: folders, or ``s3://`` URLs."""


@pytest.fixture(params=["rclone", "aws"])
def tool(request: pytest.FixtureRequest, juicefs_s3: S3Server, tmp_path: Path) -> Tool:
    """The command line tools that people copy with, told of the server by their environments."""
    server = juicefs_s3
    keys = {"AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret, "AWS_DEFAULT_REGION": "us-east-1"}
    remote = {"TYPE": "s3", "PROVIDER": "Minio", "ENDPOINT": server.endpoint_url, "ENV_AUTH": "true"}
    environment = {**os.environ, **keys, **{f"RCLONE_CONFIG_S3_{name}": value for name, value in remote.items()}}
    # Servers that are not Amazon's do not know the checksums that the tool sends unasked.
    for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"):
        environment[name] = "when_required"

    def run(*command: str) -> None:
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=100)
        assert done.returncode == 0, done.stderr

    def rclone(source: str, target: str, pattern: str) -> None:
        where = (place.replace("s3://", "s3:") for place in (source, target))
        run(find_binary("rclone"), "copy", *where, "--include", pattern, "--config", str(tmp_path / "no-config"))

    def aws(source: str, target: str, pattern: str) -> None:
        program = shutil.which("aws")
        if program is None:
            pytest.skip("the AWS command line is not installed")
        only = ["--exclude", "*", "--include", pattern, "--endpoint-url", server.endpoint_url]
        run(program, "s3", "cp", "--recursive", "--only-show-errors", *only, source, target)

    return rclone if request.param == "rclone" else aws


@pytest.mark.parametrize("order", ["manifest first", "manifest last"])
@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_the_tools_that_people_copy_with(place: Place, tool: Tool, tmp_path: Path, order: str):
    local, back = Place(str(tmp_path / "origin")), Place(str(tmp_path / "back"))
    local.save({"w": W, "n": 7}, step=1, config=local.config(chunk_bytes=1000, pack_bytes=1500))
    patterns = ["*manifest.json", "*.zip"]
    for source, target in ((local, place), (place, back)):
        ordered = patterns if order == "manifest first" else patterns[::-1]
        tool(source.root, target.root, ordered[0])
        begun = target.keys("")
        assert begun
        with pytest.raises((CloudckptError, AssertionError)):
            check(target)
        assert target.keys("") == begun
        tool(source.root, target.root, ordered[1])
        check(target)
    shutil.rmtree(tmp_path / "origin")
    check(back)
    assert back.keys("") == place.keys("")


def test_cp_r(tmp_path: Path):
    local, other = Place(str(tmp_path / "origin")), Place(str(tmp_path / "other"))
    local.save({"w": W, "n": 7}, step=1, layout="zarr", config=local.config(chunk_bytes=1000))
    subprocess.run(["cp", "-r", local.root, other.root], check=True)
    shutil.rmtree(local.root)
    check(other)


@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_our_own_copy_takes_up_what_a_plain_tool_left(place: Place, juicefs_s3: S3Server, tmp_path: Path):
    """The manifest and half of the objects were copied by hand, and then the tool was killed."""
    local = Place(str(tmp_path / "origin"))
    local.save({"w": W, "n": 7}, step=1, config=local.config(chunk_bytes=1000, pack_bytes=1500))
    bucket = place.root.removeprefix("s3://").partition("/")[0]
    names = files_below(tmp_path / "origin")
    client = juicefs_s3.client()
    for name in names[: len(names) // 2]:
        client.upload_file(str(tmp_path / "origin" / name), bucket, f"run/{name}")
    client.close()
    report = cloudckpt.copy(local.root, place.root, dst_options=place.options, config=place.config())
    assert report.num_objects == len(names) - len(names) // 2
    assert report.steps_present == [1]
    check(place)


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
