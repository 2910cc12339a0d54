"""Both S3 engines against a server that fails on command. Retries are bounded by count, not by time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import pytest

from cloudckpt.config import MIB, Config
from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.store.base import Store, UploadBrokenError
from cloudckpt.store.resolve import resolve
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3
from tests.store.conformance import pattern, read

# Long enough for a few tries with their waits of up to 0.1, 0.2, 0.4 s; short enough to give up.
PATIENT = Config(part_bytes=5 * MIB, retry_deadline_s=60.0, request_timeout_s=10.0, num_threads=4)
HASTY = Config(part_bytes=5 * MIB, retry_deadline_s=1.0, request_timeout_s=0.5, num_threads=4)
MOST_TRIES = 60


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


@pytest.fixture(params=["auto", "fsspec"])
def open_store(request: pytest.FixtureRequest, server: FaultyS3) -> Iterator[Callable[[Config], Store]]:
    opened: list[Store] = []

    def open_one(config: Config) -> Store:
        settings = Config(**{**vars(config), "engine": request.param})
        opened.append(resolve("s3://bkt/run", server.storage_options, settings))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[Config], Store]) -> Store:
    return open_store(PATIENT)


@pytest.fixture
def hasty(open_store: Callable[[Config], Store]) -> Store:
    return open_store(HASTY)


def perform(store: Store, call: str) -> None:
    if call == "get":
        store.get("key")
    elif call == "put":
        store.put("key", b"1")
    elif call == "put_if_absent":
        store.put_if_absent("key", b"1")
    elif call == "list":
        list(store.list(""))
    else:
        upload = store.open_upload("key")
        try:
            upload.write(bytes(22 * MIB))
            upload.close()
        finally:
            upload.abort()


PASSING = [
    Fault("status", status=503, code="SlowDown", times=3),
    Fault("status", status=500, code="InternalError", times=3),
    Fault("status", status=429, code="TooManyRequests", times=2),
    Fault("reset", times=2),
]


@pytest.mark.parametrize("fault", PASSING, ids=lambda f: f"{f.kind}-{f.status}")
@pytest.mark.parametrize("call", ["get", "stream", "size", "list", "put", "put_if_absent", "delete", "upload"])
def test_passing_faults_are_retried(store: Store, server: FaultyS3, fault: Fault, call: str):
    if call == "upload" and fault.status == 429:
        pytest.skip("obstore retries the parts of an upload itself, and not on 429")
    server.objects["run/key"] = pattern(1000)
    server.modified["run/key"] = 1.8e9
    server.faults = [Fault(**vars(fault))]
    if call == "get":
        assert store.get("key") == pattern(1000)
    elif call == "stream":
        assert read(store, "key", 10, 100) == pattern(1000)[10:110]
    elif call == "size":
        assert store.size("key") == 1000
    elif call == "list":
        assert [found.key for found in store.list("")] == ["key"]
    elif call == "put":
        store.put("new", b"value")
        assert server.objects["run/new"] == b"value"
    elif call == "put_if_absent":
        assert store.put_if_absent("new", b"value")
        assert server.objects["run/new"] == b"value"
    elif call == "delete":
        assert store.delete(["key"]) == {}
        assert server.objects == {}
    else:
        upload = store.open_upload("new")
        upload.write(pattern(11 * MIB))
        upload.close()
        assert server.objects["run/new"] == pattern(11 * MIB)
    assert server.faults[0].times == 0
    if call != "upload":
        # aiohttp repeats a request once itself if a connection that was kept open turns out dead.
        least = 1 if fault.kind == "reset" else fault.times
        assert least <= store.counts.retries <= fault.times


def test_a_body_that_breaks_once_is_resumed_where_it_stopped(store: Store, server: FaultyS3):
    """fsspec/s3fs#786: 300 KiB of 1 MiB, then a reset."""
    data = pattern(1 * MIB)
    store.put("key", data)
    server.faults = [Fault("reset_body", "GET", nbytes=300 * 1024)]
    assert read(store, "key", 0, MIB) == data
    assert server.count("GET") == 2
    server.faults = [Fault("cut", "GET", nbytes=300 * 1024)]
    assert read(store, "key", 1000, MIB - 1000) == data[1000:]
    assert server.count("GET") == 4
    assert store.counts.retries == 2


def test_a_large_body_is_not_fetched_twice(server: FaultyS3):
    store = resolve("s3://bkt/run", server.storage_options, PATIENT)
    data = pattern(8 * MIB)
    store.put("key", data)
    server.faults = [Fault("cut", "GET", nbytes=5 * MIB)]
    assert read(store, "key", 0, 8 * MIB) == data
    ranges = [request.headers["range"] for request in server.requests if request.method == "GET"]
    assert ranges[0] == f"bytes=0-{8 * MIB - 1}"
    assert int(ranges[1].removeprefix("bytes=").partition("-")[0]) > 4 * MIB


