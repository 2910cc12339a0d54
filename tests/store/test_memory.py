from __future__ import annotations

import secrets
from collections.abc import Callable

import fsspec
import pytest

from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from tests.store.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        root = f"memory://{secrets.token_hex(4)}/50% off/run"
        return lambda: resolve(root)


def test_is_fsspecs_own_memory_filesystem():
    store = resolve("memory://shared-root")
    store.put("folder/key", b"123")
    assert fsspec.filesystem("memory").cat_file("/shared-root/folder/key") == b"123"
    fsspec.filesystem("memory").pipe_file("/shared-root/other", b"4")
    assert store.get("other") == b"4"
    store.delete(["folder/key", "other"])
