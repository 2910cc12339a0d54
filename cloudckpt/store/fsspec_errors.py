"""What fsspec's filesystems raise, in this package's terms.

s3fs raises OSErrors that were translated from botocore's and carry them as their cause; there the
service's code and the HTTP status are data. Other filesystems are judged by exception type.
"""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import CloudckptError, NoBucketError, NotFoundError, StoreError

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_PASSING_CODES = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted"}
# 409: two conditional requests at the same time, of which S3 asks to repeat the loser.
_PASSING_STATUSES = {408, 409, 425, 429, 500, 502, 503, 504}
_PASSING_ERRNOS = {errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.EPIPE, errno.EBUSY}


@dataclass(frozen=True)
class Facts:
    status: int | None = None
    code: str | None = None
    text: str = ""


def facts(error: BaseException) -> Facts:
    """Status and code of the answer behind an error, as far as the library tells."""
    while isinstance(error, CloudckptError) and error.__cause__ is not None:
        error = error.__cause__
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            return _from_botocore(response)
        seen = seen.__cause__
    # Not of the causes: aiohttp calls a body that ends early "400".
    for name in ("status_code", "status", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return Facts(status=status, text=str(error))
    return Facts()


def _from_botocore(response: dict[str, Any]) -> Facts:
    told = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = told.get("Code")
    return Facts(status=status, code=code, text=f"{status} {code}: {told.get('Message', '')}")


@contextmanager
def translated(
    verb: str,
    key: str,
    url: str,
    *,
    bucket: str,
    transport_errors: tuple[type[Exception], ...] = (),
    renew: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Map whatever a filesystem raises inside.

    ``transport_errors`` are its client's own for broken transfers. ``renew`` is called when
    credentials have expired, and tells whether a retry has other ones.
    """
    try:
        yield
    except CloudckptError:
        raise
    except Exception as error:  # a filesystem may raise anything, and every bit of it ends up in a StoreError
        raise _translate(error, verb, key, url, bucket, transport_errors, renew) from error


def _translate(
    error: Exception,
    verb: str,
    key: str,
    url: str,
    bucket: str,
    transport_errors: tuple[type[Exception], ...],
    renew: Callable[[], bool] | None,
) -> CloudckptError:
    found = facts(error)
    message = f"cannot {verb} {key or 'objects'} in {url}: {found.text or _text(error)}"
    if found.code in _NO_BUCKET:
        return NoBucketError(f"no bucket {bucket!r} ({message})")
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)) and found.code != "NoSuchUpload":
        return NotFoundError(f"no object {key} in {url}")
    if found.code in _EXPIRED or found.code == "400":  # botocore's word for a HEAD, which has no body that could tell
        return StoreError(message, key=key, retryable=renew is not None and renew())
    if found.status is not None:
        passes = found.status in _PASSING_STATUSES or found.code in _PASSING_CODES
    elif _is_untrusted(error):
        passes = False
    else:
        passes = isinstance(error, (TimeoutError, ConnectionError, *transport_errors)) or (
            isinstance(error, OSError) and error.errno in _PASSING_ERRNOS
        )
    return StoreError(message, key=key, retryable=passes)


def _is_untrusted(error: Exception) -> bool:
    """Whether the server's certificate was refused; to every client that is a broken connection."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and not str(error):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
