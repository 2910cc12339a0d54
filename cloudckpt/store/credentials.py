"""AWS credentials from boto3's chain, read again when they may have changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import botocore.session
from botocore.credentials import RefreshableCredentials

from cloudckpt.errors import StoreError

REREAD_S = 60.0
"""How old credentials without an expiry date (environment, files) may get: files are rotated in place."""


class ChainCredentials:
    """What obstore calls a credential provider. Thread-safe."""

    def __init__(self, profile: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._profile = profile
        self._clock = clock
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._read_s = 0.0
        self._last: Any = None
        self._generation = 0

    def __call__(self) -> dict[str, Any]:
        with self._lock:
            frozen = self._frozen()
        if frozen is None:
            raise StoreError(
                "no AWS credentials found: give key= and secret= (or anon=True) in storage_options, "
                "or set up any of the places that boto3 looks in"
            )
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # Expired at once as far as obstore is concerned: botocore knows when to refresh.
            "expires_at": datetime.now(UTC),
        }

    def watch(self) -> Callable[[], bool]:
        """Before a request: what to call if the store says that its credentials have expired.

        That reads them anew, wherever they come from, and tells whether they are others now, so that the request is
        worth repeating. (Credentials that another request has read anew in the meantime count.)
        """
        with self._lock:
            self._frozen()
            used = self._generation

        def are_others() -> bool:
            with self._lock:
                if self._generation == used:
                    self._credentials = None
                    self._frozen()
                return self._generation != used

        return are_others

    def _frozen(self) -> Any:
        """The credentials of the moment, None if there are none; takes note of a change."""
        fresh = isinstance(self._credentials, RefreshableCredentials) or self._clock() - self._read_s < REREAD_S
        if self._credentials is None or not fresh:
            self._credentials = botocore.session.Session(profile=self._profile).get_credentials()
            self._read_s = self._clock()
        frozen = None if self._credentials is None else self._credentials.get_frozen_credentials()
        if frozen != self._last:
            self._generation += 1
            self._last = frozen
        return frozen
