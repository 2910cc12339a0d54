"""zarr-developers/zarr-python#3682: two ranks that each own a part of one stored chunk lose updates."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cloudckpt
from tests.field.places import Place
from tests.ranks import RankPool

FULL = torch.arange(10, dtype=torch.float32)
FIRSTS = [0, 3, 6, 9]
"""Where the shards of sizes 3, 3, 3, 1 begin."""


def save_again_and_again(place: Place, layout: str, repeats: int) -> list[int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = distribute_tensor(FULL, mesh, [Shard(0)], src_data_rank=None)
    for repeat in range(repeats):
        # Four elements: neither the shards' edges nor a divisor of them.
        place.save({"w": shard}, f"step-{repeat}", layout=layout, config=place.config(chunk_bytes=16))
    return list(shard.to_local().shape)


def ranks_of_chunks(checkpoint: cloudckpt.Checkpoint) -> list[tuple[int, int, int]]:
    """First element, number of elements and writing rank of every chunk of the only tensor."""
    manifest = checkpoint.manifest
    grid = manifest.grids[0]
    boxes = [grid.box(chunk) for chunk in range(grid.num_chunks)]
    objects = manifest.columns.object.tolist()
    return [(box.offset[0], box.shape[0], manifest.objects[o].rank) for box, o in zip(boxes, objects, strict=True)]


@pytest.mark.parametrize(
    ("place", "layout", "repeats"),
    [("local", "packed", 50), ("local", "zarr", 50), ("juicefs", "zarr", 5), ("moto", "packed", 5)],
    indirect=["place"],
)
def test_every_stored_object_has_one_writer(place: Place, ranks: RankPool, layout: str, repeats: int):
    assert ranks.run(4, save_again_and_again, place, layout, repeats) == [[3], [3], [3], [1]]
    for repeat in range(repeats):
        target = {"w": torch.zeros(10)}
        place.load(target, f"step-{repeat}")
        assert torch.equal(target["w"], FULL)
        with cloudckpt.open_checkpoint(
            place.url(f"step-{repeat}"), storage_options=place.options, config=place.config()
        ) as checkpoint:
            for first, length, rank in ranks_of_chunks(checkpoint):
                assert FIRSTS[rank] <= first
                assert first + length <= [*FIRSTS[1:], 10][rank]
            keys = [entry.key for entry in checkpoint.manifest.objects]
        assert len(set(keys)) == len(keys)
        assert place.keys(f"step-{repeat}") == sorted([*keys, "manifest.json"])
