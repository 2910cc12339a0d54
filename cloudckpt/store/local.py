"""Objects as files of a local or mounted filesystem.

What becomes visible is always a whole, fsynced file: written under a temporary name in the same
folder, then renamed or linked. On NFS a reply may get lost and the client ask again, so that
``link`` reports EEXIST against its own success and ``rename`` ENOENT; callers that need to know
stamp what they write and read it back, as ``put_if_absent`` documents.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cloudckpt.config import Config
from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.format.keys import parse_step, split_key
from cloudckpt.store import temporary
from cloudckpt.store.base import Buffer, ObjectInfo, RequestCounts, Upload, byte_view, ends_early
from cloudckpt.store.counts import Counter
from cloudckpt.store.paths import clean_prefix, place
from cloudckpt.store.retry import call

READ_BYTES = 1024 * 1024
"""Fits a core's L2 cache, so that the checksum and the copy that follow do not go to memory again."""

_TRANSIENT = {errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.EINTR}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


class LocalStore:
    """Files below a root folder, which is made by the first write."""

    def __init__(self, root: str | os.PathLike[str], config: Config | None = None) -> None:
        self._root = Path(root).absolute()
        self._config = config or Config()
        self._counter = Counter()
        self._sweeper = temporary.Sweeper()
        self._links = True

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    @property
    def url(self) -> str:
        return str(self._root)

    @property
    def counts(self) -> RequestCounts:
        return self._counter.snapshot()

    def get(self, key: str) -> bytes:
        def read() -> bytes:
            with os.fdopen(self._open(key), "rb") as file, self._reading(key):
                return file.read()

        data = call(read, self._config.retry_deadline_s, self._counter)
        self._counter.add(gets=1, bytes_fetched=len(data))
        return data

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Buffer]:
        descriptor = self._open(key)
        try:
            with self._reading(key):
                end = os.fstat(descriptor).st_size
            if byte_offset + nbytes > end:
                raise ends_early(self.url, key, end, byte_offset + nbytes)
            self._counter.add(gets=1)
            buffer = memoryview(bytearray(min(nbytes, READ_BYTES)))
            done = 0
            while done < nbytes:
                with self._reading(key):
                    got = os.preadv(descriptor, [buffer[: nbytes - done]], byte_offset + done)
                if got == 0:
                    raise ends_early(self.url, key, byte_offset + done, byte_offset + nbytes)
                self._counter.add(bytes_fetched=got)
                done += got
                yield buffer[:got]
        finally:
            os.close(descriptor)

    @property
    def num_streams(self) -> int:
        # Reading a file is the CPU's work; more threads than cores only contend.
        return min(self._config.num_threads, max(2, os.cpu_count() or 2))

    def buffered_bytes(self, nbytes: int) -> int:
        return min(nbytes, READ_BYTES)

    def size(self, key: str) -> int:
        self._counter.add(others=1)
        path = self._path(key)
        with self._reading(key):
            try:
                found = path.stat()
            except FileNotFoundError:
                _look_again(path.parent)
                found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotFoundError(f"no object {key} in {self._root}")
        return found.st_size

    def put(self, key: str, data: Buffer) -> None:
        upload = _FileUpload(self, key)
        try:
            upload.write(data)
            upload.close()
        finally:
            upload.abort()

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        upload = _FileUpload(self, key)
        try:
            upload.write(data)
            return upload.link()
        finally:
            upload.abort()

    def honours_conditions(self) -> bool:
        return self._links

    def open_upload(self, key: str, nbytes_hint: int | None = None) -> Upload:  # noqa: ARG002  # files have no parts
        return _FileUpload(self, key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        prefix = clean_prefix(prefix)
        self._counter.add(others=1)
        yield from self._walk(prefix)

    def leftovers(self, prefix: str) -> Iterator[ObjectInfo]:
        prefix = clean_prefix(prefix)
        self._counter.add(others=1)
        top = self._root / prefix
        for folder, _, names in os.walk(top):
            for name in filter(temporary.is_temporary, names):
                path = Path(folder, name)
                try:
                    found = path.stat()
                except OSError:
                    continue  # ended in the meantime
                yield ObjectInfo(path.relative_to(self._root).as_posix(), found.st_size, found.st_mtime)

    def common_prefixes(self, prefix: str) -> Sequence[str]:
        prefix = clean_prefix(prefix)
        self._counter.add(others=1)
        names = self._folders(prefix, self._entries(prefix))
        return [name for name in names if self._holds_objects(_below(prefix, name))]

    def delete(self, keys: Iterable[str]) -> dict[str, str]:
        failed = {}
        folders = set()
        for key in keys:
            path = self._path(key)
            self._counter.add(others=1)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                failed[key] = os.strerror(error.errno or 0)
                continue
            folders.add(path.parent)
        for folder in folders:
            # The folder of a tried and failed save may hold nothing but temporary files.
            if folder != self._root and folders.isdisjoint(folder.parents):
                temporary.remove_empty_folders(folder)
                self._remove_empty_parents(folder)
        return failed

    def close(self) -> None:
        """Nothing to give back."""

    def _path(self, key: str) -> Path:
        root = self._root
        if split_key(key)[0] is not None and parse_step(root.name) is None:
            # A link of another name ("latest") leads to the step whose siblings are meant; a step that is a link to
            # another disk has those that it seems to have.
            root = Path(os.path.realpath(root))
        return Path(place(root.as_posix(), key))

    def _open(self, key: str) -> int:
        """A descriptor of a regular file: a FIFO would wait for a writer, a device may do anything."""
        path = self._path(key)
        with self._reading(key):
            try:
                descriptor = os.open(path, _READ_FLAGS)
            except FileNotFoundError:
                _look_again(path.parent)
                descriptor = os.open(path, _READ_FLAGS)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotFoundError(f"no object {key} in {self._root}: it is no file")
        return descriptor

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise NotFoundError(f"no object {key} in {self._root}") from error
            raise self._failed("read", key, error) from error

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed("write", key, error) from error

    def _failed(self, verb: str, key: str, error: OSError) -> StoreError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return StoreError(
            f"cannot {verb} {key} in {self._root}: {reason}", key=key, retryable=error.errno in _TRANSIENT
        )

    def _entries(self, prefix: str) -> Sequence[os.DirEntry[str]]:
        """What is in a folder now, sorted, without temporary files; nothing if there is no folder."""
        try:
            with self._reading(prefix), os.scandir(self._root / prefix) as found:
                return sorted((e for e in found if not temporary.is_temporary(e.name)), key=lambda e: e.name)
        except NotFoundError:
            return ()

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        for entry in self._entries(prefix):
            key = _below(prefix, entry.name)
            # A link to a folder may lead back to itself, or to what must not be deleted as ours.
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(key)
                continue
            try:
                found = entry.stat()
            except OSError:
                continue  # deleted since the folder was read, or a link to nothing or to itself
            if not stat.S_ISREG(found.st_mode):
                continue
            # Copies by other tools (rsync -a, rclone) come with the times of their originals, and are new all the same.
            yield ObjectInfo(key, found.st_size, max(found.st_mtime, found.st_ctime))

    def _holds_objects(self, prefix: str) -> bool:
        try:
            return next(self._walk(prefix), None) is not None
        except StoreError:
            return True  # such as lost+found: who needs what is in it will hear of it

    def _folders(self, prefix: str, entries: Sequence[os.DirEntry[str]]) -> Sequence[str]:
        """Names of folders. Links count: a step may lie on another disk. But no step has two names.

        Who removed what goes by one of them would remove what is to stay by the other.
        """
        folders = [entry for entry in entries if _is_folder(entry)]
        links = [entry for entry in folders if entry.is_symlink() and parse_step(entry.name) is not None]
        if not links:
            return [entry.name for entry in folders]
        top = Path(os.path.realpath(self._root / prefix))
        seen = {top, *top.parents, *(top / e.name for e in folders if parse_step(e.name) is not None)}
        aliases = set()
        for entry in links:
            path = Path(os.path.realpath(entry.path))
            if path in seen:
                aliases.add(entry.name)
            seen.add(path)
        return [entry.name for entry in folders if entry.name not in aliases]

    def _remove_empty_parents(self, folder: Path) -> None:
        while folder != self._root and self._root in folder.parents:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass  # by the way, or by another process
            except OSError:
                return  # not empty
            folder = folder.parent


class _FileUpload:
    """A temporary file beside its final name. Not for use by several threads at once."""

    def __init__(self, store: LocalStore, key: str) -> None:
        self._store = store
        self._key = key
        self._final = store._path(key)
        with store._writing(key):
            self._temporary, descriptor = temporary.create(self._final.parent, store._sweeper)
        self._descriptor: int | None = descriptor

    def write(self, data: Buffer) -> None:
        if self._descriptor is None:
            raise StoreError(f"the upload of {self._key} has ended", key=self._key)
        view = byte_view(data)
        self._store._counter.add(bytes_sent=len(view))
        with self._store._writing(self._key):
            # A write may be short, without an error: at a quota, over 2 GiB, on a signal.
            while len(view):
                view = view[os.write(self._descriptor, view) :]

    def close(self) -> None:
        if self._descriptor is None:
            return
        try:
            self._finish_file()
            with self._store._writing(self._key):
                self._temporary.replace(self._final)
                temporary.sync_folder(self._final.parent)
        finally:
            self.abort()

    def link(self) -> bool:
        """Like ``close``, but False where the name is taken."""
        self._finish_file()
        with self._store._writing(self._key):
            try:
                os.link(self._temporary, self._final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # A filesystem without hard links (some FUSE mounts): the weaker check, then rename.
                self._store._links = False
                if self._final.exists():
                    return False
                self._temporary.replace(self._final)
            temporary.sync_folder(self._final.parent)
        return True

    def abort(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    def _finish_file(self) -> None:
        assert self._descriptor is not None
        self._store._counter.add(puts=1)
        with self._store._writing(self._key):
            os.fsync(self._descriptor)
            # Some filesystems (NFS, quotas) only tell at close that the data did not fit.
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def _below(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _look_again(folder: Path) -> None:
    """An NFS client believes for half a minute that a name is still absent, unless its folder is opened."""
    os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link to itself
