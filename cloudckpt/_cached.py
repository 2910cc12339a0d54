"""Properties that are computed once, safe to fork beside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801  # takes the place of that one
    """`functools.cached_property` as it is since Python 3.12: two threads may both compute a value.

    That of 3.11 has one lock for all instances of a class. A child that is forked while another thread computes, in a
    background save, inherits the lock and nobody who would ever release it.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock: Any = nullcontext()
