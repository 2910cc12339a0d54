from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.store import temporary
from cloudckpt.store.base import Store
from cloudckpt.store.local import LocalStore
from cloudckpt.store.resolve import resolve
from tests.store.conformance import StoreConformance, keys


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: resolve(tmp_path / "a root+with=50% of % signs" / "run")

    def check_no_leftovers(self, store: Store) -> None:
        assert files_below(Path(store.url)) == ["folder/key"]


def test_modes_follow_the_umask(tmp_path: Path):
    """fsspec/filesystem_spec#1797: temporary files of mode 600 must not become the object."""
    old = os.umask(0o022)
    try:
        store = LocalStore(tmp_path / "run")
        store.put("step/put", b"1")
        store.put_if_absent("step/created", b"1")
        upload = store.open_upload("step/uploaded")
        upload.write(b"1")
        upload.close()
    finally:
        os.umask(old)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "run").rglob("*")}
    assert modes == {"step": "0o755", "put": "0o644", "created": "0o644", "uploaded": "0o644"}


def test_reading_needs_no_write_access_and_leaves_no_files(tmp_path: Path):
    LocalStore(tmp_path).put("step/key", b"12345")
    (tmp_path / "step" / "key").chmod(0o444)
    (tmp_path / "step").chmod(0o555)
    try:
        store = LocalStore(tmp_path)
        assert keys(store) == ["step/key"]
        assert store.get("step/key") == b"12345"
        assert b"".join(bytes(part) for part in store.stream("step/key", 1, 3)) == b"234"
        assert list(store.common_prefixes("")) == ["step"]
        assert files_below(tmp_path) == ["step/key"]
    finally:
        (tmp_path / "step").chmod(0o755)


def test_opening_makes_no_folder(tmp_path: Path):
    store = LocalStore(tmp_path / "run")
    assert keys(store) == []
    assert not (tmp_path / "run").exists()


def test_deleting_removes_empty_folders_but_never_the_root(tmp_path: Path):
    store = LocalStore(tmp_path / "run")
    store.put("step/attempt/pack", b"1")
    store.put("step/manifest", b"1")
    store.delete(["step/attempt/pack"])
    assert sorted(path.name for path in (tmp_path / "run" / "step").iterdir()) == ["manifest"]
    store.delete(["step/manifest"])
    assert list((tmp_path / "run").iterdir()) == []


def test_a_listing_does_not_descend_into_links(tmp_path: Path):
    store = LocalStore(tmp_path / "run")
    store.put("step-1/key", b"1")
    (tmp_path / "run/loop").symlink_to(".")
    (tmp_path / "run/step-1/up").symlink_to("..")
    (tmp_path / "run/self").symlink_to("self")
    (tmp_path / "run/nowhere").symlink_to("none")
    (tmp_path / "file").write_bytes(b"12")
    (tmp_path / "run/step-1/linked").symlink_to(tmp_path / "file")
    assert keys(store) == ["step-1/key", "step-1/linked"]
    assert list(store.common_prefixes("")) == ["loop", "step-1"]
    assert store.get("step-1/linked") == b"12"
    with pytest.raises(StoreError):
        store.get("self")


def test_a_step_that_is_a_link_counts_once(tmp_path: Path):
    store = LocalStore(tmp_path / "run")
    for key in ("step-1/key", "step-2/key", "archive/key"):
        store.put(key, b"1")
    for name, target in {
        "step-02": "step-2",
        "step-3": "archive",
        "step-4": tmp_path / "elsewhere",
        "step-5": tmp_path / "elsewhere",
        "step-6": "step-5",
        "step-7": ".",
        "step-8": "..",
        "latest": "step-2",
    }.items():
        (tmp_path / "run" / name).symlink_to(target)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/key").write_bytes(b"1")
    assert list(store.common_prefixes("")) == ["archive", "latest", "step-1", "step-2", "step-3", "step-4"]


