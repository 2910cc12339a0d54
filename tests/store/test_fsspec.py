"""FsspecStore over filesystems that have no store of their own."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from cloudckpt.errors import CloudckptError, NotFoundError, StoreError
from cloudckpt.store.base import Store
from cloudckpt.store.fsspec import FsspecStore
from cloudckpt.store.fsspec_errors import translated
from cloudckpt.store.resolve import resolve
from tests.store.conformance import StoreConformance, read


class TestFilesBehindFsspec(StoreConformance):
    honours_conditions = False

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: resolve("a run/50%", {"fs": DirFileSystem(str(tmp_path), LocalFileSystem())})


class ShortReads(LocalFileSystem):
    """A batched or cached read may come back short without an error (fsspec/filesystem_spec#2045)."""

    protocol = "short-reads"

    def cat_file(self, path, start=None, end=None, **kwargs):
        return super().cat_file(path, start=start, end=end)[:1000]


def test_short_reads_are_continued_and_lengths_checked(tmp_path: Path):
    (tmp_path / "key").write_bytes(bytes(range(250)) * 20)
    store = FsspecStore(str(tmp_path), ShortReads(skip_instance_cache=True))
    assert read(store, "key", 10, 4500) == (bytes(range(250)) * 20)[10:4510]
    with pytest.raises(StoreError, match="ends at byte 5000"):
        read(store, "key", 10, 5000)


class AnsweredError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.status = status


class UnreachableError(Exception):
    pass


@pytest.mark.parametrize(
    ("raised", "kind", "retryable"),
    [
        (FileNotFoundError("x"), NotFoundError, None),
        (IsADirectoryError("x"), NotFoundError, None),
        (PermissionError(errno.EACCES, "x"), StoreError, False),
        (OSError(errno.ENOSPC, "x"), StoreError, False),
        (OSError(errno.EDQUOT, "x"), StoreError, False),
        (OSError(errno.ECONNRESET, "x"), StoreError, True),
        (ConnectionResetError("x"), StoreError, True),
        (TimeoutError("x"), StoreError, True),
        (UnreachableError("x"), StoreError, True),
        (AnsweredError(503), StoreError, True),
        (AnsweredError(429), StoreError, True),
        (AnsweredError(403), StoreError, False),
        (AnsweredError(501), StoreError, False),
        (ValueError("x"), StoreError, False),
        (NotImplementedError(), StoreError, False),
    ],
    ids=lambda value: f"{value!r}" if isinstance(value, Exception) else None,
)
def test_every_foreign_exception_is_mapped(raised: Exception, kind: type[CloudckptError], retryable: bool | None):
    with (
        pytest.raises(kind) as caught,
        translated("read", "some/key", "mem://root", bucket="root", transport_errors=(UnreachableError,)),
    ):
        raise raised
    assert "some/key" in str(caught.value)
    assert caught.value.__cause__ is raised
    assert getattr(caught.value, "retryable", None) is retryable


def test_errors_of_this_package_pass_through():
    original = StoreError("mine", key="k", retryable=True)
    with pytest.raises(StoreError) as caught, translated("read", "k", "u", bucket="b"):
        raise original
    assert caught.value is original
