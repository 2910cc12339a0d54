import re

import pytest

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format import keys


@pytest.mark.parametrize(
    ("step", "name"),
    [(0, "step-00000000"), (1000, "step-00001000"), (99999999, "step-99999999"), (123456789, "step-123456789")],
)
def test_steps(step, name):
    assert keys.step_dir(step) == name
    assert keys.parse_step(name) == step


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, 10**18])
def test_what_is_no_step(step):
    with pytest.raises(InvalidStateError, match="step must be"):
        keys.step_dir(step)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000010", 10),
        ("step-10", 10),
        ("step-0", 0),
        ("step-final", None),
        ("step-", None),
        ("step--1", None),
        ("step-1 ", None),
        ("step-1\n", None),
        ("step-٣", None),
        ("step-1/", None),
        ("xstep-1", None),
        ("step-" + "9" * 5000, None),
    ],
)
def test_parse_step(name, step):
    assert keys.parse_step(name) == step


def test_keys_of_an_attempt():
    attempt = keys.new_attempt()
    assert re.fullmatch("[0-9a-f]{12}", attempt)
    assert attempt != keys.new_attempt()
    assert keys.pack_key(attempt, 3, 1) == f"{attempt}/r00003-001.zarr.zip"
    assert keys.pack_key(attempt, 123456, 1234) == f"{attempt}/r123456-1234.zarr.zip"
    assert keys.plain_root(attempt) == f"{attempt}.zarr"
    assert keys.chunk_key("model.w", (3, 0)) == "model.w/c/3/0"
    assert keys.chunk_key("model.w", ()) == "model.w/c"
    for key in (keys.pack_key(attempt, 0, 0), f"{keys.plain_root(attempt)}/model.w/c/0"):
        assert keys.check_key(key) == key


def test_keys_of_messages():
    root = keys.sync_root("session", 7)
    assert re.fullmatch(r"[0-9a-f]{12}\.sync", root)
    assert root == keys.sync_root("session", 7)
    assert len({keys.sync_root(session, number) for session in ("a", "a/1", "b") for number in range(20)}) == 60
    whose, all_ranks = keys.sync_key(root, 2, "here", 4095), keys.sync_key(root, 2, "outcome")
    assert (whose, all_ranks) == (f"{root}/00002/here/04095", f"{root}/00002/outcome")
    assert [keys.parse_sync_rank(key) for key in (whose, all_ranks, f"{root}/x/-1")] == [4095, None, None]
    for key in (whose, all_ranks, root):
        assert keys.check_key(key) == key
    for key in (whose, all_ranks):
        assert keys.parse_attempt(key) == root.removesuffix(".sync")


@pytest.mark.parametrize(
    "key", ["manifest.json", "0123456789ab/r00000-000.zarr.zip", "0123456789ab.synced/x", "a.sync/x"]
)
def test_keys_of_other_things_are_no_messages(key):
    assert keys.parse_sync_round(key) is None


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "/etc/passwd",
        "a//b",
        "a/",
        "..",
        "../a",
        "a/../b",
        "a/..",
        ".",
        "./a",
        "a/./b",
        "a\\b",
        "..\\a",
        "a\0b",
        "a\nb",
        "a\n",
        "a\x7f",
        "\ud800",
        "C:",
        "C:/a",
        "c:a",
        "s3://bucket/a",
        "file:a",
        "a" * 1025,
        None,
        3,
        b"a",
        ["a"],
    ],
    ids=lambda key: repr(key)[:20],
)
def test_unsafe_keys_are_format_errors(key):
    with pytest.raises(FormatError, match="object key"):
        keys.check_key(key)


@pytest.mark.parametrize("key", ["a", "a..b", "...", "a/b.c/d", "é/ü", "a" * 1024, "a b", "../step-7/a/b"])
def test_safe_keys_pass(key):
    assert keys.check_key(key) == key


def test_keys_of_siblings():
    key = keys.sibling_key("step-00000007", "0123456789ab/r00000-000.zarr.zip")
    assert keys.split_key(keys.check_key(key)) == ("step-00000007", "0123456789ab/r00000-000.zarr.zip")
    assert keys.split_key("0123456789ab/x") == (None, "0123456789ab/x")


@pytest.mark.parametrize(
    "key",
    [
        "../a/b",
        "../step-1",
        "../step-1/",
        "../step-x/a",
        "../step-1/../a",
        "../step-1//a",
        "../../step-1/a",
        "../step-1/c:/a",
    ],
)
def test_unsafe_keys_of_siblings_are_format_errors(key):
    with pytest.raises(FormatError, match="object key"):
        keys.check_key(key)


def test_leases_are_told_from_other_objects():
    assert keys.parse_lease(f"step-12/{keys.lease_key('0123456789ab')}") == ("step-12", "0123456789ab")
    for key in (
        "step-12/0123456789ab/r00000-000.zarr.zip",
        "other/0123456789ab/lease",
        "step-12/lease",
        "step-12/x/lease",
    ):
        assert keys.parse_lease(key) is None


def test_what_an_attempt_wrote():
    attempt = "0123456789ab"
    assert keys.is_of_attempt(keys.pack_key(attempt, 0, 0), attempt)
    assert keys.is_of_attempt(f"{keys.plain_root(attempt)}/w/c/0", attempt)
    assert not keys.is_of_attempt(keys.pack_key("ba9876543210", 0, 0), attempt)
    assert not keys.is_of_attempt(keys.sibling_key("step-1", keys.pack_key(attempt, 0, 0)), attempt)