@pytest.mark.parametrize("kind", ["reset_body", "cut"])
def test_a_body_that_always_breaks_is_an_error_with_key(hasty: Store, server: FaultyS3, kind: str):
    hasty.put("key", pattern(1 * MIB))
    server.faults = [Fault(kind, "GET", nbytes=0, times=ALWAYS)]
    with pytest.raises(StoreError, match="key") as caught:
        read(hasty, "key", 0, MIB)
    assert (caught.value.key, caught.value.retryable) == ("key", True)
    assert 1 <= server.count("GET") < MOST_TRIES


@pytest.mark.parametrize("kind", ["reset", "status", "stall"])
@pytest.mark.parametrize("call", ["get", "put", "upload"])
def test_retries_end_at_the_deadline(hasty: Store, server: FaultyS3, kind: str, call: str):
    server.faults = [Fault(kind, status=503, code="SlowDown", times=ALWAYS, seconds=3.0)]
    with pytest.raises(StoreError, match="key") as caught:
        perform(hasty, call)
    assert caught.value.retryable
    assert 1 <= len(server.requests) < MOST_TRIES
    assert server.objects == {}


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (400, "ExpiredToken"),
        (400, "InvalidArgument"),
        (501, "NotImplemented"),
        (507, "InsufficientStorage"),
    ],
)
@pytest.mark.parametrize("call", ["get", "put", "put_if_absent", "list", "upload"])
def test_faults_that_stay_are_not_retried(store: Store, server: FaultyS3, status: int, code: str, call: str):
    if call == "upload" and status >= 500:
        pytest.skip("obstore retries the parts of an upload itself, on every 5xx")
    server.faults = [Fault("status", status=status, code=code, times=ALWAYS)]
    with pytest.raises(StoreError) as caught:
        perform(store, call)
    assert not caught.value.retryable
    assert str(status) in str(caught.value)
    assert "test-secret" not in str(caught.value)
    # HEAD, which comes first in a put_if_absent, has no body to tell it.
    assert code in str(caught.value) or (call == "put_if_absent" and status != 403)
    assert len(server.requests) <= 3


def test_a_missing_bucket_is_named_and_not_made(server: FaultyS3, open_store):
    """fsspec/s3fs#532: no bucket is created, the root is not listed."""
    for engine in ("auto", "fsspec"):
        store = resolve("s3://mistyped/run", server.storage_options, Config(engine=engine))
        for call in (
            lambda store=store: store.get("key"),
            lambda store=store: store.put("folder/key", b"1"),
            lambda store=store: list(store.list("")),
            lambda store=store: store.open_upload("key").close(),
        ):
            with pytest.raises(NotFoundError, match="no bucket 'mistyped'"):
                call()
        assert "mistyped" in store.delete(["key"])["key"]
        store.close()
    assert all(request.target.startswith("/mistyped") for request in server.requests)
    assert server.count("PUT", "/mistyped?") == 0
    assert all(request.target.rstrip("/") != "/mistyped" for request in server.requests if request.method == "PUT")


def test_writes_need_no_right_but_that_to_write(store: Store, server: FaultyS3):
    server.faults = [Fault("status", "GET", status=403, code="AccessDenied", times=ALWAYS)]
    store.put("a/b/c", b"1")
    upload = store.open_upload("a/b/d")
    upload.write(bytes(6 * MIB))
    upload.close()
    assert {request.key for request in server.requests} == {"run/a/b/c", "run/a/b/d"}


def test_committing_needs_no_right_to_list(store: Store, server: FaultyS3):
    """Without it, S3 answers 403 where it would answer 404."""
    server.faults = [Fault("status", "HEAD", status=403, code="AccessDenied", times=ALWAYS)]
    assert store.put_if_absent("key", b"1")
    assert not store.put_if_absent("key", b"2")
    assert server.objects == {"run/key": b"1"}
    assert server.count("GET") == 0


def test_a_lost_reply_to_a_put(store: Store, server: FaultyS3):
    server.faults = [Fault("lost_reply", "PUT")]
    store.put("key", b"value")
    assert server.objects == {"run/key": b"value"}
    assert server.count("PUT") == 2


def test_a_lost_reply_to_a_conditional_put_finds_its_own_object(store: Store, server: FaultyS3):
    """The caller stamps what it writes and reads it back: here it sees its own stamp."""
    server.faults = [Fault("lost_reply", "PUT")]
    assert not store.put_if_absent("key", b"my stamp")
    assert store.get("key") == b"my stamp"


def test_a_conditional_put_that_conflicts_is_repeated(store: Store, server: FaultyS3):
    server.faults = [Fault("status", "PUT", status=409, code="ConditionalRequestConflict")]
    assert store.put_if_absent("key", b"1")
    assert server.objects == {"run/key": b"1"}


def test_a_server_that_ignores_conditions_is_found_out(store: Store, server: FaultyS3):
    server.ignores_conditions = True
    assert not store.honours_conditions()
    assert store.put_if_absent("key", b"1")
    assert not store.put_if_absent("key", b"2")
    assert server.objects == {"run/key": b"1"}
    num_requests = len(server.requests)
    assert not store.honours_conditions()
    assert len(server.requests) == num_requests


