"""Trying again: full jitter under one deadline.

https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/: of the ways to spread
clients that failed together, waiting a uniformly random part of a doubling bound does least work.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from cloudckpt.errors import StoreError
from cloudckpt.store.counts import Counter

T = TypeVar("T")

FIRST_BOUND_S = 0.1
LARGEST_BOUND_S = 10.0

TRIES_THAT_MATTER = 5
"""A request that failed so often is told of by a warning, once: this is more than a hiccup."""

logger = logging.getLogger(__name__)


class Backoff:
    """The waits of one operation. Not for use by several threads."""

    def __init__(
        self,
        deadline_s: float,
        counter: Counter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._deadline_s = deadline_s
        self._counter = counter
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform
        self._started_s = clock()
        self._failures = 0

    def progressed(self) -> None:
        """Start the deadline anew: a long transfer that moves has not failed."""
        self._started_s = self._clock()
        self._failures = 0

    def pause(self, error: StoreError) -> None:
        """Wait before the next try; raises ``error`` if another try cannot help or comes too late."""
        if not error.retryable:
            raise error
        # The exponent is bounded too: 2.0**1024 overflows.
        bound_s = min(LARGEST_BOUND_S, FIRST_BOUND_S * 2.0 ** min(self._failures, 30))
        delay_s = self._uniform(0.0, bound_s)
        self._failures += 1
        elapsed_s = self._clock() - self._started_s
        if elapsed_s + delay_s > self._deadline_s:
            raise StoreError(
                f"{error} (gave up after {self._failures} tries in {elapsed_s:.1f} s)",
                key=error.key,
                retryable=True,
            ) from error
        level = logging.WARNING if self._failures == TRIES_THAT_MATTER else logging.INFO
        logger.log(level, "try %d failed, next in %.2f s: %s", self._failures, delay_s, error)
        if self._counter is not None:
            self._counter.add(retries=1)
        self._sleep(delay_s)


def call(operation: Callable[[], T], deadline_s: float, counter: Counter | None = None) -> T:
    """Run ``operation`` until it succeeds, fails for good, or the deadline is over."""
    backoff = Backoff(deadline_s, counter)
    while True:
        try:
            return operation()
        except StoreError as error:
            backoff.pause(error)
