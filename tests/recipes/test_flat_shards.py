"""Flat buffers of ZeRO and its kin: saved as they are, loaded under any other layout, on real ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from cloudckpt import FlatLayout, FlatParam, FlatShards
from cloudckpt.errors import InvalidStateError, MismatchError
from tests.ranks import RankPool
from tests.sharding import blank, make_mesh, noise, same_bits, shard


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_one(tmp_path: Path, state: Any, target: Any, **options: Any) -> cloudckpt.LoadReport:
    cloudckpt.save(state, tmp_path / "c")
    return cloudckpt.load(target, tmp_path / "c", **options)


SHAPES = {"emb.weight": (13, 6), "norm.weight": (7,), "w": (4, 3, 5), "scale": ()}


LAYOUT = FlatLayout.of(SHAPES, align=4)


BOXES = FlatLayout.of(SHAPES, align=4, as_boxes=True)


def master(name: str) -> torch.Tensor:
    return noise(SHAPES[name], seed=len(name))


def flat_part(size: int, rank: int, layout: FlatLayout = LAYOUT, *, filled: bool) -> FlatShards:
    """One of ``size`` equal parts; padding holds -1."""
    length = -(-(layout.numel + 5) // size)
    buffer = torch.full((length * size,), -1.0)
    for param in layout.params if filled else ():
        whole = master(param.name)
        if param.offset is not None:
            whole = whole[tuple(slice(o, o + n) for o, n in zip(param.offset, param.shape, strict=True))]
        buffer[param.position : param.position + param.numel] = whole.reshape(-1)
    return FlatShards(buffer[rank * length : (rank + 1) * length].clone(), layout, rank * length)


def zero_through_all_layouts(folder: str, layout: FlatLayout) -> list[str]:
    """Flat over 4 ranks, over 3, as DTensors under TP=2, flat over 2 again, whole. bf16 weights stand beside."""
    wrong: list[str] = []
    rank = dist.get_rank()
    groups = {size: dist.new_group(range(size)) for size in (2, 3)}
    mesh = make_mesh((2,), ranks=[0, 1])
    weights = {name: master(name).nan_to_num().bfloat16() for name in SHAPES}

    def state(part: Any) -> dict[str, Any]:
        return {"model": {name: w.clone() for name, w in weights.items()}, "master": part}

    cloudckpt.save(state(flat_part(4, rank, layout, filled=True)), f"{folder}/dp4")
    if rank < 3:
        part = flat_part(3, rank, filled=False)
        cloudckpt.load(state(part), f"{folder}/dp4", group=groups[3])
        if not same_bits(part.local, flat_part(3, rank, filled=True).local):
            wrong.append("dp3")
        cloudckpt.save(state(part), f"{folder}/dp3", group=groups[3])
    dist.barrier()
    placements = {"emb.weight": Shard(1), "norm.weight": Shard(0), "w": Shard(1), "scale": Replicate()}
    if rank < 2:
        for source in ("dp4", "dp3"):
            split = {name: blank(master(name), mesh, [placements[name]]) for name in SHAPES}
            cloudckpt.load(state(split), f"{folder}/{source}", group=groups[2])
            for name in SHAPES:
                right = same_bits(local(split[name]), local(shard(master(name), mesh, [placements[name]])))
                wrong += [] if right else [f"tp2 {source} {name}"]
        cloudckpt.save(state(split), f"{folder}/tp2", group=groups[2])
        part = flat_part(2, rank, filled=False)
        cloudckpt.load(state(part), f"{folder}/tp2", group=groups[2])
        if not same_bits(part.local, flat_part(2, rank, filled=True).local):
            wrong.append("dp2")
    dist.barrier()
    for source in ("dp4", "dp3", "tp2"):
        found = cloudckpt.read(f"{folder}/{source}")
        wrong += [f"{source} {n}" for n in SHAPES if not same_bits(found["master"][n], master(n))]
        wrong += [f"{source} bf16 {n}" for n in SHAPES if not same_bits(found["model"][n], weights[n])]
    return wrong


@pytest.mark.parametrize("layout", [LAYOUT, BOXES], ids=["flat", "boxes"])
def test_flat_buffers_under_any_layout(ranks: RankPool, tmp_path: Path, layout: FlatLayout):
    assert ranks.run(4, zero_through_all_layouts, str(tmp_path), layout) == [[]] * 4
    stored = cloudckpt.open_checkpoint(tmp_path / "dp4").arrays["master.w"]
    assert stored.shape == ((4, 3, 5) if layout.as_boxes else (60,))


def tensor_parallel_flat(folder: str) -> list[str]:
    """DistributedOptimizer below TP=2: the buffer of a TP rank holds its part of every tensor, cut over DP=2."""
    wrong: list[str] = []
    tp, dp = divmod(dist.get_rank(), 2)

    def layout(size: int, coordinate: int) -> FlatLayout:
        return FlatLayout(
            (
                FlatParam("emb.weight", (13, 6 // size), 0, (13, 6), (0, coordinate * 6 // size)),
                FlatParam("w", (4 // size, 3, 5), 80, (4, 3, 5), (coordinate * 4 // size, 0, 0)),
            )
        )

    for check in ("plain", "all"):
        part = flat_part(2, dp, layout(2, tp), filled=True)
        cloudckpt.save({"m": part}, f"{folder}/{check}", config=cloudckpt.Config(check_replicas=check))
    for name, whole in cloudckpt.read(f"{folder}/all")["m"].items():
        wrong += [] if same_bits(whole, master(name)) else [name]
    part = flat_part(4, dist.get_rank(), layout(1, 0), filled=False)
    cloudckpt.load({"m": part}, f"{folder}/plain")
    if not same_bits(part.local, flat_part(4, dist.get_rank(), layout(1, 0), filled=True).local):
        wrong.append("dp4")
    return wrong


def test_flat_buffers_below_tensor_parallelism(ranks: RankPool, tmp_path: Path):
    assert ranks.run(4, tensor_parallel_flat, str(tmp_path)) == [[]] * 4


@pytest.mark.parametrize(
    ("local", "layout", "start"),
    [
        (torch.zeros(2, 2), LAYOUT, 0),
        (torch.zeros(4)[::2], LAYOUT, 0),
        (torch.zeros(4), LAYOUT, -1),
        (torch.zeros(4), LAYOUT, 1.0),
        (torch.zeros(4), {"w": (4,)}, 0),
        ([1.0], LAYOUT, 0),
    ],
)
def test_flat_shards_that_cannot_be(local: Any, layout: Any, start: Any):
    with pytest.raises(InvalidStateError, match="FlatShards"):
        FlatShards(local, layout, start)


def test_one_parameter_of_a_flat_buffer_may_stand_anywhere(tmp_path: Path):
    """Under the paths of an optimizer's state, and exchanged with plain tensors there."""
    layout = FlatLayout.of({"a": (2, 3), "b": (3,)}, align=2)
    avg, square = (FlatShards(torch.arange(9.0) * k, layout, 0) for k in (1, 2))

    def state(avg: Any, square: Any) -> Any:
        return {"state": {name: {"avg": avg[name], "square": square[name], "step": 3} for name in ("a", "b")}}

    plain = {
        name: {"avg": torch.zeros(s), "square": torch.zeros(s), "step": 0} for name, s in (("a", (2, 3)), ("b", 3))
    }
    load_one(tmp_path, state(avg, square), {"state": plain})
    assert plain["a"]["square"].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert plain["b"]["avg"].tolist() == [6, 7, 8]
    cloudckpt.save({"state": plain}, tmp_path / "plain")
    again = [FlatShards(torch.zeros(9), layout, 0) for _ in range(2)]
    cloudckpt.load(state(*again), tmp_path / "plain")
    assert again[1].local.tolist() == square.local.tolist()
    tree = [cloudckpt.open_checkpoint(tmp_path / name).arrays for name in ("c", "plain")]
    assert {*tree[0]} == {*tree[1]}


