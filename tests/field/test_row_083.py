"""rwth-i6/returnn#1829: a full disk gives a confusing second error, or the checkpoint before is already gone."""

from __future__ import annotations

import errno
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cloudckpt.config import MIB
from cloudckpt.errors import NotFoundError, RankError, StoreError
from tests.field.places import Place
from tests.ranks import RankPool
from tests.recipes.kills import Zygote

NUMEL = 256 * 1024
"""1 MiB of float32."""
NO_SPACE = os.strerror(errno.ENOSPC)


class Full(DirFileSystem):
    """Takes ``room`` bytes, then raises ENOSPC; or, if it ``lies``, takes the rest without storing it."""

    def __init__(self, folder: Path, *, lies: bool = False) -> None:
        super().__init__(path=str(folder), fs=LocalFileSystem(), skip_instance_cache=True)
        self.room = 10**12
        self.lies = lies

    def take(self, nbytes: int) -> int:
        taken = min(nbytes, self.room)
        self.room -= taken
        if taken < nbytes and not self.lies:
            raise OSError(errno.ENOSPC, NO_SPACE)
        return taken

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super().open(path, mode, **kwargs)
        return FullFile(self, file) if "w" in mode else file

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, bytes(value)[: self.take(len(value))], **kwargs)


class FullFile(io.RawIOBase):
    def __init__(self, filesystem: Full, file: Any) -> None:
        super().__init__()
        self._filesystem, self._file = filesystem, file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view[: self._filesystem.take(len(view))])
        return len(view)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()

    def commit(self) -> None:
        self._file.commit()

    def discard(self) -> None:
        self.close()
        self._file.discard()


def shard(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((NUMEL,), value), mesh, [Shard(0)], src_data_rank=None)}


def fill_the_disk_of_rank_1(root: str, lies: bool) -> tuple[str, str]:
    """The error of the save that did not fit; then room is made, and the same store is used again."""
    filesystem = Full(Path(root), lies=lies)
    place = Place("run", {"fs": filesystem})
    config = place.config(chunk_bytes=64 * 1024, rank_timeout_s=30.0)
    place.save(shard(1.0), "step-1", config=config)
    if dist.get_rank() == 1:
        filesystem.room = NUMEL  # a quarter of all, half of what this rank has
    try:
        place.save(shard(2.0), "step-2", config=config)
    except Exception as error:  # noqa: BLE001  # the test looks at its type too
        raised = (type(error).__name__, str(error))
    else:
        raised = ("", "")
    dist.barrier()
    found = {"w": shard(0.0)["w"]}
    place.load(found, "step-1", config=config)
    assert (found["w"].to_local() == 1.0).all()
    try:
        place.load(found, "step-2", config=config)
    except NotFoundError:
        left = place.keys("step-2")
    else:
        raise AssertionError("a checkpoint that did not fit was committed")
    assert left == [], left
    dist.barrier()
    filesystem.room = 10**12
    place.save(shard(3.0), "step-2", config=config)
    place.load(found, "step-2", config=config)
    assert (found["w"].to_local() == 3.0).all()
    return raised


@pytest.mark.parametrize("lies", [False, True])
def test_a_full_disk_of_one_rank_reaches_all(ranks: RankPool, tmp_path: Path, lies: bool):
    reason = NO_SPACE if not lies else r"bytes after"
    for name, text in ranks.run(2, fill_the_disk_of_rank_1, str(tmp_path), lies):
        assert name == RankError.__name__
        assert "rank 1" in text
        assert "rank 0" not in text
        assert reason in text
        assert "r00001-000" in text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_small_disk_that_is_really_full(small_disk: Path, layout: str):
    place = Place(str(small_disk / "run"))
    state = {"w": torch.arange(MIB, dtype=torch.float32)}
    place.save(state, "step-1", layout=layout)
    files = {path for path in small_disk.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=NO_SPACE) as caught:
        place.save({"w": state["w"] + 1}, "step-2", layout=layout)
    assert not caught.value.retryable
    assert caught.value.key is not None
    # Nothing of it is left, temporary files included.
    assert {path for path in small_disk.rglob("*") if path.is_file()} == files
    with pytest.raises(NotFoundError):
        place.read("step-2")
    assert torch.equal(place.read("step-1")["w"], state["w"])
    store = place.store("step-1")
    assert store.delete(place.keys("step-1")) == {}
    store.close()
    place.save({"w": state["w"] + 1}, "step-2", layout=layout)
    assert torch.equal(place.read("step-2")["w"], state["w"] + 1)


def test_a_disk_that_is_full_at_the_manifest(small_disk: Path, zygote: Zygote):
    """The worst moment: all data are there, and the commit does not fit."""
    place = Place(str(small_disk / "run"))
    place.save({"w": torch.ones(10)}, "step-1")
    with (small_disk / "ballast").open("wb") as file:
        # As much as fits but for one page, which the pack takes.
        while os.statvfs(small_disk).f_bavail > 2:
            file.write(bytes(4096))
            file.flush()
    with pytest.raises(StoreError, match=NO_SPACE):
        place.save({"w": torch.ones(10), "long": "x" * 20_000}, "step-2")
    assert torch.equal(place.read("step-1")["w"], torch.ones(10))
    with pytest.raises(NotFoundError):
        place.read("step-2")
    (small_disk / "ballast").unlink()
    place.save({"w": torch.ones(10), "long": "x" * 20_000}, "step-2")
    assert place.read("step-2")["long"] == "x" * 20_000
