"""What every store has to do. Subclasses say how to open one; each opens the same root anew."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cloudckpt.errors import InvalidStateError, NotFoundError, StoreError
from cloudckpt.store.base import Store

MIB = 1024 * 1024
ODD_KEYS = [
    "a b/c d",
    "plus+and=equals",
    "step=7/x",
    "per%20cent/50%",
    "%2F",
    "ü/é/日本",
    "nfd-e\u0301",
    "question?mark#hash",
    "colon:semi;comma,",
    "[brackets]{braces}(parens)",
    "star*tilde~",
    "quote'double\"",
    "back\\slash",
    "dots..inside/.hidden/...",
    "x" * 200,
]


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def read(store: Store, key: str, byte_offset: int, nbytes: int) -> bytes:
    # Copied part by part: each is only valid until the next.
    return b"".join(bytes(memoryview(part)) for part in store.stream(key, byte_offset, nbytes))


def keys(store: Store, prefix: str = "") -> list[str]:
    return [found.key for found in store.list(prefix)]


_BESIDE = ("../a/b", "../step-1", "../step-1/", "../step-1/../b", "../../step-1/a", "x/../step-1/a", "../step-x/a")


class StoreConformance:
    honours_conditions = True

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        """Open the test's own, empty root once more, as another process would."""
        raise NotImplementedError

    @pytest.fixture
    def open_store(self, make_store: Callable[[], Store]) -> Iterator[Callable[[], Store]]:
        opened: list[Store] = []

        def open_one() -> Store:
            opened.append(make_store())
            return opened[-1]

        yield open_one
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, open_store: Callable[[], Store]) -> Store:
        return open_store()

    def test_put_then_read_back(self, store: Store):
        for nbytes in (0, 1, 1000, 3 * MIB):
            data = pattern(nbytes)
            store.put("folder/object", data)
            assert store.get("folder/object") == data
            assert store.size("folder/object") == nbytes
            assert read(store, "folder/object", 0, nbytes) == data

    def test_every_kind_of_buffer_is_taken(self, store: Store):
        for kind in (bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)):
            for nbytes in (0, 100):
                data = pattern(nbytes)
                store.put("put", kind(data))
                assert store.put_if_absent("created", kind(data))
                upload = store.open_upload("uploaded")
                upload.write(kind(data))
                upload.write(kind(b""))
                upload.write(kind(data))
                upload.close()
                assert (store.get("put"), store.get("created"), store.get("uploaded")) == (data, data, data + data)
                store.delete(["created"])

    def test_put_replaces(self, store: Store):
        store.put("key", b"a longer value")
        store.put("key", b"short")
        assert store.get("key") == b"short"
        assert store.size("key") == 5

    def test_ranges(self, store: Store):
        data = pattern(1_000_000)
        store.put("key", data)
        for start, nbytes in [(0, 1), (0, 0), (999_999, 1), (1_000_000, 0), (123_457, 654_321), (0, 1_000_000)]:
            assert read(store, "key", start, nbytes) == data[start : start + nbytes]

    def test_a_range_past_the_end_is_an_error(self, store: Store):
        store.put("key", b"0123456789")
        for start, nbytes in [(0, 11), (5, 6), (10, 1), (50, 1), (11, 0)]:
            with pytest.raises(StoreError, match=r"key.* ends at byte 10") as caught:
                read(store, "key", start, nbytes)
            assert caught.value.key == "key"
            assert not caught.value.retryable

    def test_missing_keys(self, store: Store):
        store.put("here", b"1")
        for key in ("missing", "folder/missing", "here/below"):
            with pytest.raises(NotFoundError, match=r"missing|below"):
                store.get(key)
            with pytest.raises(NotFoundError):
                store.size(key)
            with pytest.raises(NotFoundError):
                read(store, key, 0, 1)
            with pytest.raises(NotFoundError):
                read(store, key, 0, 0)

    def test_a_folder_is_no_object(self, store: Store):
        store.put("folder/key", b"1")
        with pytest.raises(NotFoundError):
            store.get("folder")
        with pytest.raises(NotFoundError):
            store.size("folder")

    def test_odd_keys(self, store: Store):
        for key in ODD_KEYS:
            store.put(key, b"value")
            assert store.get(key) == b"value"
            assert store.size(key) == 5
            assert read(store, key, 1, 3) == b"alu"
            assert keys(store) == [key]
            if "/" in key:
                parent = key.rpartition("/")[0]
                assert keys(store, parent) == [key]
                assert list(store.common_prefixes("")) == [key.partition("/")[0]]
            assert not store.put_if_absent(key, b"other")
            assert store.delete([key]) == {}
            assert keys(store) == []

    def test_keys_that_leave_the_root_are_refused(self, store: Store):
        calls = [
            store.get,
            store.size,
            store.open_upload,
            lambda key: store.put(key, b"1"),
            lambda key: store.put_if_absent(key, b"1"),
            lambda key: store.delete([key]),
            lambda key: read(store, key, 0, 1),
        ]
        for key in ("", "/a", "a/", "a//b", "../a", "a/../b", ".", "a\0b", *_BESIDE):
            for call in calls:
                with pytest.raises(InvalidStateError):
                    call(key)

    def test_objects_of_a_sibling(self, store: Store):
        key = f"../step-{secrets.randbelow(10**12):08d}/0123456789ab/r00000-000.zarr.zip"
        with pytest.raises(NotFoundError):
            store.size(key)
        store.put(key, b"0123456789")
        try:
            assert store.get(key) == b"0123456789"
            assert store.size(key) == 10
            assert read(store, key, 3, 4) == b"3456"
            assert keys(store) == []
        finally:
            assert store.delete([key]) == {}
        with pytest.raises(NotFoundError):
            store.get(key)

    def test_list_takes_whole_path_parts(self, store: Store):
        for key in ("a/b", "a/c/d", "ab/c", "a.txt", "z"):
            store.put(key, b"12345")
        assert sorted(keys(store)) == ["a.txt", "a/b", "a/c/d", "ab/c", "z"]
        assert sorted(keys(store, "a")) == ["a/b", "a/c/d"]
        assert keys(store, "a/") == sorted(keys(store, "a"))
        assert keys(store, "a/c") == ["a/c/d"]
        assert keys(store, "nothing") == []
        assert keys(store, "z") == []
        found = next(iter(store.list("a")))
        assert found.nbytes == 5
        assert found.modified_s > 1.7e9

    def test_common_prefixes(self, store: Store):
        assert list(store.common_prefixes("")) == []
        for key in ("step-2/m", "step-10/m", "step-1/x/y", "top"):
            store.put(key, b"1")
        assert list(store.common_prefixes("")) == ["step-1", "step-10", "step-2"]
        assert list(store.common_prefixes("step-1")) == ["x"]
        assert list(store.common_prefixes("step-2")) == []
        assert list(store.common_prefixes("nothing")) == []
        store.delete(["step-1/x/y"])
        assert list(store.common_prefixes("")) == ["step-10", "step-2"]

    def test_put_if_absent(self, store: Store):
        assert store.put_if_absent("folder/manifest", b"first")
        assert not store.put_if_absent("folder/manifest", b"second")
        assert store.get("folder/manifest") == b"first"
        store.delete(["folder/manifest"])
        assert store.put_if_absent("folder/manifest", b"third")
        assert store.get("folder/manifest") == b"third"

    def test_exactly_one_of_many_threads_wins(self, open_store: Callable[[], Store]):
        stores = [open_store() for _ in range(4)]
        barrier = threading.Barrier(len(stores))
        won: list[int] = []

        def race(index: int) -> None:
            barrier.wait()
            if stores[index].put_if_absent("manifest", str(index).encode()):
                won.append(index)

        threads = [threading.Thread(target=race, args=(index,)) for index in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stores[0].honours_conditions() is self.honours_conditions
        if self.honours_conditions:
            assert len(won) == 1
            assert stores[0].get("manifest") == str(won[0]).encode()
        else:
            assert len(won) >= 1
        assert keys(stores[0]) == ["manifest"]

    def test_nothing_is_answered_from_a_cache(self, open_store: Callable[[], Store]):
        """fsspec/s3fs#851: what another process does is seen at once."""
        ours, theirs = open_store(), open_store()
        ours.put("step-1/a", b"old")
        ours.put("step-1/b", b"gone")
        assert keys(ours, "step-1") == ["step-1/a", "step-1/b"]
        assert list(ours.common_prefixes("")) == ["step-1"]
        with pytest.raises(NotFoundError):
            ours.size("step-1/manifest")
        theirs.put("step-1/manifest", b"{}")
        theirs.put("step-2/manifest", b"{}")
        theirs.put("step-1/a", b"replaced")
        theirs.delete(["step-1/b"])
        assert ours.size("step-1/manifest") == 2
        assert ours.get("step-1/manifest") == b"{}"
        assert ours.size("step-1/a") == 8
        assert read(ours, "step-1/a", 0, 8) == b"replaced"
        with pytest.raises(NotFoundError):
            ours.size("step-1/b")
        assert keys(ours, "step-1") == ["step-1/a", "step-1/manifest"]
        assert list(ours.common_prefixes("")) == ["step-1", "step-2"]

    def test_uploads(self, store: Store):
        for nbytes in (0, 1, 5 * MIB, 5 * MIB + 1, 23 * MIB):
            data = pattern(nbytes)
            upload = store.open_upload("folder/pack", nbytes_hint=nbytes)
            view = memoryview(data)
            for start in range(0, nbytes, 3 * MIB + 17):
                upload.write(view[start : start + 3 * MIB + 17])
            assert keys(store) == []
            upload.close()
            upload.close()
            upload.abort()
            assert store.size("folder/pack") == nbytes
            assert read(store, "folder/pack", 0, nbytes) == data
            assert keys(store) == ["folder/pack"]
            store.delete(["folder/pack"])

    def test_an_aborted_upload_leaves_nothing(self, store: Store):
        store.put("folder/key", b"older")
        for nbytes in (0, 100, 12 * MIB):
            upload = store.open_upload("folder/key")
            upload.write(bytes(nbytes))
            upload.abort()
            upload.abort()
            with pytest.raises(StoreError):
                upload.write(b"more")
            upload.close()
            assert keys(store) == ["folder/key"]
            assert store.get("folder/key") == b"older"
            self.check_no_leftovers(store)

    def test_leftovers_are_not_objects(self, store: Store):
        store.put("a/key", b"1")
        upload = store.open_upload("a/b/pack")
        upload.write(bytes(1000))
        for found in list(store.leftovers("a")):
            assert found.key.startswith("a/b/")
            assert found.modified_s > 1.7e9
        upload.close()
        assert list(store.leftovers("")) == []
        assert list(store.leftovers("nothing")) == []

    def check_no_leftovers(self, store: Store) -> None:
        """Where a store can leave more behind than objects, its subclass looks for it."""

    def test_delete(self, store: Store):
        store.put("a/b", b"1")
        store.put("keep", b"1")
        assert store.delete(["a/b", "absent", "a/absent"]) == {}
        assert keys(store) == ["keep"]
        assert store.delete([]) == {}
        assert store.delete(iter(["keep"])) == {}

    def test_delete_of_many(self, store: Store):
        many = [f"folder-{index % 7}/object-{index}" for index in range(120)]
        for key in many:
            store.put(key, b"1")
        assert sorted(keys(store)) == sorted(many)
        assert store.delete(many) == {}
        assert keys(store) == []

    def test_counts_grow(self, store: Store):
        before = store.counts
        store.put("key", bytes(1000))
        assert store.counts.puts == before.puts + 1
        assert store.counts.bytes_sent == before.bytes_sent + 1000
        read(store, "key", 100, 500)
        assert store.counts.gets == before.gets + 1
        assert store.counts.bytes_fetched == before.bytes_fetched + 500
        store.get("key")
        assert store.counts.bytes_fetched == before.bytes_fetched + 1500
        assert store.counts.retries == 0

    def test_memory_is_told(self, store: Store):
        data = pattern(20 * MIB)
        store.put("key", data)
        largest = max(len(part) for part in store.stream("key", 0, len(data)))
        assert store.buffered_bytes(len(data)) >= (largest if largest < len(data) else 0)
        assert store.buffered_bytes(1) <= 1

    def test_an_unfinished_stream_can_be_dropped(self, store: Store):
        store.put("key", pattern(8 * MIB))
        parts = store.stream("key", 0, 8 * MIB)
        next(parts)
        parts.close()
        assert store.size("key") == 8 * MIB

    def test_many_threads_at_once(self, store: Store):
        data = pattern(6 * MIB)
        store.put("key", data)
        failures: list[object] = []

        def work(index: int) -> None:
            start = index * 100_003
            if read(store, "key", start, 1 * MIB) != data[start : start + MIB]:
                failures.append(index)
            store.put(f"out/{index}", data[:index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert [found.nbytes for found in sorted(store.list("out"), key=lambda f: f.nbytes)] == list(range(16))

    def test_shows_its_url(self, store: Store):
        assert store.url in repr(store)
        assert "secret" not in repr(store)
