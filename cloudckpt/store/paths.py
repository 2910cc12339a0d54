"""Keys, prefixes and URLs as all stores understand them."""

from __future__ import annotations

import re
from pathlib import PurePath
from urllib.parse import urlsplit, urlunsplit

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.keys import split_key

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


def place(root: str, key: str, *, top: str = "") -> str:
    """Where an object lies, by its key below ``root`` or below a sibling of it (``../<step dir>/<key>``).

    ``top``: what of the root is a bucket, which has no siblings.
    """
    step_dir, below = split_key(key)
    if step_dir is None:
        return join(root, check_key(key))
    if root == top:
        raise InvalidStateError(f"not a key below a store's root, and {root!r} has nothing beside it: {key!r}")
    return f"{root[: root.rfind('/') + 1]}{step_dir}/{check_key(below)}"


def parent(url: str) -> tuple[str, str]:
    """A URL without its last part, and that part; ("", ...) where nothing but the scheme stands before it."""
    if scheme_of(url) is None:
        path = PurePath(url)
        return str(path.parent), path.name
    head, _, name = url.rstrip("/").rpartition("/")
    return ("", name) if head.endswith((":/", "::")) else (head, name)


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