def test_folders_of_others_are_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``lost+found`` of a disk that holds a run."""
    store = LocalStore(tmp_path)
    store.put("step-1/key", b"1")
    store.put("lost+found/#1", b"1")
    real = os.scandir

    def refuse(path):
        if Path(path).name == "lost+found":
            raise PermissionError(errno.EACCES, "not yours", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert list(store.common_prefixes("")) == ["lost+found", "step-1"]
    with pytest.raises(StoreError, match="lost\\+found"):
        list(store.list(""))


def test_leftovers_of_others_are_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = tmp_path / f".cloudckpt-tmp-{temporary.host_name()}.4194304.00"
    left.write_bytes(b"1")

    real = Path.unlink

    def refuse(path: Path, **options: Any) -> None:
        if path == left:
            raise PermissionError(errno.EPERM, "sticky", str(path))
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    LocalStore(tmp_path).put("key", b"1")
    assert left.exists()
    assert LocalStore(tmp_path).get("key") == b"1"


def test_what_is_no_file_is_no_object_and_nothing_waits_for_it(tmp_path: Path):
    store = LocalStore(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for key in ("fifo", "folder"):
        for read in (store.get, store.size, lambda key: list(store.stream(key, 0, 1))):
            with pytest.raises(NotFoundError):
                read(key)
    assert keys(store) == []


WRITER = """
import os, signal, sys
from cloudckpt.store.local import LocalStore
store = LocalStore(sys.argv[1])
upload = store.open_upload("step/key")
upload.write(bytes(1_000_000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_the_old_object_and_its_leftovers_are_swept(tmp_path: Path):
    """zarr-developers/zarr-python#3411."""
    LocalStore(tmp_path).put("step/key", b"older")
    killed = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    leftovers = [path for path in (tmp_path / "step").iterdir() if temporary.is_temporary(path.name)]
    assert len(leftovers) == 1
    store = LocalStore(tmp_path)
    assert keys(store) == ["step/key"]
    assert store.get("step/key") == b"older"
    store.put("step/key", b"newer")
    assert files_below(tmp_path) == ["step/key"]
    assert store.get("step/key") == b"newer"


def test_deleting_a_step_takes_the_leftovers_of_a_killed_attempt_along(tmp_path: Path):
    store = LocalStore(tmp_path)
    store.put("step/manifest", b"1")
    killed = subprocess.run(
        [sys.executable, "-c", WRITER.replace("step/key", "step/attempt/pack"), str(tmp_path)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(files_below(tmp_path)) == 2
    store.delete(["step/manifest"])
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_live_processes_and_other_hosts_stay(tmp_path: Path):
    ours = LocalStore(tmp_path).open_upload("live")
    elsewhere = tmp_path / ".cloudckpt-tmp-other-host.1.00"
    elsewhere.write_bytes(b"")
    store = LocalStore(tmp_path)
    store.put("key", b"1")
    assert elsewhere.exists()
    ours.write(b"still here")
    ours.close()
    assert store.get("live") == b"still here"
    assert keys(store) == ["key", "live"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_full_disk_is_told_at_once_and_publishes_nothing(tmp_path: Path, monkeypatch, number: int):
    store = LocalStore(tmp_path)
    store.put("key", b"older")
    real_write, written = os.write, []

    def write(descriptor: int, data) -> int:
        if sum(written) >= 1000:
            raise OSError(number, os.strerror(number))
        written.append(real_write(descriptor, data[:300]))
        return written[-1]

    monkeypatch.setattr("cloudckpt.store.local.os.write", write)
    with pytest.raises(StoreError, match=os.strerror(number)) as caught:
        store.put("key", bytes(5000))
    assert (caught.value.key, caught.value.retryable) == ("key", False)
    upload = store.open_upload("other")
    with pytest.raises(StoreError, match=os.strerror(number)):
        upload.write(bytes(5000))
    upload.abort()
    monkeypatch.undo()
    assert files_below(tmp_path) == ["key"]
    assert store.get("key") == b"older"
    store.put("key", bytes(5000))
    assert store.size("key") == 5000


def test_short_writes_are_continued(tmp_path: Path, monkeypatch):
    real_write = os.write
    monkeypatch.setattr("cloudckpt.store.local.os.write", lambda descriptor, data: real_write(descriptor, data[:7]))
    store = LocalStore(tmp_path)
    data = bytes(range(256))
    store.put("key", data)
    assert store.get("key") == data


def test_data_are_durable_before_they_are_visible(tmp_path: Path, monkeypatch):
    """pytorch/pytorch#183878: the file is synced before the rename, the folder after it."""
    events: list[str] = []
    real_fsync, real_replace, real_link = os.fsync, Path.replace, os.link

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(f"sync {'folder' if name.is_dir() else 'file'}")
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append("publish")
        return real_replace(self, target)

    def link(source: Path, target: Path) -> None:
        events.append("publish")
        real_link(source, target)

    store = LocalStore(tmp_path)
    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("pathlib.Path.replace", replace)
    monkeypatch.setattr("os.link", link)
    store.put("key", b"1")
    store.put_if_absent("other", b"1")
    assert events == ["sync file", "publish", "sync folder"] * 2


def test_a_filesystem_without_hard_links_gets_the_weaker_rule(tmp_path: Path, monkeypatch):
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr("os.link", link)
    store = LocalStore(tmp_path)
    assert store.put_if_absent("key", b"1")
    assert not store.put_if_absent("key", b"2")
    assert store.get("key") == b"1"
    assert not store.honours_conditions()
    assert files_below(tmp_path) == ["key"]


RACER = """
import sys
from cloudckpt.store.local import LocalStore
store = LocalStore(sys.argv[1])
sys.stdin.readline()
print(store.put_if_absent("manifest", sys.argv[2].encode()))
"""


def test_exactly_one_process_wins(tmp_path: Path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(4)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate()[0].strip() for racer in racers]
    assert sorted(answers) == ["False", "False", "False", "True"]
    assert LocalStore(tmp_path).get("manifest") == str(answers.index("True")).encode()
    assert files_below(tmp_path) == ["manifest"]


def test_a_file_that_is_new_to_an_nfs_client_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Which goes on saying that it is absent until its folder is opened."""
    store = LocalStore(tmp_path)
    store.put("folder/new", b"data")
    real_open, stale = os.open, {str(tmp_path / "folder/new")}

    def caching_open(path: Any, *args: Any) -> int:
        if str(path) in stale:
            raise FileNotFoundError(errno.ENOENT, "as it was", str(path))
        if Path(path).is_dir():
            stale.clear()
        return real_open(path, *args)

    real_stat = Path.stat

    def caching_stat(path: Path, **options: Any) -> os.stat_result:
        if str(path) in stale:
            raise FileNotFoundError(errno.ENOENT, "as it was", str(path))
        return real_stat(path, **options)

    monkeypatch.setattr(os, "open", caching_open)
    monkeypatch.setattr(Path, "stat", caching_stat)
    assert store.get("folder/new") == b"data"
    stale.add(str(tmp_path / "folder/new"))
    assert store.size("folder/new") == 4
    with pytest.raises(NotFoundError, match="no object folder/old"):
        store.get("folder/old")
