"""States on an accelerator that torch knows from a plugin only: neither cuda nor nccl may be taken for granted."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from tests.pretend_device import NAME, host_view
from tests.pretend_group import PretendGroup
from tests.ranks import RankPool
from tests.sharding import bits, noise

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.uint16]


def full_tensors() -> dict[str, torch.Tensor]:
    return {str(dtype): noise((6, 5), dtype, seed) for seed, dtype in enumerate(DTYPES)}


def on_device(state: dict[str, torch.Tensor], device: str, *, blank: bool) -> dict[str, Any]:
    """Whole tensors, a strided view, a scalar and a DTensor, on every rank. ``blank``: zeros of the same layout."""
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    made: dict[str, Any] = {}
    for name, tensor in state.items():
        held = tensor.to(device)
        made[name] = torch.zeros_like(held) if blank else held
    first = made[str(torch.float32)]
    made["view"] = first.clone().t()[1:, ::2]
    made["scalar"] = first[0, 0].clone()
    rows = first.tensor_split(dist.get_world_size())[dist.get_rank()].clone()
    for name, placement in (("rows", Shard(0)), ("replica", Replicate())):
        local = rows if placement.is_shard() else first.clone()
        made[name] = DTensor.from_local(local, mesh, [placement], run_check=False, shape=(6, 5), stride=(5, 1))
    return made


def held_bits(state: dict[str, Any]) -> dict[str, bytes]:
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}
    return {name: bits(host_view(t) if t.device.type == NAME else t) for name, t in local.items()}


def save_and_load(url: str) -> list[str]:
    assert dist.get_backend() == "pretendccl"
    tensors = full_tensors()
    state = on_device(tensors, NAME, blank=False)
    cloudckpt.save(state, url)
    wrong = []
    for device in (NAME, "cpu"):
        if device == "cpu" and dist.get_world_size() > 1:
            continue  # the device's group has no CPU meshes
        target = on_device(tensors, device, blank=True)
        assert {t.device.type for t in target.values()} == {device}
        cloudckpt.load(target, url)
        expected, found = held_bits(state), held_bits(target)
        wrong += [f"{name} on {device}" for name in expected if expected[name] != found[name]]
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_state_on_the_device_comes_back(accelerated_ranks: RankPool, tmp_path: Path, num_ranks: int):
    assert accelerated_ranks.run(num_ranks, save_and_load, str(tmp_path)) == [[]] * num_ranks


def test_read_of_a_state_from_the_device(accelerated_ranks: RankPool, tmp_path: Path):
    accelerated_ranks.run(2, save_and_load, str(tmp_path))
    found = cloudckpt.read(str(tmp_path))
    for name, tensor in full_tensors().items():
        assert bits(found[name]) == bits(tensor)
    assert found["rows"].shape == (6, 5)


def exchanged(url: str, device: str, exchange: str) -> dict[str, Any]:
    """A load by 2 ranks, of which both want all; and what went over the device's group."""
    group = dist.group.WORLD
    assert isinstance(group, PretendGroup)
    tensors = full_tensors()
    target = {name: torch.zeros_like(tensor, device=device) for name, tensor in tensors.items()}
    before = group.sent_bytes.total()
    report = cloudckpt.load(target, url, strict=False, exchange=exchange)
    return {
        "wrong": [name for name, bits_of in held_bits(target).items() if bits_of != bits(tensors[name])],
        "once": report.bytes_fetched / report.bytes_needed,
        "sent": report.bytes_sent,
        "over the device": group.sent_bytes.total() - before,
    }


@pytest.mark.parametrize("exchange", ["auto", "broadcast", "alltoall"])
def test_exchange_of_device_tensors_goes_over_the_devices_group(
    accelerated_ranks: RankPool, tmp_path: Path, exchange: str
):
    accelerated_ranks.run(2, save_and_load, str(tmp_path))
    for found in accelerated_ranks.run(2, exchanged, str(tmp_path), NAME, exchange):
        assert found["wrong"] == []
        assert 1 <= found["once"] < 1.5  # tiny chunks, with gaps between them
        assert found["sent"] > 0
        assert found["over the device"] > 0


