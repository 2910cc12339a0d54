"""pytorch/pytorch#183878: durability that assumes a file of the operating system, or that forgets client buffers."""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from cloudckpt.errors import NotFoundError, StoreError
from tests.field.places import Place

W = torch.arange(25, dtype=torch.int32)
"""100 bytes: less than any client's block."""


@pytest.mark.parametrize("place", ["juicefs", "juicefs-fsspec", "moto"], indirect=True)
def test_on_s3_nothing_is_left_in_a_buffer_and_no_fsync_is_tried(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fsync", no_fsync)
    place.save({"w": W})
    # Another client sees it all, at once.
    assert torch.equal(place.read()["w"], W)


def test_nor_in_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fsync", no_fsync)
    place = Place(f"memory://durable-{uuid.uuid4().hex}")
    place.save({"w": W})
    assert torch.equal(place.read()["w"], W)


def no_fsync(descriptor: int) -> None:
    raise AssertionError("fsync of a handle that is no file")


class RemoteFile(io.BytesIO):
    """Keeps everything in its own buffer until it is closed; has no descriptor."""

    def __init__(self, filesystem: Remote, path: str) -> None:
        super().__init__()
        self._filesystem, self._path = filesystem, path

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        self._filesystem.events.append(f"close {self._path.rpartition('/')[2]}")
        if self._filesystem.fails_on_close:
            raise OSError(5, "lost while flushing")
        self._filesystem.pipe_file(self._path, data)


class Remote(DirFileSystem):
    """Like a client library whose write handles are buffers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(path=str(folder), fs=LocalFileSystem(), skip_instance_cache=True)
        self.events: list[str] = []
        self.fails_on_close = False

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return RemoteFile(self, path) if "w" in mode else super().open(path, mode, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self.events.append(f"put {path.rpartition('/')[2]}")
        super().pipe_file(path, value, **kwargs)


def test_handles_are_closed_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    filesystem = Remote(tmp_path)
    place = Place("run", {"fs": filesystem})
    place.save({"w": W})
    pack = "r00000-000.zarr.zip"
    assert filesystem.events == [f"close {pack}", f"put {pack}", "put manifest.json"]
    assert torch.equal(place.read()["w"], W)


def test_an_error_on_close_fails_the_save(tmp_path: Path):
    filesystem = Remote(tmp_path)
    place = Place("run", {"fs": filesystem})
    filesystem.fails_on_close = True
    with pytest.raises(StoreError, match="lost while flushing"):
        place.save({"w": W})
    with pytest.raises(NotFoundError):
        place.read()
    filesystem.fails_on_close = False
    place.save({"w": W})
    assert torch.equal(place.read()["w"], W)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_local_files_and_folders_are_synced_before_the_commit_and_the_manifest_after_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, layout: str
):
    synced: list[str] = []
    published: list[tuple[str, list[str]]] = []
    real_fsync, real_replace, real_link = os.fsync, Path.replace, os.link

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def replace(self: Path, target: Path) -> Path:
        published.append((str(target), [*synced]))
        assert str(self) in synced
        return real_replace(self, target)

    def link(source: Path, target: Path) -> None:
        published.append((str(target), [*synced]))
        assert str(source) in synced
        real_link(source, target)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("pathlib.Path.replace", replace)
    monkeypatch.setattr("os.link", link)
    place.save({"w": W}, layout=layout)
    *objects, (last, before) = published
    assert last == f"{place.url()}/manifest.json"
    assert len(objects) == len(place.keys()) - 1
    for path, _ in objects:
        # The entry of every file and of every new folder is durable too.
        folder = Path(path).parent
        while str(folder) != str(Path(place.root).parent):
            assert str(folder) in before
            folder = folder.parent
    assert synced[-1] == place.url()
