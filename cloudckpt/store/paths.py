"""Keys, prefixes and URLs as all stores understand them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from cloudckpt.errors import InvalidStateError

_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)(::|://)")


def scheme_of(url: str) -> str | None:
    """``s3`` of ``s3://bucket``; None for a plain path."""
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else None


def check_key(key: str) -> str:
    """Refuse what would leave the root or mean another key elsewhere: keys come out of manifests."""
    if not key or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidStateError(f"not a key below a store's root: {key!r}")
    return key


def clean_prefix(prefix: str) -> str:
    """The prefix without slashes at its ends; "" stands for the root."""
    prefix = prefix.strip("/")
    return check_key(prefix) if prefix else ""


def join(root: str, key: str) -> str:
    return f"{root.rstrip('/')}/{key}" if root else key


def mask(url: str) -> str:
    """The URL without a password, for messages."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    if parts.password is None and parts.username is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"***@{host}"))
