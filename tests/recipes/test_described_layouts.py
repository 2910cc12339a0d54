"""What mixed-parallel jobs hold, described by pieces or by rules, saved by some ranks and loaded by others."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt import ParallelConfig, Piece, ShardedTensor, ShardingRules
from cloudckpt.errors import CloudckptError, InvalidStateError, MismatchError, NotFoundError, RankError
from tests.ranks import RankPool
from tests.sharding import error_of, make_mesh, noise, same_bits, shard

VOCAB = 10
FULL = {
    "qkv": noise((24, 6), torch.bfloat16, 1),  # q 16 rows, k and v 4 each
    "gate_up": noise((16, 6), seed=2),  # 8 rows each
    "lora_b": noise((20, 2), seed=3),  # q 16, v 4
    "embedding": noise((VOCAB, 6), seed=4),
    "experts": noise((4, 6, 8), seed=5),
    "checkers": noise((8, 8), seed=6),
    "norm": noise((6,), seed=7),
}
SEGMENTS = {"qkv": [16, 4, 4], "gate_up": [8, 8], "lora_b": [16, 4]}

RULES = [
    ("model.qkv", {"tp": 0}, {0: SEGMENTS["qkv"]}),
    ("*.gate_up", {"tp": 0}, {0: SEGMENTS["gate_up"]}),
    ("*.lora_b", {"tp": -2}, {0: SEGMENTS["lora_b"]}),
]


def packed(name: str, tp: int, rank: int) -> torch.Tensor:
    """Megatron's way: a rank's part of each segment, one after another."""
    return torch.cat([part.chunk(tp)[rank] for part in FULL[name].split(SEGMENTS[name])])


def packed_pieces(name: str, tp: int, rank: int) -> list[Piece]:
    pieces, local, start = [], 0, 0
    columns = FULL[name].shape[1]
    for size in SEGMENTS[name]:
        share = size // tp
        pieces.append(Piece((local, 0), (start + rank * share, 0), (share, columns)))
        local, start = local + share, start + size
    return pieces


def vocabulary(tp: int, rank: int, multiple: int) -> tuple[torch.Tensor, list[Piece]]:
    """An embedding padded to a multiple: the last ranks hold padding, some of them nothing else."""
    rows = -(-VOCAB // multiple) * multiple // tp
    first = rank * rows
    held = max(0, min(VOCAB - first, rows))
    local = torch.full((rows, 6), -7.0)
    local[:held] = FULL["embedding"][first : first + held]
    return local, [Piece((0, 0), (first, 0), (held, 6))] if held else []


def checkers(rank: int, size: int) -> tuple[torch.Tensor, list[Piece]]:
    """Every size-th square of 2 x 2, in reverse order, stacked."""
    squares = [(2 * (i // 4), 2 * (i % 4)) for i in range(16)][rank::size][::-1]
    parts = [FULL["checkers"][r : r + 2, c : c + 2] for r, c in squares]
    pieces = [Piece((2 * i, 0), corner, (2, 2)) for i, corner in enumerate(squares)]
    return torch.cat(parts), pieces


def experts(rank: int, ep: int, etp: int) -> tuple[torch.Tensor, list[Piece]]:
    """Cut along two dims: whole experts over ep, their columns over etp."""
    i, j = divmod(rank % (ep * etp), etp)
    held, columns = 4 // ep, 8 // etp
    local = FULL["experts"][i * held : (i + 1) * held, :, j * columns : (j + 1) * columns].clone()
    return local, [Piece((0, 0, 0), (i * held, 0, j * columns), (held, 6, columns))]


def by_pieces(rank: int, size: int, multiple: int) -> dict[str, Any]:
    """What a rank of a job of TP=size holds, each tensor described by its pieces."""
    state: dict[str, Any] = {
        name: ShardedTensor(packed(name, size, rank), FULL[name].shape, packed_pieces(name, size, rank))
        for name in SEGMENTS
    }
    local, pieces = vocabulary(size, rank, multiple)
    state["embedding"] = ShardedTensor(local, (VOCAB, 6), pieces, padding=-7)
    local, pieces = checkers(rank, size)
    state["checkers"] = ShardedTensor(local, (8, 8), pieces)
    local, pieces = experts(rank, min(size, 2), max(size // 2, 1))
    state["experts"] = ShardedTensor(local, (4, 6, 8), pieces)
    state["norm"] = FULL["norm"].clone()
    return {"model": state}


def local_of(tensor: Any) -> torch.Tensor:
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor


def save_by_pieces(url: str, multiple: int) -> None:
    cloudckpt.save(by_pieces(dist.get_rank(), dist.get_world_size(), multiple), url)


def load_by_pieces(url: str, multiple: int) -> list[str]:
    """Names of the tensors that came out wrong."""
    expected = by_pieces(dist.get_rank(), dist.get_world_size(), multiple)["model"]
    target = by_pieces(dist.get_rank(), dist.get_world_size(), multiple)
    for tensor in target["model"].values():
        local_of(tensor).fill_(3)
    target["model"]["norm"] = torch.zeros(6)
    cloudckpt.load(target, url)
    return [
        name for name, tensor in target["model"].items() if not same_bits(local_of(tensor), local_of(expected[name]))
    ]


def check_stored(url: Path) -> None:
    found = cloudckpt.read(url)["model"]
    for name, full in FULL.items():
        assert same_bits(found[name], full), name


def test_pieces_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path):
    """TP 4 -> 2 -> 1, and TP 2 -> 4 with a vocabulary that is padded to more."""
    ranks.run(4, save_by_pieces, str(tmp_path / "tp4"), 4)
    ranks.run(2, save_by_pieces, str(tmp_path / "tp2"), 2)
    for url in (tmp_path / "tp4", tmp_path / "tp2"):
        check_stored(url)
        for size, multiple in ((1, 1), (2, 4), (4, 4), (4, 16)):
            assert ranks.run(size, load_by_pieces, str(url), multiple) == [[]] * size
        whole = {"model": {name: torch.zeros_like(full) for name, full in FULL.items()}}
        cloudckpt.load(whole, url)
        assert all(same_bits(whole["model"][name], full) for name, full in FULL.items())


def by_rules(config: ParallelConfig, rank: int) -> tuple[dict[str, Any], ShardingRules]:
    """The same with plain tensors and rules; experts over ep and etp, and what FSDP would leave of gate_up."""
    at = config.coordinates(rank)
    state = {name: packed(name, config.tp, at["tp"]) for name in SEGMENTS}
    fsdp = state["gate_up"].chunk(config.dp_shard)
    state["gate_up"] = fsdp[at["dp_shard"]]
    state["experts"] = FULL["experts"].chunk(config.ep)[at["ep"]].chunk(config.size("etp"), 2)[at["etp"]].clone()
    state["checkers"] = FULL["checkers"].chunk(config.tp, 1)[at["tp"]].clone()
    embedding = FULL["embedding"].chunk(config.tp)
    state["embedding"] = embedding[at["tp"]].clone() if at["tp"] < len(embedding) else torch.zeros(0, 6)
    state["norm"] = FULL["norm"].clone()
    rules = [
        *(rule for rule in RULES if rule[0] != "*.gate_up"),
        ("*.gate_up", {"tp": 0, "dp_shard": 0}, {0: SEGMENTS["gate_up"]}),
        ("*.experts", {"ep": 0, "etp": 2}),
        ("*.checkers", {"tp": 1}),
        ("*.embedding", {"tp": 0}, {0: [VOCAB]}),
    ]
    return {"model": state}, ShardingRules(rules, config)


def save_by_rules(url: str, config: ParallelConfig) -> Any:
    state, rules = by_rules(config, dist.get_rank())
    cloudckpt.save(state, url, rules=rules)
    return cloudckpt.open_checkpoint(url).manifest.document.tree["model"]["qkv"]["layout"]


def load_by_rules(url: str, config: ParallelConfig) -> list[str]:
    expected, rules = by_rules(config, dist.get_rank())
    target = {"model": {name: torch.full_like(tensor, 3) for name, tensor in expected["model"].items()}}
    cloudckpt.load(target, url, rules=rules)
    return [name for name, tensor in target["model"].items() if not same_bits(tensor, expected["model"][name])]


CONFIGS = [
    ParallelConfig(tp=4, ep=2, etp=2),
    ParallelConfig(tp=2, dp_shard=2, ep=4, etp=1),
    ParallelConfig(tp=2, dp_replicate=2, ep=2, etp=2, order=("tp", "dp_replicate")),
    ParallelConfig(tp=2, ep=2, etp=1),
    ParallelConfig(),
]


def test_rules_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path):
    for number, config in enumerate(CONFIGS):
        url = str(tmp_path / str(number))
        layouts = ranks.run(config.world_size, save_by_rules, url, config)
        assert layouts[0] == {"axes": {"tp": [0, config.tp]}, "segments": {"0": [16, 4, 4]}}
        check_stored(tmp_path / str(number))
    for number, config in enumerate(CONFIGS):
        for other in (number, (number + 1) % len(CONFIGS), (number + 2) % len(CONFIGS)):
            found = ranks.run(config.world_size, load_by_rules, str(tmp_path / str(other)), config)
            assert found == [[]] * config.world_size, (config, CONFIGS[other])
    assert ranks.run(4, load_by_pieces, str(tmp_path / "1"), 4) == [[]] * 4


# Replicas


def save_replicas(url: str, kind: str) -> None:
    """Rank 0 and 1 hold halves, rank 2 and 3 the whole, or halves that are cut elsewhere."""
    rank = dist.get_rank()
    spans = [(0, 4), (4, 8), *{"whole": [(0, 8), (0, 8)], "elsewhere": [(0, 3), (3, 8)]}[kind]]
    start, stop = spans[rank]
    local = FULL["checkers"][start:stop]
    tensor = ShardedTensor(local, (8, 8), [Piece((0, 0), (start, 0), local.shape)], replica=rank // 2)
    cloudckpt.save({"model": {"w": tensor}}, url)


def test_replicas_may_be_cut_in_other_ways(ranks: RankPool, tmp_path: Path):
    for kind in ("whole", "elsewhere"):
        ranks.run(4, save_replicas, str(tmp_path / kind), kind)
        assert same_bits(cloudckpt.read(tmp_path / kind)["model"]["w"], FULL["checkers"])


# Bad input


def rows(start: int, stop: int, replica: int = 0, **change: Any) -> ShardedTensor:
    piece = Piece((0, 0), (start, 0), (stop - start, 4))
    arguments: dict[str, Any] = {"global_shape": (8, 4), "pieces": [piece], "replica": replica} | change
    return ShardedTensor(torch.full((stop - start, 4), float(start)), **arguments)


def tp_rules(*rules: Any, **sizes: int) -> ShardingRules:
    return ShardingRules(rules or [("w", {"tp": 0})], ParallelConfig(**(sizes or {"tp": 4})))


def bad_save(rank: int, name: str) -> tuple[Any, ShardingRules | None]:
    """The state of one rank of four, and the rules that it calls save() with."""
    w = torch.full((2, 4), float(rank))
    part = rows(2 * rank, 2 * rank + 2)
    mesh = make_mesh((4,)) if name.startswith("dtensor") else None
    cases: dict[str, Callable[[], tuple[Any, ShardingRules | None]]] = {
        "gap": lambda: ({"w": rows(4, 4, pieces=[]) if rank == 2 else part}, None),
        "overlap": lambda: ({"w": rows(1, 4) if rank == 1 else part}, None),
        "overlap of one replica": lambda: ({"w": rows(4 * (rank % 2), 8, replica=rank // 2)}, None),
        "outside": lambda: ({"w": rows(7, 9) if rank == 3 else part}, None),
        "float": lambda: ({"w": rows(2 * rank, 2 * rank + 2, replica=1.0 if rank == 1 else 0)}, None),
        "two shapes": lambda: ({"w": rows(6, 8, global_shape=(9, 4)) if rank == 3 else part}, None),
        "plain beside pieces": lambda: ({"w": torch.zeros(8, 4) if rank == 0 else part}, None),
        "dtensor beside pieces": lambda: (
            {"w": shard(torch.zeros(8, 4), mesh, [Shard(0)]) if rank < 2 else rows(2, 8)},  # type: ignore[arg-type]
            None,
        ),
        "no config": lambda: ({"w": w}, ShardingRules([("w", {"tp": 0})])),
        "other size": lambda: ({"w": w}, tp_rules(tp=2)),
        "two rules": lambda: ({"w": w}, tp_rules(("w", {"tp": rank % 2}))),
        "two configs": lambda: ({"w": w}, tp_rules(**({"tp": 4} if rank else {"dp_shard": 4}))),
        "rules on one rank only": lambda: ({"w": w}, tp_rules() if rank == 0 else None),
        "no such tensor": lambda: ({"w": w}, tp_rules(("w", {"tp": 0}), ("v", {"tp": 0}))),
        "contradiction": lambda: ({"w": w}, tp_rules(("w", {"tp": 0}), ("?", {"tp": 1}))),
        "no such dim": lambda: ({"w": w}, tp_rules(("w", {"tp": 2}))),
        "uneven": lambda: ({"w": torch.zeros(2 if rank < 3 else 1, 4)}, tp_rules()),
        "not that uneven": lambda: (
            {"w": torch.zeros(3 if rank < 2 else 1, 4)},
            tp_rules(("w", {"tp": 0}, {0: [8]})),
        ),
        "no rule": lambda: ({"w": w, "v": w}, tp_rules()),
        "wrong axis": lambda: ({"w": w}, tp_rules(tp=2, dp_replicate=2)),
        "dtensor and another rule": lambda: (
            {"w": shard(torch.zeros(8, 4), mesh, [Shard(1)])},  # type: ignore[arg-type]
            tp_rules(),
        ),
        "dtensor over dp only": lambda: (
            {"w": dp_only(rank)},
            tp_rules(("w", {"tp": 0, "dp_shard": 0}), tp=2, dp_shard=2),
        ),
    }
    return cases[name]()


def dp_only(rank: int) -> Any:
    """FSDP over dp of what each tp rank has by itself: two tensors that look like one."""
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [DeviceMesh("cpu", [tp, 2 + tp]) for tp in range(2)]
    return shard(torch.full((8, 4), float(rank % 2)), meshes[rank % 2], [Shard(0)])


SAVES = {
    "gap": r"tensor 'w': no rank holds \[4:6, 0:4\] of \(8, 4\).*\[0, 1, 3\]",
    "overlap": r"tensor 'w': piece \[0:2, 0:4\] of ranks \[0\] and piece \[1:4, 0:4\] of ranks \[1\] overlap",
    "overlap of one replica": r"piece \[0:8, 0:4\] of ranks \[0, 2\] and piece \[4:8, 0:4\] of ranks \[1, 3\] overlap",
    "outside": r"rank 3: .*'w': piece 0: global_offset \(7, 0\) and shape \(2, 4\) reach outside",
    "float": "rank 1: .*'w': replica: 1.0 is not an int",
    "two shapes": r"'w' has shape \(8, 4\) on rank 0 but \(9, 4\) on rank 3",
    "plain beside pieces": r"'w': piece \[0:8, 0:4\] of ranks \[0\] and piece \[2:4, 0:4\] of ranks \[1\] overlap",
    "dtensor beside pieces": r"'w': piece .* overlap without being equal",
    "no config": r"pass ShardingRules\(rules, ParallelConfig",
    "other size": "are for 2 ranks .* the job has 4",
    "two rules": "rules='1 rules, .* on rank 0 but .* on rank 1",
    "two configs": "on rank 0 but .* on rank 1",
    "rules on one rank only": "on rank 0 but .*rules=None.* on rank 1",
    "no such tensor": r"no tensor on any rank matches the rule \('v', \{'tp': 0\}\); the tensors are 'w'",
    "contradiction": r"'w': the rules \('w', \{'tp': 0\}\) and \('\?', \{'tp': 1\}\) contradict",
    "no such dim": "'w' has 2 dims; .* speaks of dim 2",
    "uneven": r"'w' has shape \(8, 4\) on rank 0 but \(4, 4\) on rank 3; .*state the extent",
    "not that uneven": r"'w': the local tensor has shape \(3, 4\), but its rule gives this rank \(2, 4\) of \(8, 4\)",
    "no rule": "'v'.* counts as replicated, but ranks 0 and 1 hold different values",
    "wrong axis": "'w'.* counts as replicated, but ranks 0 and 2 hold different values",
    "dtensor and another rule": "'w': the tensor itself says .* its rule gives to another rank",
    "dtensor over dp only": "'w': the tensor itself says .* its rule gives to another rank",
}


def save_all_bad(folder: str) -> dict[str, tuple[CloudckptError | None, float]]:
    found = {}
    for name in SAVES:
        state, rules = bad_save(dist.get_rank(), name)
        start = time.monotonic()
        error = error_of(lambda: cloudckpt.save(state, f"{folder}/{name}", rules=rules))  # noqa: B023  # called at once
        found[name] = (error, time.monotonic() - start)
    cloudckpt.save({"w": rows(2 * dist.get_rank(), 2 * dist.get_rank() + 2)}, f"{folder}/good")
    return found


def test_bad_descriptions_fail_on_every_rank_and_nothing_is_committed(ranks: RankPool, tmp_path: Path):
    answers = ranks.run(4, save_all_bad, str(tmp_path))
    for name, pattern in SAVES.items():
        for found in answers:
            error, seconds = found[name]
            assert isinstance(error, (InvalidStateError, RankError)), (name, error)
            assert re.search(pattern, str(error)), (name, str(error))
            assert seconds < 8, name
        with pytest.raises(NotFoundError):
            cloudckpt.open_checkpoint(tmp_path / name)
    assert cloudckpt.read(tmp_path / "good")["w"].shape == (8, 4)


LOADS = {
    "fewer segments": r"'w': dim 0 was saved with the segments \[16, 4, 4\], but .* has no segments",
    "other segments": r"has the segments \[8, 8, 8\]",
    "segments unknown to the checkpoint": r"'v': dim 0 was saved with no segments, .* has the segments \[12, 12\]",
    "segments of another size": r"'w': dim 0 was saved with .* has the segments \[12, 4, 4\]",
    "another shape": r"shape: v is \(24, 6\) in the checkpoint, \(26, 6\) in the target",
    "not cut like that": r"'w': the local tensor has shape \(13, 6\), but its rule gives this rank \(12, 6\)",
    "two rules": "on rank 0 but .* on rank 1",
    "no such tensor": r"no tensor on any rank matches the rule \('x'",
    "no config": "ParallelConfig",
    "no rules": r"shape: w is \(24, 6\) in the checkpoint, \(12, 6\) in the target",
    "outside": "'w': piece 0: .* outside of the global tensor",
}


def load_all_bad(url: str) -> dict[str, tuple[CloudckptError | None, bool]]:
    rank, found = dist.get_rank(), {}
    config = ParallelConfig(tp=2)
    v, w = ("v", {"tp": 0}), ("w", {"tp": 0}, {0: SEGMENTS["qkv"]})
    rules: dict[str, list[Any]] = {
        "fewer segments": [("w", {"tp": 0}), v],
        "other segments": [("w", {"tp": 0}, {0: [8, 8, 8]}), v],
        "segments unknown to the checkpoint": [w, ("v", {"tp": 0}, {0: [12, 12]})],
        "segments of another size": [("w", {"tp": 0}, {0: [12, 4, 4]}), v],
        "another shape": [w, v],
        "not cut like that": [w, v],
        "two rules": [w, v] if rank else [v, w],
        "no such tensor": [w, v, ("x", {"tp": 0})],
        "no config": [w, v],
    }
    for name in LOADS:
        target = {"w": torch.zeros(12, 6, dtype=torch.bfloat16), "v": torch.zeros(12, 6), "n": 0}
        if name == "another shape":
            target["v"] = torch.zeros(13, 6)
        if name == "segments of another size":
            target["w"] = torch.zeros(10, 6, dtype=torch.bfloat16)
        if name == "not cut like that":
            target["w"] = torch.zeros(13, 6, dtype=torch.bfloat16)
        if name == "outside":
            target["w"] = ShardedTensor(target["w"], (24, 6), [Piece((0, 0), (13, 0), (12, 6))])
        given = None
        if name in rules:
            given = ShardingRules(rules[name], None if name == "no config" else config)
        error = error_of(lambda: cloudckpt.load(target, url, rules=given))  # noqa: B023  # called at once
        changed = any(bool(local_of(target[key]).any()) for key in ("v", "w")) or target["n"] != 0
        found[name] = error, changed
    target = {"w": torch.zeros(12, 6, dtype=torch.bfloat16), "v": torch.zeros(12, 6), "n": 0}
    cloudckpt.load(target, url, rules=ShardingRules([w, v], config))
    assert same_bits(target["w"], packed("qkv", 2, rank))
    return found


def save_with_segments(url: str) -> None:
    rank = dist.get_rank()
    rules = tp_rules(("w", {"tp": 0}, {0: SEGMENTS["qkv"]}), ("v", {"tp": 0}))
    v = torch.full((6, 6), float(rank))
    cloudckpt.save({"w": packed("qkv", 4, rank), "v": v, "n": 5}, url, rules=rules)


def test_targets_that_would_be_restored_wrong_are_refused(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_with_segments, str(tmp_path / "c"))
    for found in ranks.run(2, load_all_bad, str(tmp_path / "c")):
        for name, pattern in LOADS.items():
            error, changed = found[name]
            assert isinstance(error, (InvalidStateError, MismatchError, RankError)), (name, error)
            assert re.search(pattern, str(error)), (name, str(error))
            assert not changed, name


# Optimizers


def trained(config: ParallelConfig, rank: int, steps: int) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    """A layer whose rows tensor parallelism has cut by hand; its gradients are those of the whole."""
    at = config.coordinates(rank)["tp"]
    weight, bias = noise_free((8, 6)), noise_free((8,))
    layer = torch.nn.Linear(6, 8 // config.tp)
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(config.tp)[at])
        layer.bias.copy_(bias.chunk(config.tp)[at])
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(steps):
        layer.weight.grad = weight.chunk(config.tp)[at].sin()
        layer.bias.grad = bias.chunk(config.tp)[at].cos()
        optimizer.step()
    return layer, optimizer


def noise_free(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def layer_rules(config: ParallelConfig) -> ShardingRules:
    return ShardingRules([("model.*", {"tp": 0}), ("optim.state.*.exp_avg*", {"tp": 0})], config)


def save_trained(url: str, config: ParallelConfig) -> None:
    layer, optimizer = trained(config, dist.get_rank(), 2)
    cloudckpt.save({"model": layer, "optim": optimizer}, url, rules=layer_rules(config))


def resume_trained(url: str, config: ParallelConfig, steps: int) -> bool:
    """Whether it goes on as if it had never stopped. ``steps``: of training before the load."""
    layer, optimizer = trained(config, dist.get_rank(), steps)
    cloudckpt.load({"model": layer, "optim": optimizer}, url, rules=layer_rules(config))
    expected, other = trained(config, dist.get_rank(), 2)
    for own, ours in ((layer, optimizer), (expected, other)):
        own.weight.grad = own.weight.detach() * 2
        ours.step()
    moments = [optimizer.state[layer.weight], other.state[expected.weight]]
    return torch.equal(layer.weight, expected.weight) and torch.equal(*(m["exp_avg"] for m in moments))


def test_optimizers_with_rules_resume_on_other_ranks_fresh_or_not(ranks: RankPool, tmp_path: Path):
    for saved in (4, 1):
        url = str(tmp_path / str(saved))
        ranks.run(saved, save_trained, url, ParallelConfig(tp=saved))
        for size in (1, 2, 4):
            for steps in (0, 1):
                assert ranks.run(size, resume_trained, url, ParallelConfig(tp=size), steps) == [True] * size