def test_a_lost_reply_to_complete(store: Store, server: FaultyS3):
    """minio/minio#13318: the repeated "complete" is told NoSuchUpload though the object is there."""
    server.faults = [Fault("lost_reply", "POST", "uploadId=")]
    upload = store.open_upload("key")
    upload.write(pattern(12 * MIB))
    upload.close()
    assert server.objects == {"run/key": pattern(12 * MIB)}
    assert server.count("POST", "uploadId=") == 2


def test_an_upload_that_vanished_is_an_error(store: Store, server: FaultyS3):
    server.objects["run/key"] = b"something of another size"
    server.modified["run/key"] = 1.8e9
    server.faults = [Fault("status", "POST", "uploadId=", status=404, code="NoSuchUpload", times=ALWAYS)]
    upload = store.open_upload("key")
    upload.write(bytes(12 * MIB))
    with pytest.raises(StoreError, match="NoSuchUpload"):
        upload.close()
    assert server.objects["run/key"] == b"something of another size"


def test_a_part_that_fails_for_good_aborts_the_upload(store: Store, server: FaultyS3):
    server.faults = [Fault("status", "PUT", "partNumber=2", status=403, code="AccessDenied", times=ALWAYS)]
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        perform(store, "upload")
    assert not caught.value.retryable
    assert server.objects == {}
    assert server.uploads == {}


def test_checksum_headers_are_not_sent_to_other_stores(store: Store, server: FaultyS3):
    """boto/botocore#3352."""
    server.rejects_checksums = True
    store.put("key", b"1")
    assert store.put_if_absent("other", b"1")
    upload = store.open_upload("large")
    upload.write(bytes(12 * MIB))
    upload.close()
    assert store.get("key") == b"1"
    assert store.delete(["key", "other", "large"]) == {}
    assert server.objects == {}


def test_a_delete_that_is_denied_is_reported_by_key(store: Store, server: FaultyS3):
    """fsspec/s3fs#838."""
    for name in ("a", "b", "c"):
        store.put(name, b"1")
    server.faults = [Fault("status", "DELETE", "/run/b", status=403, code="AccessDenied", times=ALWAYS)]
    failed = store.delete(["a", "b", "c"])
    assert list(failed) == ["b"]
    assert "AccessDenied" in failed["b"]
    assert server.objects == {"run/b": b"1"}


def test_a_server_that_ignores_ranges_gets_fsspec(server: FaultyS3, caplog: pytest.LogCaptureFixture):
    store = resolve("s3://bkt/run", server.storage_options, PATIENT)
    data = pattern(1000)
    store.put("key", data)
    server.faults = [Fault("whole_object", "GET")]
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        assert read(store, "key", 10, 100) == data[10:110]
        assert read(store, "key", 20, 100) == data[20:120]
    assert len(caplog.records) == 1
    assert "fsspec" in caplog.text
    assert "test-secret" not in caplog.text
    assert "FsspecStore" in repr(store)
    store.close()


def test_a_server_that_is_not_there_is_told_with_the_reason(open_store: Callable[[Config], Store], server: FaultyS3):
    store = open_store(HASTY)
    server.stop()
    with pytest.raises(StoreError, match=r"(?i)connection refused|could not connect") as caught:
        store.get("key")
    assert caught.value.retryable


@pytest.fixture
def obstore_store(server: FaultyS3) -> Iterator[Store]:
    opened = resolve("s3://bkt/run", server.storage_options, PATIENT)
    yield opened
    opened.close()


@pytest.mark.parametrize("before", ["put", "get", "size", "delete", "refused"])
@pytest.mark.parametrize("call", ["put", "put_if_absent", "upload", "parts"])
def test_the_answer_to_another_request_is_no_sign_of_success(
    obstore_store: Store, server: FaultyS3, before: str, call: str
):
    """As on a connection where an answer came twice: nothing was done. (s3fs keeps no connections open.)"""
    store = obstore_store
    store.put("other", b"old")
    if before == "get":
        store.get("other")
    elif before == "size":
        store.size("other")
    elif before == "delete":
        store.delete(["nothing"])
    elif before == "refused":
        assert not store._first._create("other", b"new")
    data = pattern(12 * MIB if call == "parts" else 1000)
    server.faults = [Fault("stale", "POST" if call == "parts" else "PUT")]
    if call == "put":
        store.put("key", data)
    elif call == "put_if_absent":
        store.put_if_absent("key", data)  # which may find its own object
    else:
        with contextlib.suppress(UploadBrokenError):
            _upload(store, data)
            assert server.objects["run/key"] == data, "no success without the object"
        _upload(store, data)
    if not (call == "put_if_absent" and before == "refused"):
        assert server.objects["run/key"] == data


def _upload(store: Store, data: bytes) -> None:
    upload = store.open_upload("key")
    try:
        upload.write(data)
        upload.close()
    finally:
        upload.abort()


def test_the_answer_to_another_get_is_asked_for_again(obstore_store: Store, server: FaultyS3):
    obstore_store.put("key", pattern(1000))
    assert read(obstore_store, "key", 0, 100) == pattern(1000)[:100]
    server.faults = [Fault("stale", "GET")]
    assert read(obstore_store, "key", 100, 200) == pattern(1000)[100:300]
    assert obstore_store.counts.retries == 1
