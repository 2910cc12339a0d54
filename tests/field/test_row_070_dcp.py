"""pytorch/pytorch#133923, of DCP: checkpoints of earlier torch releases are imported.

Written by those releases themselves, with ``tests/data/make_dcp.py``: 1.13 has other module paths, sharded tensors and
flat keys; 2.4 has DTensors and notes the nesting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import import_from
from tests.data.make_dcp import numbers
from tests.test_import_dcp import same_state

DATA = Path(__file__).parents[1] / "data"
MODEL = {
    "embed.weight": numbers((5, 4), torch.bfloat16, 1),
    "layer.0.weight": numbers((4, 6), torch.float32, 100),
    "layer.0.bias": numbers((4,), torch.float32, 200),
    "turned": numbers((3, 4), torch.float32, 300).t(),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
}
MOMENT = numbers((5, 4), torch.float32, 400)
EXTRA = {"epoch": 3, "name": "run", "seen": [1, 2, 3], "flags": {"on": True}}
GROUPS = [{"lr": 0.125, "betas": (0.9, 0.95), "params": ["embed.weight"], "fused": None}]
STATES: dict[str, dict[str, Any]] = {
    "1.13": {**{f"model.{key}": value for key, value in MODEL.items()}, "optimizer.exp_avg": MOMENT, "extra": EXTRA},
    "2.4": {
        "model": MODEL,
        "optimizer": {
            "state": {"embed.weight": {"step": torch.tensor(7.0), "exp_avg": MOMENT}},
            "param_groups": GROUPS,
        },
        "extra": EXTRA,
    },
}


@pytest.mark.parametrize("release", STATES)
def test_checkpoints_of_earlier_releases(tmp_path: Path, release: str):
    import_from("dcp", DATA / f"dcp-{release}", tmp_path / "ours")
    same_state(cloudckpt.read(tmp_path / "ours"), STATES[release])
