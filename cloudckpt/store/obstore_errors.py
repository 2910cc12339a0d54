"""What obstore raises, in this package's terms.

obstore hands on neither the HTTP status nor the service's error code as data. Both stand in the
dump of the Rust error at the end of its messages, which is read here and nowhere else; where it
should ever change, ``tests/store/test_faults.py`` tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    UnknownConfigurationKeyError,
)

from cloudckpt.errors import CloudckptError, InvalidStateError, NoBucketError, NotFoundError, StoreError
from cloudckpt.store.fallback import ClientMismatchError

_STATUS = re.compile(r"\bstatus(?: code)?: (\d{3})\b")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*(.*?)\s*</Message>", re.DOTALL)
_CERTIFICATE = re.compile(r"\bInvalidCertificate\(\s*(\w+)")
_SYSTEM = re.compile(r'\bmessage: "([^"]+)"')
_TRANSPORT = re.compile(r"\bkind: (Connect|Request|Timeout|Interrupted|Decode|Unknown)\b")
_OF_ANOTHER = re.compile(
    r"\bRequested \d+\.\.\d+, got \d+\.\.\d+|\bETag Header missing|\bGot invalid multipart response"
)
_TRANSPORT_OF_WRITER = re.compile(r"\bHTTP error: ([\w ]+)")

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_PASSING_CODES = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ServerBusy", "OperationAborted"}
_PASSING_STATUSES = {408, 425, 429, 500, 502, 503, 504}
# A part that the store has not, or has with other bytes; and an upload that it does not know any more.
_LOST_PARTS = {"InvalidPart", "InvalidPartOrder", "EntityTooSmall", "NoSuchUpload", "MalformedXML"}


@dataclass(frozen=True)
class Facts:
    status: int | None
    code: str | None
    text: str
    transport: str | None
    """How the transfer itself failed, if it did."""
    not_partial: bool
    """A ranged GET was answered with the whole object."""
    is_of_another: bool
    """The answer is none to such a request: it belongs to another one."""
    redirected: bool
    untrusted: bool
    """The server's certificate was refused."""


def facts(error: BaseException) -> Facts:
    while isinstance(error, CloudckptError) and error.__cause__ is not None:
        error = error.__cause__
    shown, _, dump = str(error).partition("\n\nDebug source:\n")
    # Errors of a writer come without a dump.
    status = _STATUS.search(dump or shown)
    code = _CODE.search(shown)
    message = _MESSAGE.search(shown)
    transport = _TRANSPORT.search(dump) or (None if dump else _TRANSPORT_OF_WRITER.search(shown))
    refused = _CERTIFICATE.search(dump)
    system = _SYSTEM.findall(dump)
    if status and code:
        told = f"{status[1]} {code[1]}: {message[1] if message else ''}"
    elif refused:
        told = f"{shown} (the server's certificate was refused: {refused[1]})"
    elif transport:
        told = f"{shown} ({system[-1] if system else transport[1]})"
    else:
        told = shown
    return Facts(
        status=int(status[1]) if status else None,
        code=code[1] if code else None,
        text=" ".join(told.split()),
        transport=transport[1] if transport else None,
        not_partial="NotPartial" in dump,
        untrusted=refused is not None,
        # Refusals of conditional PUTs are no errors, and no other request has a condition.
        is_of_another=_OF_ANOTHER.search(shown) is not None or (status is not None and status[1] == "412"),
        redirected="BareRedirect" in dump or (status is not None and status[1] in ("301", "307")),
    )


@contextmanager
def translated(
    verb: str, key: str, url: str, *, bucket: str, renew: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Map whatever obstore raises inside.

    ``renew`` is called when credentials have expired, and tells whether a retry has other ones.
    """
    try:
        yield
    except CloudckptError:
        raise
    except (BaseError, OSError, ValueError) as error:
        raise _translate(error, verb, key, url, bucket, renew) from error


def _translate(
    error: Exception, verb: str, key: str, url: str, bucket: str, renew: Callable[[], bool] | None
) -> CloudckptError:
    found = facts(error)
    message = f"cannot {verb} {key or 'objects'} in {url}: {found.text}"
    if found.code in _NO_BUCKET:
        return NoBucketError(f"no bucket {bucket!r} ({message})")
    if isinstance(error, FileNotFoundError) and found.code in (None, "NoSuchKey", "BlobNotFound"):
        if verb == "write" and (found.code or found.text.endswith("404 Not Found:")):
            # No answer to a PUT: it belongs to another request. (Of a missing bucket a body tells.)
            return StoreError(message, key=key, retryable=True)
        return NotFoundError(f"no object {key} in {url}")
    if isinstance(error, (InvalidPathError, ValueError)):
        return InvalidStateError(message)
    if isinstance(error, NotSupportedError) or found.not_partial or found.redirected:
        return ClientMismatchError(message, key=key)
    if isinstance(error, UnknownConfigurationKeyError) or (verb == "open" and not isinstance(error, OSError)):
        return InvalidStateError(message)
    if found.code in _EXPIRED or (found.status == 400 and found.code is None):  # a HEAD has no body that could tell
        return StoreError(message, key=key, retryable=renew is not None and renew())
    return StoreError(message, key=key, retryable=_passes(error, found))


def _passes(error: Exception, found: Facts) -> bool:
    if isinstance(error, AlreadyExistsError):
        # 409: two conditional requests at the same time, of which S3 asks to repeat the loser.
        return found.status == 409
    if found.is_of_another:
        return True
    if found.status is not None:
        return found.status in _PASSING_STATUSES or found.code in _PASSING_CODES
    return found.transport is not None and not found.untrusted


def must_begin_again(error: StoreError) -> bool:
    """Whether an upload broke in a way that obstore does not retry, and that another upload may not meet."""
    found = facts(error)
    return found.is_of_another or found.code in _LOST_PARTS or (found.code in _EXPIRED and error.retryable)
