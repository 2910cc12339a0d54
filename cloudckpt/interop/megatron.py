"""What Megatron's ``torch_dist`` checkpoints have beside DCP's files: ``metadata.json`` and ``common.pt``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import FormatError
from cloudckpt.interop.collected import Collected, listed
from cloudckpt.interop.foreign import Origin
from cloudckpt.interop.ranges import Part, Ranges
from cloudckpt.interop.torch_archive import open_archive
from cloudckpt.interop.torch_state import state_of, without_left
from cloudckpt.store.base import Store

CONFIG_KEY = "metadata.json"
COMMON_KEY = "common.pt"
COMMON = "common"
"""Where its values are in the state."""


@dataclass(frozen=True, slots=True)
class Common:
    """``values``: what all ranks have alike. ``step``: the iteration, if it says."""

    values: dict[Any, Any]
    step: int | None


def is_megatron(store: Store, sizes: Mapping[str, int]) -> bool:
    """Whether it is a checkpoint of Megatron; FormatError for one whose tensors are not in DCP's format."""
    if CONFIG_KEY not in sizes:
        return False
    try:
        config = json.loads(store.get(CONFIG_KEY))
    except ValueError:
        return False
    if not isinstance(config, dict) or "sharded_backend" not in config:
        return False
    if config["sharded_backend"] != "torch_dist":
        raise FormatError(
            f"{store.url}: Megatron's tensors are in its format {config['sharded_backend']!r:.50}; save them as"
            " 'torch_dist'"
        )
    return True


def read_common(origin: Origin, sizes: Mapping[str, int], found: Collected) -> Common:
    """The values of ``common.pt``. What is not plain is left out, with a note, unless pickles are allowed."""
    if COMMON_KEY not in sizes:
        found.problems.append(f"{COMMON_KEY} is missing")
        return Common({}, None)
    nbytes = sizes[COMMON_KEY]
    archive = open_archive(Part(Ranges(origin.store, COMMON_KEY, nbytes), 0, nbytes), COMMON_KEY)
    state, left = state_of(archive, found, COMMON, allow_pickle=origin.allow_pickle)
    if left:
        found.notes.append(
            f"{origin.store.url}: left out, since only code can make them (allow_pickle=True runs it): {listed(left)}"
        )
    values = without_left(state)
    if not isinstance(values, dict):
        found.problems.append(f"{COMMON_KEY} holds no dict")
        return Common({}, None)
    step = values.get("iteration")
    return Common(values, step if type(step) is int and step >= 0 else None)
