"""One streamed upload through obstore's writer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from cloudckpt.errors import CloudckptError, NotFoundError, StoreError
from cloudckpt.store.base import Buffer, ObjectInfo, UploadBrokenError, byte_view
from cloudckpt.store.counts import Counter
from cloudckpt.store.obstore_errors import facts, must_begin_again
from cloudckpt.store.parts import MAX_PARTS

if TYPE_CHECKING:
    from obstore import WritableFile

CLOCK_SKEW_S = 900.0
"""S3 refuses requests from clocks that are further off than this."""


class ObstoreUpload:
    """Keeps references to what ``write`` is given, not copies, until its part is sent.

    ``write`` waits while `parts_in_flight` parts are under way, so that no more than so many times
    ``part_bytes`` are referred to.
    """

    def __init__(
        self,
        writer: WritableFile,
        key: str,
        *,
        part_bytes: int,
        counter: Counter,
        translated: Callable[[], AbstractContextManager[None]],
        head: Callable[[], ObjectInfo],
    ) -> None:
        self._writer: WritableFile | None = writer
        self._key = key
        self._part_bytes = part_bytes
        self._counter = counter
        self._translated = translated
        self._head = head
        self._nbytes = 0
        self._started_s = time.time()

    def write(self, data: Buffer) -> None:
        if self._writer is None:
            raise StoreError(f"the upload of {self._key} has ended", key=self._key)
        view = byte_view(data)
        if self._nbytes + len(view) > self._part_bytes * MAX_PARTS:
            raise StoreError(
                f"{self._key} grows past {MAX_PARTS} parts of {self._part_bytes} bytes: "
                "give a larger nbytes_hint or Config.part_bytes",
                key=self._key,
            )
        if len(view):
            try:
                with self._translated():
                    self._writer.write(view)
            except StoreError as error:
                raise self._broken(error) from error
            self._nbytes += len(view)

    def close(self) -> None:
        if self._writer is None:
            return
        is_multipart = self._nbytes >= self._part_bytes
        try:
            with self._translated():
                self._writer.close()
        except (StoreError, NotFoundError) as error:
            if not (is_multipart and self._is_complete()):
                self.abort()
                raise self._broken(error) from error
        self._writer = None
        self._counter.add(
            puts=max(1, -(-self._nbytes // self._part_bytes)),
            others=2 if is_multipart else 0,
            bytes_sent=self._nbytes,
        )
        self._check_arrived()

    def abort(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        reason = StoreError(f"the upload of {self._key} was given up", key=self._key)
        try:
            with self._translated():
                # The writer has no abort(): leaving its context with an error is how it aborts.
                writer.__exit__(type(reason), reason, None)
        except CloudckptError:
            # Parts may stay behind; a bucket's lifecycle rule is the cure that S3 has for them.
            return

    def _check_arrived(self) -> None:
        """Ask for the size: "done" may have been the answer to another request on the same connection."""
        try:
            found = self._head().nbytes
        except NotFoundError:
            found = 0
        except StoreError as error:
            if facts(error).status == 403:  # one may write, and not look
                return
            raise
        if found != self._nbytes:
            raise UploadBrokenError(
                f"{self._key} has {found} bytes after {self._nbytes} were sent", key=self._key, retryable=True
            )

    def _broken(self, error: StoreError | NotFoundError) -> StoreError | NotFoundError:
        if isinstance(error, StoreError) and must_begin_again(error):
            return UploadBrokenError(str(error), key=self._key, retryable=True)
        return error

    def _is_complete(self) -> bool:
        """Whether the object is there although the last answer said otherwise.

        A repeated "complete" whose first reply got lost is answered NoSuchUpload
        (minio/minio#13318). An older object of the same size must not be taken for it.
        """
        try:
            found = self._head()
        except CloudckptError:
            return False
        return found.nbytes == self._nbytes and found.modified_s >= self._started_s - CLOCK_SKEW_S
