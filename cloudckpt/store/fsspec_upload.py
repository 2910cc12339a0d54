"""A streamed upload through a filesystem's own file object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fsspec.spec import AbstractFileSystem

from cloudckpt.errors import CloudckptError, StoreError
from cloudckpt.store.base import Buffer, UploadBrokenError, byte_view
from cloudckpt.store.counts import Counter


class FileUpload:
    """No step of it can be retried: bytes that the file object took are gone."""

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        path: str,
        key: str,
        *,
        counter: Counter,
        translated: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._key = key
        self._fs = filesystem
        self._path = path
        self._counter = counter
        self._foreign = translated
        self._nbytes = 0
        with self._translated():
            # autocommit=False: nothing shows under the name before commit(), where that is supported.
            self._file: Any = filesystem.open(path, "wb", autocommit=False)
        self._is_open = True
        self._is_visible = False

    def write(self, data: Buffer) -> None:
        if not self._is_open:
            raise StoreError(f"the upload of {self._key} has ended", key=self._key)
        view = byte_view(data)
        self._nbytes += len(view)
        with self._translated():
            while len(view):
                num_written = self._file.write(view)
                # None: a file object that does not tell has taken all of it.
                view = view[len(view) if num_written is None else num_written :]

    def close(self) -> None:
        if not self._is_open:
            return
        try:
            with self._translated():
                self._file.close()
                if hasattr(self._file, "commit"):
                    self._file.commit()
                self._is_visible = True
                found = self._fs.info(self._path)["size"]
            if found != self._nbytes:
                raise StoreError(f"{self._key} has {found} bytes after {self._nbytes} were written", key=self._key)
        except CloudckptError:
            self.abort()
            raise
        self._is_open = False
        self._counter.add(puts=1, others=1, bytes_sent=self._nbytes)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with self._foreign():
                yield
        except StoreError as error:
            if not error.retryable:
                raise
            raise UploadBrokenError(str(error), key=self._key, retryable=True) from error

    def abort(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            with self._translated():
                if hasattr(self._file, "discard") and not self._is_visible:
                    self._file.discard()
                else:
                    self._file.close()
                    self._fs.rm_file(self._path)
        except CloudckptError:
            return  # what is left is garbage under a name that nothing refers to
