from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from cloudckpt.config import Config
from cloudckpt.errors import InvalidStateError
from cloudckpt.store.fsspec import FsspecStore
from cloudckpt.store.local import LocalStore
from cloudckpt.store.memory import MemoryStore
from cloudckpt.store.resolve import resolve

OPTIONS = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}


def test_local_paths_in_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (tmp_path / "a b%20", f"{tmp_path}/a b%20/", f"file://{tmp_path}/a b%20", "a b%20", "~/a b%20"):
        store = resolve(url)
        assert isinstance(store, LocalStore)
        assert store.url == f"{tmp_path}/a b%20"
    assert resolve(f"file://localhost{tmp_path}/x").url == f"{tmp_path}/x"


def test_a_path_with_a_colon_is_a_path(tmp_path: Path):
    assert isinstance(resolve(f"{tmp_path}/s3:/x"), LocalStore)


@pytest.mark.parametrize(
    ("url", "options", "engine", "shown"),
    [
        ("s3://bkt/x", OPTIONS, "auto", "ObstoreStore"),
        ("s3a://bkt/x", OPTIONS, "auto", "ObstoreStore"),
        ("s3://bkt/x", OPTIONS, "fsspec", "FsspecStore"),
        ("s3://bkt/x", {**OPTIONS, "version_aware": True}, "auto", "FsspecStore"),
        ("s3://bkt/x", {**OPTIONS, "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, "auto", "FsspecStore"),
        ("s3://bkt/x", {**OPTIONS, "use_listings_cache": True, "max_concurrency": 4}, "auto", "ObstoreStore"),
        ("gs://bkt/x", {}, "auto", "ObstoreStore"),
        ("az://container/x", {"account_name": "a", "account_key": "a2V5"}, "auto", "ObstoreStore"),
        ("memory://x", None, "fsspec", "MemoryStore"),
    ],
)
def test_which_store_a_url_gets(url: str, options, engine, shown: str, monkeypatch: pytest.MonkeyPatch):
    store = resolve(url, options, Config(engine=engine))
    assert shown in repr(store)
    store.close()


def test_a_filesystem_that_is_passed_in(tmp_path: Path):
    assert isinstance(resolve(str(tmp_path), {"fs": LocalFileSystem()}), LocalStore)
    assert isinstance(resolve("memory://x", {"fs": fsspec.filesystem("memory")}), MemoryStore)
    store = resolve("run", {"fs": DirFileSystem(str(tmp_path), LocalFileSystem())})
    assert isinstance(store, FsspecStore)
    store.put("folder/key", b"1")
    assert (tmp_path / "run/folder/key").read_bytes() == b"1"
    with pytest.raises(InvalidStateError, match="not str"):
        resolve("x", {"fs": "s3"})
    with pytest.raises(InvalidStateError, match="key"):
        resolve("x", {"fs": LocalFileSystem(), "key": "k"})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://host/x", "nosuch://"),
        ("s3:///x", "no bucket"),
        ("file://", "no path"),
        ("s3://bkt/a//b", "not a key"),
        ("s3://bkt/../b", "not a key"),
    ],
)
def test_urls_that_cannot_be_used(url: str, said: str):
    with pytest.raises(InvalidStateError, match=said) as caught:
        resolve(url, OPTIONS if url.startswith("s3") else None)
    assert url in str(caught.value) or said == "not a key"


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        (Path("s3://bucket/run") / "step-1", "s3://bucket/run/step-1"),
        ("s3:/b/x", "s3://b/x"),
        ("file:/tmp/x", "file:///tmp/x"),
        ("S3:/b/x", "S3://b/x"),
        ("gs:/", "gs://"),
    ],
)
def test_a_url_that_has_lost_a_slash_is_no_local_folder(url: str | Path, meant: str):
    with pytest.raises(InvalidStateError) as caught:
        resolve(url)
    assert f"did you mean {meant}?" in str(caught.value)
    assert "pathlib" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("~nosuchuser/x", None, "~nosuchuser/x"),
        ("a\0b", None, "null character"),
        (None, None, "not NoneType"),
        (b"x", None, "not bytes"),
        ("x", [1], "must be a mapping"),
        ("memory://x", {"kye": 1}, "kye"),
        ("zip://x::/nowhere/no.zip", None, "no.zip"),
    ],
)
def test_arguments_that_cannot_be_used(url, options, said: str):
    with pytest.raises(InvalidStateError, match=said):
        resolve(url, options)


def test_schemes_in_capitals():
    for engine in ("auto", "fsspec"):
        store = resolve("S3://bkt/x", OPTIONS, Config(engine=engine))
        assert store.url == "s3://bkt/x"
        store.close()


def test_a_file_url_with_a_host_is_refused_and_a_scheme_within_a_path_is_a_path(tmp_path: Path):
    for url in ("file://server/share", "local://server", "file://tmp"):
        with pytest.raises(InvalidStateError, match="host"):
            resolve(url)
    with pytest.raises(InvalidStateError, match="no path"):
        resolve("file://localhost")
    assert resolve(f"{tmp_path}/s3://x").url == f"{tmp_path}/s3:/x"


def test_options_that_a_local_path_cannot_use_are_refused(tmp_path: Path):
    with pytest.raises(InvalidStateError, match="key"):
        resolve(tmp_path, {"key": "k"})


def test_secrets_are_in_no_message(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidStateError) as caught:
        resolve("nosuch://user:hunter2@host/x")
    assert "hunter2" not in str(caught.value)
    for engine in ("auto", "fsspec"):
        store = resolve("s3://bkt/x", {**OPTIONS, "secret": "hunter2"}, Config(engine=engine))
        assert "hunter2" not in repr(store) + store.url
        store.close()


def test_importing_the_seam_imports_no_client():
    script = "import sys, cloudckpt.store.resolve; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"torch", "numpy", "fsspec", "s3fs", "boto3", "botocore", "aiohttp", "obstore", "asyncio"}
    assert heavy.isdisjoint(modules)


FORKED = """
import os, sys
from cloudckpt.config import Config
from cloudckpt.errors import StoreError
from cloudckpt.store.resolve import resolve
options = {"key": sys.argv[2], "secret": sys.argv[3], "endpoint_url": sys.argv[1]}
store = resolve(f"s3://{sys.argv[4]}/run", options, Config(engine=sys.argv[5]))
store.put("parent", b"1")
pid = os.fork()
if pid == 0:
    try:
        store.put("child", b"1")
        code = 10
    except StoreError as error:
        code = 11 if "fork" in str(error) else 12
    os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
store.close()
"""


@pytest.mark.parametrize(("engine", "code"), [("auto", 11), ("fsspec", 10)])
def test_after_a_fork_there_is_a_new_instance_or_a_clear_error(juicefs_s3, engine: str, code: int):
    bucket = juicefs_s3.make_bucket(f"fork-{engine}-{os.getpid()}")
    arguments = [juicefs_s3.endpoint_url, juicefs_s3.key, juicefs_s3.secret, bucket, engine]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, *arguments], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(code)


def test_a_profile_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidStateError, match="nope"):
        resolve("s3://bucket/run", {"profile": "nope"})
