"""What a rank sends over torch.distributed, counted in the rank's own process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

# Of a group, where it is used without the functions above it.
METHODS = ("send", "recv", "broadcast")
OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
TENSORS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Calls of torch.distributed's functions while the context is open, by name; object functions call others too."""
    counts: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    patches = [patch.object(dist, name, counting(name, getattr(dist, name))) for name in (*OBJECTS, *TENSORS)]
    group = dist.ProcessGroup
    patches += [patch.object(group, name, counting(f"group.{name}", getattr(group, name))) for name in METHODS]
    for one in patches:
        one.start()
    try:
        yield counts
    finally:
        for one in patches:
            one.stop()
