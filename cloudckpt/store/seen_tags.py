"""Which ETags a store has told lately, so that an answer that comes a second time is noticed."""

from __future__ import annotations

import threading
from collections import OrderedDict

MOST_TAGS = 1024
"""A second answer lies in wait on a connection that is in use: it is among the next few."""


class SeenTags:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tags: OrderedDict[str, None] = OrderedDict()

    def is_new(self, tag: str | None) -> bool:
        """Take note of a tag; False if it was known."""
        if tag is None:
            return True
        with self._lock:
            is_new = tag not in self._tags
            self._tags[tag] = None
            self._tags.move_to_end(tag)
            if len(self._tags) > MOST_TAGS:
                self._tags.popitem(last=False)
        return is_new
