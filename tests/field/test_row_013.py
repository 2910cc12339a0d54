"""NVIDIA-NeMo/Megatron-Bridge#5184: a step in the making counts as the newest, and the only whole one is removed."""

from __future__ import annotations

import torch

from cloudckpt import Checkpointer
from tests.field.places import Place

PARTIAL = ["step-00001500/0123456789ab/r00000-000.zarr.zip", "step-00001500/0123456789ab.zarr/w/c/0"]


def test_what_is_not_committed_does_not_count(place: Place):
    run = place.store("")
    for key in PARTIAL:
        run.put(key, b"half of it")
    with Checkpointer(place.root, storage_options=place.options, config=place.config(), keep_last=1) as checkpoints:
        checkpoints.save(500, {"w": torch.zeros(10)})
        checkpoints.save(1000, {"w": torch.ones(10)})
        assert checkpoints.prune() in ([500], [])  # what the commit has begun may be done by now
        assert checkpoints.steps() == [1000]
        assert checkpoints.latest() == 1000
        target = {"w": torch.zeros(10)}
        assert checkpoints.load(target) == 1000
        assert torch.equal(target["w"], torch.ones(10))
    assert sorted(key for key in place.keys("") if key.startswith("step-00001500/")) == sorted(PARTIAL)
    run.close()
