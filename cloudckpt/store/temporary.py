"""Temporary files beside the final ones, named so that a dead process' leftovers can be told."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import secrets
import threading
from pathlib import Path

_PREFIX = ".cloudckpt-tmp-"
_NAME = re.compile(re.escape(_PREFIX) + r"(?P<host>.*)\.(?P<pid>\d+)\.[0-9a-f]+")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def is_temporary(name: str) -> bool:
    return name.startswith(_PREFIX)


def host_name() -> str:
    """The host and, where there are such, its process namespace: a pid means nothing outside of it."""
    try:
        namespace = f"{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        namespace = "0"
    # Folder names of 255 bytes are common limits, and host names may be 253 long.
    return f"{platform.node()[:64].replace('/', '_')}-{namespace}"


class Sweeper:
    """Removes leftovers of dead processes, once per folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._swept: set[Path] = set()

    def sweep(self, folder: Path) -> None:
        with self._lock:
            if folder in self._swept:
                return
            self._swept.add(folder)
        _sweep(folder)


def _sweep(folder: Path) -> None:
    host = host_name()
    # Another process may sweep, or remove the folder, at the same time; and it may all be another user's.
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and match["host"] == host and not _is_alive(int(match["pid"])):
                path.unlink()


def remove_empty_folders(top: Path) -> None:
    """Below and with ``top``; leftovers of dead processes do not count as content and go too."""
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            _sweep(Path(folder))
            Path(folder).rmdir()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def create(folder: Path, sweeper: Sweeper) -> tuple[Path, int]:
    """A new file in ``folder``, which is made if need be, open for writing; the umask decides its mode."""
    path = folder / f"{_PREFIX}{host_name()}.{os.getpid()}.{secrets.token_hex(8)}"
    for _ in range(10):
        try:
            make_folders(folder)
            descriptor = os.open(path, _FLAGS, 0o666)
        except FileNotFoundError:
            continue  # a deletion removed the empty folder in between
        sweeper.sweep(folder)
        return path, descriptor
    raise FileNotFoundError(errno.ENOENT, f"{folder} is removed again and again")


def make_folders(folder: Path) -> None:
    """Like ``mkdir -p``; each new folder's entry is made durable too."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        sync_folder(folder.parent)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some mounts have no durable folders
            raise
    finally:
        os.close(descriptor)
