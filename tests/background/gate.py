"""A door before every upload of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cloudckpt import _write


class Gate:
    """While it is closed no chunk is read; ``reached`` counts the uploads that came to it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Semaphore(0)

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.release()
        assert self._open.wait(60)


@contextmanager
def gated_uploads() -> Iterator[Gate]:
    gate, real = Gate(), _write.upload

    def upload(*args: Any, **kwargs: Any) -> Any:
        gate.pass_through()
        return real(*args, **kwargs)

    _write.upload = upload
    try:
        yield gate
    finally:
        gate.open()
        _write.upload = real
