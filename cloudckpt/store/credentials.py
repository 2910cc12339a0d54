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

    def __call__(self) -> dict[str, Any]:
        with self._lock:
            frozen = self._current().get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # Expired at once as far as obstore is concerned: botocore knows when to refresh.
            "expires_at": datetime.now(UTC),
        }

    def forget(self) -> None:
        """The store called them expired: read them anew, wherever they come from."""
        with self._lock:
            self._credentials = None

    def _current(self) -> Any:
        fresh = isinstance(self._credentials, RefreshableCredentials) or self._clock() - self._read_s < REREAD_S
        if self._credentials is None or not fresh:
            credentials = botocore.session.Session(profile=self._profile).get_credentials()
            if credentials is None:
                raise StoreError(
                    "no AWS credentials found: give key= and secret= (or anon=True) in storage_options, "
                    "or set up any of the places that boto3 looks in"
                )
            self._credentials = credentials
            self._read_s = self._clock()
        return self._credentials