def test_parameters_that_are_not_stored_are_missing(tmp_path: Path):
    layout = FlatLayout.of({"a": (2,), "b": (2,)})
    cloudckpt.save({"m": {"a": torch.ones(2), "c": torch.ones(2)}}, tmp_path / "c")
    flat = FlatShards(torch.zeros(4), layout, 0)
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"m": flat}, tmp_path / "c")
    assert (caught.value.missing, caught.value.unexpected) == (["m.b"], ["m.c"])
    report = cloudckpt.load({"m": flat, "n": flat}, tmp_path / "c", strict=False)
    assert report.missing == ["m.b", "n.a", "n.b"]
    assert flat.local.tolist() == [1, 1, 0, 0]
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"m": FlatShards(torch.zeros(4), FlatLayout.of({"a": (1, 2), "c": (3,)}), 0)}, tmp_path / "c")
    assert caught.value.shapes == {"m.a": ((2,), (1, 2)), "m.c": ((2,), (3,))}
    with pytest.raises(InvalidStateError, match=r"'m.b': no rank holds \[1:2\]"):
        cloudckpt.save({"m": FlatShards(torch.zeros(3), layout, 0)}, tmp_path / "d")


def random_jobs(seeds: range, folder: str) -> list[str]:
    """Any parameters, any spacing, cuts anywhere (also none of it on a rank): to other cuts, and to DTensors."""
    wrong: list[str] = []
    rank, mesh = dist.get_rank(), make_mesh((4,))
    for seed in seeds:
        rng = random.Random(seed)
        whole = {
            f"p{i}": noise([rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randrange(4))], seed=seed + i)
            for i in range(rng.randrange(1, 5))
        }
        parts = []
        for filled in (True, False):
            names = rng.sample([*whole], len(whole))
            shapes = {name: tuple(whole[name].shape) for name in names}
            layout = FlatLayout.of(shapes, align=rng.choice([1, 1, 4, 7]), as_boxes=rng.random() < 0.4)
            size = layout.numel + rng.randrange(4)
            cuts = [0, *sorted(rng.randrange(size + 1) for _ in range(3)), size]
            buffer = torch.zeros(size)
            for param in layout.params:
                buffer[param.position : param.position + param.numel] = whole[param.name].reshape(-1)
            expected = buffer[cuts[rank] : cuts[rank + 1]]
            parts.append((FlatShards(expected.clone() if filled else expected * 0, layout, cuts[rank]), expected))
        (saved, _), (target, expected) = parts
        config = cloudckpt.Config(chunk_bytes=rng.choice([16, 64, 4096]))
        cloudckpt.save(saved, f"{folder}/{seed}", config=config, compression=rng.choice([None, "zstd"]))
        cloudckpt.load(target, f"{folder}/{seed}")
        wrong += [] if same_bits(target.local, expected) else [f"flat {seed}"]
        placements = {n: [Shard(rng.randrange(w.dim()))] if w.dim() else [Replicate()] for n, w in whole.items()}
        split = {name: blank(w, mesh, placements[name]) for name, w in whole.items()}
        cloudckpt.load(split, f"{folder}/{seed}")
        for name, w in whole.items():
            right = same_bits(local(split[name]), local(shard(w, mesh, placements[name])))
            wrong += [] if right else [f"split {seed} {name}"]
    return wrong


def test_random_buffers(ranks: RankPool, tmp_path: Path):
    assert ranks.run(4, random_jobs, range(20), str(tmp_path)) == [[]] * 4
