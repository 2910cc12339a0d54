"""What DCP calls the id of a checkpoint: here, its URL."""

from __future__ import annotations

import os

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.keys import parse_step
from cloudckpt.store.paths import parent, scheme_of
from cloudckpt.store.resolve import url_text

_OWN_SCHEMES = frozenset({None, "file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})


def is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether some store serves it: local paths, and URLs of object stores and of every filesystem of fsspec's."""
    try:
        text = url_text(checkpoint_id)
    except InvalidStateError:
        return False
    scheme = scheme_of(text)
    if scheme in _OWN_SCHEMES:
        return bool(text)
    from fsspec import available_protocols

    return scheme in available_protocols()


def checked_url(url: str | os.PathLike[str] | None, who: str) -> str:
    if url is None:
        raise InvalidStateError(f"{who} has no URL: pass one, {who}(url), or checkpoint_id=url to torch's function")
    return url_text(url)


def step_of(url: str) -> int | None:
    """The step of a URL that ends in ``step-<number>``, as those of the steps of a run do."""
    return parse_step(parent(url)[1])
