"""The filesystem object that a store works with, and when another one takes its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from fsspec.spec import AbstractFileSystem


class Instance:
    """``make`` builds another one, in a forked child or after credentials have expired; None: the caller's is cloned.

    ``watch_credentials``: see `ChainCredentials.watch`; None for credentials that cannot be read anew.
    """

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        make: Callable[[], AbstractFileSystem] | None,
        watch_credentials: Callable[[], Callable[[], bool]] | None,
    ) -> None:
        self._found = filesystem
        self._make = make or (lambda: _clone(filesystem))
        self._is_own = make is not None
        self._watch_credentials = watch_credentials
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def kind(self) -> str:
        """For messages."""
        return type(self._found).__name__

    @property
    def current(self) -> AbstractFileSystem:
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    # The parent's event loop does not run here.
                    self._found = self._make()
                    self._pid = os.getpid()
        return self._found

    @property
    def own(self) -> AbstractFileSystem | None:
        """The one that the store may close: neither the caller's nor a parent's."""
        return self._found if self._is_own and self._pid == os.getpid() else None

    def renewal(self) -> Callable[[], bool] | None:
        """What to call if the credentials of the request that comes have expired."""
        if self._watch_credentials is None:
            return None
        used, are_others = self._found, self._watch_credentials()

        def renew() -> bool:
            with self._lock:
                if self._found is used:
                    if not are_others():
                        return False
                    self._found = self._make()
            return True

        return renew


def _clone(filesystem: AbstractFileSystem) -> AbstractFileSystem:
    return type(filesystem)(*filesystem.storage_args, **filesystem.storage_options, skip_instance_cache=True)
