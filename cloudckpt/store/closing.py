"""The end of the stores that a save or load has opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cloudckpt.store.base import Store
from cloudckpt.telemetry import Recorder


@contextmanager
def counted_and_closed(stores: Sequence[Store], recorder: Recorder) -> Iterator[None]:
    """When the block is left, the recorder gets what the stores did for it, and they are closed."""
    try:
        yield
    finally:
        for store in stores:
            counts = store.counts
            # Saves fetch next to nothing, loads send nothing.
            recorder.nbytes += counts.bytes_sent + counts.bytes_fetched
            recorder.num_requests += counts.requests
            recorder.num_retries += counts.retries
            store.close()
