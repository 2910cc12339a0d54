from __future__ import annotations

import logging

import pytest

from cloudckpt.config import MIB, Config
from cloudckpt.errors import StoreError
from cloudckpt.store.fallback import ClientMismatchError, FallbackStore
from cloudckpt.store.memory import MemoryStore
from cloudckpt.store.resolve import resolve
from tests.servers.rclone import start_rclone
from tests.store.conformance import keys, pattern, read


class Mismatched(MemoryStore):
    """Breaks off every stream after a few bytes, as a client does that does not understand the server."""

    def stream(self, key, byte_offset, nbytes):
        yield from super().stream(key, byte_offset, min(nbytes, 3))
        raise ClientMismatchError("no", key=key)

    def size(self, key):
        raise ClientMismatchError("no", key=key)


def test_changes_over_once_and_continues_a_stream(caplog: pytest.LogCaptureFixture):
    made: list[MemoryStore] = []

    def make() -> MemoryStore:
        made.append(MemoryStore("memory://fallback"))
        return made[-1]

    store = FallbackStore(Mismatched("memory://fallback"), make)
    store.put("key", b"0123456789")
    assert made == []
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        assert read(store, "key", 1, 8) == b"12345678"
        assert store.size("key") == 10
        assert read(store, "key", 0, 10) == b"0123456789"
    assert len(made) == 1
    assert len(caplog.records) == 1
    assert (store.counts.puts, store.counts.gets) == (1, 3)
    store.delete(["key"])
    store.close()


def test_the_second_store_gets_no_third_chance():
    store = FallbackStore(Mismatched("memory://fallback"), lambda: Mismatched("memory://fallback"))
    with pytest.raises(StoreError):
        store.size("key")
    with pytest.raises(StoreError):
        store.size("key")


def test_rclones_server(tmp_path, caplog: pytest.LogCaptureFixture):
    server = start_rclone(tmp_path)
    try:
        server.make_bucket("bkt")
        store = resolve("s3://bkt/run", server.storage_options, Config(part_bytes=5 * MIB, retry_deadline_s=5.0))
        upload = store.open_upload("pack")
        upload.write(pattern(12 * MIB))
        upload.close()
        with caplog.at_level(logging.WARNING, "cloudckpt"):
            assert read(store, "pack", 1000, 7 * MIB) == pattern(12 * MIB)[1000 : 1000 + 7 * MIB]
            assert read(store, "pack", 0, 12 * MIB) == pattern(12 * MIB)
        assert len(caplog.records) == 1
        assert keys(store) == ["pack"]
        assert store.delete(["pack"]) == {}
        store.close()
    finally:
        server.stop()
