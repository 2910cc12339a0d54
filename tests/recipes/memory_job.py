"""A process of its own that saves and loads, and tells by how much its resident memory rose meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cloudckpt

MIB = 1024 * 1024


def extra_bytes(action: Callable[[], Any]) -> int:
    """The highest resident memory during ``action``, less that before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    options = order["storage_options"]
    config = cloudckpt.Config(engine=order["engine"], memory_bytes=order["memory_bytes"], part_bytes=5 * MIB)
    arguments: dict[str, Any] = {"layout": order["layout"], "compression": order["compression"]}
    small = {"w": torch.ones(64, 64)}
    cloudckpt.save(small, order["url"] + "/warm", storage_options=options, config=config, **arguments)
    cloudckpt.load(small, order["url"] + "/warm", storage_options=options, config=config)
    # Chunks of these are strided in memory, so each has to be gathered.
    state = {f"w{i}": torch.arange(16 * MIB, dtype=torch.int32).view(4096, 4096).add_(i) for i in range(3)}
    url = order["url"] + "/large"
    saved = extra_bytes(lambda: cloudckpt.save(state, url, storage_options=options, config=config, **arguments))
    for tensor in state.values():
        tensor.zero_()
    loaded = extra_bytes(lambda: cloudckpt.load(state, url, storage_options=options, config=config))
    right = all(int(t[0, 0]) == i and int(t[-1, -1]) == 16 * MIB - 1 + i for i, t in enumerate(state.values()))
    print(json.dumps({"save": saved, "load": loaded, "right": right}))


if __name__ == "__main__":
    main()
