"""From a URL to the store that serves it.

Client libraries are imported when the first URL needs them: the command line starts without.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError, InvalidStateError
from cloudckpt.store.base import Store
from cloudckpt.store.paths import mask, scheme_of

_is_forked = False
"""Whether obstore was imported before this process was forked: its threads stay with the parent, and requests wait."""

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
# Two letters at least: one is a drive of Windows.
_HALF_A_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)", re.IGNORECASE)


def resolve(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, config: Config | None = None
) -> Store:
    """The store whose root is ``url``.

    ``storage_options`` are those of fsspec's filesystem for the scheme; ``{"fs": filesystem}``
    uses that filesystem. The part of a URL after the scheme is taken as it stands: ``%20`` is
    not a space.
    """
    text = url_text(url)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise InvalidStateError(f"storage_options must be a mapping, not {type(storage_options).__name__}")
    options = dict(storage_options or {})
    config = config or Config()
    scheme = scheme_of(text)
    if scheme is None and text.startswith(("://", "::")):
        raise InvalidStateError(f"no scheme before {text!r}")
    if scheme is not None:
        text = scheme + text[len(scheme) :]  # the clients know lower case only
    if half := _HALF_A_SCHEME.match(text):
        # Path("s3://bucket/run") is that. As a path it would be a folder "s3:" here, and no one would notice.
        slashes = ":///" if half[1].lower() in ("file", "local") else "://"
        raise InvalidStateError(
            f"a slash is missing: did you mean {mask(half[1] + slashes + text[half.end() :])}? Pass a str: "
            f"pathlib drops a slash of a URL (a local folder of that name is ./{half[1]}:/...)"
        )
    filesystem = options.pop("fs", None)
    if filesystem is not None:
        return _passed_in(text, filesystem, options, config)
    if scheme in (None, "file", "local"):
        return _local(text, options, config)
    if scheme == "memory":
        from cloudckpt.store.memory import MemoryStore

        if options:
            raise InvalidStateError(f"memory:// takes no storage_options: {sorted(map(str, options))} given for {text}")
        return MemoryStore(text)
    if scheme in _OBJECT_STORES and config.engine == "auto":
        return _object_store(scheme, text, options, config)
    return _fsspec(text, options, config)


def shown_url(url: object) -> str:
    """For messages and logs, whatever a caller has passed; without a password."""
    return mask(str(os.fspath(url))) if isinstance(url, (str, os.PathLike)) else repr(url)


def url_text(url: object) -> str:
    """The URL as a string. Raises InvalidStateError for what is none."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise InvalidStateError(f"a URL must be a str or a path, not {type(url).__name__}")
    if "\0" in text:
        raise InvalidStateError(f"a URL cannot hold a null character: {mask(text)!r}")
    return text


def _passed_in(url: str, filesystem: Any, options: Mapping[str, Any], config: Config) -> Store:
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem
    from fsspec.spec import AbstractFileSystem

    from cloudckpt.store.fsspec import FsspecStore

    if not isinstance(filesystem, AbstractFileSystem):
        raise InvalidStateError(f"storage_options['fs'] must be an fsspec filesystem, not {type(filesystem).__name__}")
    if options:
        raise InvalidStateError(f"storage_options beside 'fs' have no effect: {sorted(map(str, options))}")
    # These two have stores of their own, which are atomic.
    if isinstance(filesystem, LocalFileSystem):
        return _local(filesystem._strip_protocol(url), {}, config)
    if isinstance(filesystem, MemoryFileSystem):
        from cloudckpt.store.memory import MemoryStore

        return MemoryStore(url)
    return FsspecStore(url, filesystem, config)


def _local(url: str, options: Mapping[str, Any], config: Config) -> Store:
    from cloudckpt.store.local import LocalStore

    if set(options) - {"auto_mkdir"}:
        raise InvalidStateError(f"a local path takes no storage_options: {sorted(map(str, options))} given for {url}")
    path = url
    if scheme_of(url) is not None and "://" in url:
        host, slash, below = url.split("://", 1)[1].partition("/")
        if host not in ("", "localhost"):
            raise InvalidStateError(f"{url!r} names the host {host!r}: a local path has three slashes, file:///...")
        path = slash + below
    if not path:
        raise InvalidStateError(f"no path in {url!r}")
    try:
        return LocalStore(Path(path).expanduser(), config)
    except RuntimeError as error:
        raise InvalidStateError(f"no home folder for {url!r}: {error}") from error


def _object_store(scheme: str | None, url: str, options: Mapping[str, Any], config: Config) -> Store:
    assert scheme is not None
    from cloudckpt.store.fallback import FallbackStore
    from cloudckpt.store.obstore import ObstoreStore
    from cloudckpt.store.obstore_clients import understands

    if not url.split("://", 1)[1].partition("/")[0]:
        raise InvalidStateError(f"no bucket in {url!r}")
    if _is_forked or not understands(scheme, url, options):
        return _fsspec(url, options, config)
    from botocore.exceptions import BotoCoreError

    try:
        first = ObstoreStore(url, options, config)
    except BotoCoreError as error:  # no such profile, a broken configuration file
        raise InvalidStateError(f"{mask(url)}: {error}") from error
    return FallbackStore(first, lambda: _fsspec(url, options, config))


def _fsspec(url: str, options: Mapping[str, Any], config: Config) -> Store:
    from cloudckpt.store.fsspec import open_filesystem

    try:
        return open_filesystem(url, options, config)
    except CloudckptError:
        raise
    except Exception as error:  # filesystems are third parties': what their making raises may be anything
        raise InvalidStateError(f"no filesystem for {scheme_of(url)}:// in {mask(url)}: {error}") from error


def _begin_child() -> None:
    global _is_forked  # noqa: PLW0603  # a fact of the process
    _is_forked = "obstore" in sys.modules


os.register_at_fork(after_in_child=_begin_child)