def test_exchange_of_host_tensors_does_not(accelerated_ranks: RankPool, tmp_path: Path):
    accelerated_ranks.run(2, save_and_load, str(tmp_path))
    for found in accelerated_ranks.run(2, exchanged, str(tmp_path), "cpu", "auto"):
        assert found["wrong"] == []
        assert found["sent"] > 0 == found["over the device"]


def collectives() -> dict[str, Any]:
    """What came of each, on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    said: dict[str, Any] = {}
    tensor = torch.full((3,), float(rank + 1), device=NAME)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()
    said["reduced"] = tensor.tolist()
    source = torch.arange(size, device=NAME) + 10 * rank
    received = torch.empty_like(source)
    dist.all_to_all_single(received, source)
    said["received"] = received.tolist()
    dist.broadcast(source, src=size - 1)
    said["broadcast"] = source.tolist()
    refused = {
        "cpu": lambda: dist.broadcast(torch.ones(3), src=0),
        "bool": lambda: dist.broadcast(torch.ones(3, dtype=torch.bool, device=NAME), src=0),
        "fp8": lambda: dist.broadcast(torch.ones(3, dtype=torch.float8_e4m3fn, device=NAME), src=0),
        "object": lambda: dist.broadcast_object_list([1], src=0),
        "gather": lambda: dist.all_gather_object([None] * size, rank),
    }
    for name, call in refused.items():
        with pytest.raises((RuntimeError, TypeError), match="pretendccl: "):
            call()
        said[name] = "refused"
    return said


def test_its_collectives_are_as_picky_as_real_ones(accelerated_ranks: RankPool):
    refused = dict.fromkeys(("cpu", "bool", "fp8", "object", "gather"), "refused")
    first, second = accelerated_ranks.run(2, collectives)
    assert first == {
        "reduced": [3.0] * 3,
        "received": [0, 10],
        "broadcast": [10, 11],
        **refused,
    }
    assert second == {**first, "received": [1, 11]}


def operations() -> list[str]:
    """Which did other things on the device than on the CPU."""
    cpu = noise((4, 6), torch.int32, 3).float()
    device = cpu.to(NAME)
    calls = {
        "slice": lambda t: t[1:, ::2],
        "in place on a view": lambda t: t.clone().t()[2].add_(1),
        "out": lambda t: torch.add(t, t, out=torch.empty(0, device=t.device)),
        "factory": lambda t: torch.arange(7, device=t.device) + torch.ones(7, device=t.device),
        "cast": lambda t: t.to(torch.bfloat16),
        "bytes": lambda t: t.reshape(-1).view(torch.uint8),
        "many": lambda t: torch.cat([t, *t.split(2)]),
        "conjugated": lambda t: torch.complex(t, t).conj() * 2,
        "resized": lambda t: t.clone().resize_(2, 3),
    }
    wrong = [name for name, call in calls.items() if bits(call(device).cpu()) != bits(call(cpu).resolve_conj())]
    view = device[1:]
    assert view.untyped_storage().data_ptr() == device.untyped_storage().data_ptr()
    assert type(view) is torch.Tensor
    assert view.device == torch.device(NAME, 0)
    for touch in (device.numpy, lambda: torch.empty(0).set_(device.untyped_storage()).numpy()):
        with pytest.raises((RuntimeError, TypeError)):
            touch()
    weight = torch.nn.Linear(6, 6).to(NAME)
    optimizer = torch.optim.AdamW(weight.parameters())
    weight(device).sum().backward()
    optimizer.step()
    assert all(math.isfinite(s["exp_avg"].sum().item()) for s in optimizer.state.values())
    return wrong


def test_its_tensors_are_like_others(accelerated_ranks: RankPool):
    assert accelerated_ranks.run(1, operations) == [[]]
