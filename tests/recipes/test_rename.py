"""Rename rules on real ranks: experts by name and stacked, and whatever else is made of stored tensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import cloudckpt
from cloudckpt import Concatenate, Split, Stack, Transpose, Unstack
from cloudckpt.errors import CloudckptError, InvalidStateError, MismatchError
from tests.ranks import RankPool
from tests.sharding import blank, error_of, make_mesh, noise, other_bits, same_bits, shard


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_one(tmp_path: Path, state: Any, target: Any, **options: Any) -> cloudckpt.LoadReport:
    cloudckpt.save(state, tmp_path / "c")
    return cloudckpt.load(target, tmp_path / "c", **options)


NUM_EXPERTS, NUM_LAYERS = 8, 2


def expert(layer: int, number: int) -> torch.Tensor:
    return noise((6, 10), torch.bfloat16, seed=100 * layer + number)


def stacked(layer: int) -> torch.Tensor:
    return torch.stack([expert(layer, e) for e in range(NUM_EXPERTS)])


STACKED = Stack("{p:*}.experts.{e}.w1", "{p}.experts.w1")


APART = Unstack("{p:*}.experts.w1", "{p}.experts.{e}.w1")


def per_expert_to_stacked_and_back(folder: str) -> list[str]:
    """EP=4 by names, stacked under EP=2 x TP=2, by names on one rank."""
    wrong: list[str] = []
    rank, one, mesh = dist.get_rank(), dist.new_group([0]), make_mesh((2, 2))
    mine = range(2 * rank, 2 * rank + 2)
    state = {"model": {f"{n}.experts.{e}.w1": expert(n, e) for n in range(NUM_LAYERS) for e in mine}, "step": 7}
    cloudckpt.save(state, f"{folder}/names")

    placements = (Shard(0), Shard(2))
    target = {"model": {f"{n}.experts.w1": blank(stacked(n), mesh, placements) for n in range(NUM_LAYERS)}, "step": 0}
    report = cloudckpt.load(target, f"{folder}/names", rename=STACKED)
    for n in range(NUM_LAYERS):
        right = same_bits(local(target["model"][f"{n}.experts.w1"]), local(shard(stacked(n), mesh, placements)))
        wrong += [] if right else [f"stacked {n}"]
    wrong += [] if target["step"] == 7 and not report.missing and not report.unexpected else ["the rest"]
    cloudckpt.save(target, f"{folder}/stacked")

    if rank == 0:
        names = {f"{n}.experts.{e}.w1": other_bits(expert(n, e)) for n in range(NUM_LAYERS) for e in range(NUM_EXPERTS)}
        cloudckpt.load({"model": names, "step": 0}, f"{folder}/stacked", rename=[APART], group=one)
        found = cloudckpt.read(f"{folder}/names")["model"]
        for n in range(NUM_LAYERS):
            for e in range(NUM_EXPERTS):
                key = f"{n}.experts.{e}.w1"
                right = same_bits(names[key], expert(n, e)) and same_bits(found[key], expert(n, e))
                wrong += [] if right else [key]
    dist.barrier()
    return wrong


def test_experts_by_name_and_stacked(ranks: RankPool, tmp_path: Path):
    assert ranks.run(4, per_expert_to_stacked_and_back, str(tmp_path)) == [[]] * 4


def faults(folder: str) -> list[tuple[str, CloudckptError | None, bool]]:
    """What a rank gets for bad options, and whether its target is as it was."""
    rank = dist.get_rank()
    state = {"a": noise((4, 3)), "b": noise((4, 3), seed=1), "e.0": noise((2,)), "e.2": noise((2,))}
    cloudckpt.save(state, f"{folder}/c")
    found = []
    for name, options in {
        "ranks differ": {"rename": [("a", "x")] if rank else [("b", "x")]},
        "functions differ": {"rename": (lambda t: t + "x") if rank else (lambda t: t + "y")},
        "functions alike": {"rename": lambda t: "x" if t == "a" else t, "strict": True},
        "one rank only": {"rename": ("a", "x") if rank else None},
        "gap": {"rename": Stack("e.{i}", "e")},
        "nothing": {"rename": ("nothing", "x")},
        "twice": {"rename": ("a", "b")},
        "cast differs": {"cast": bool(rank)},
        "cast": {"cast": "int8"},
        "idle": {"resize": {"nothing": 0}},
        "resize differs": {"resize": {"a": rank}},
        "missing": {"rename": ("a", "x")},
    }.items():
        target = {"a": noise((4, 3), seed=2), "b": noise((4, 3), seed=2), "e.0": noise((2,)), "e.2": noise((2,))}
        error = error_of(partial(cloudckpt.load, target, f"{folder}/c", **options))
        found.append((name, error, same_bits(target["a"], noise((4, 3), seed=2))))
    return found


EXPECTED = {
    "ranks differ": (InvalidStateError, "was called with .* on rank 0 but .* on rank 1"),
    "functions differ": (InvalidStateError, "was called with .* on rank 0 but .* on rank 1"),
    "functions alike": (MismatchError, "missing .*: a\n.*unexpected .*: x"),
    "one rank only": (InvalidStateError, "was called with .* on rank 0 but .* on rank 1"),
    "gap": (InvalidStateError, r"there is no numbers \[1\]"),
    "nothing": (InvalidStateError, "matches nothing"),
    "twice": (InvalidStateError, "both become 'b'"),
    "cast differs": (InvalidStateError, "was called with .* on rank 0 but .* on rank 1"),
    "cast": (InvalidStateError, "'int8' is never converted"),
    "idle": (InvalidStateError, "nothing in the target matches 'nothing'"),
    "resize differs": (InvalidStateError, "was called with .* on rank 0 but .* on rank 1"),
    "missing": (MismatchError, "missing .*: a\n.*unexpected .*: x"),
}


def test_bad_options_are_an_error_on_every_rank_and_change_nothing(ranks: RankPool, tmp_path: Path):
    for answers in ranks.run(2, faults, str(tmp_path)):
        for name, error, unchanged in answers:
            kind, pattern = EXPECTED[name]
            assert type(error) is kind, (name, error)
            with pytest.raises(kind, match=pattern):
                raise error
            assert unchanged, name


def test_rules_upon_rules_into_every_kind_of_target(tmp_path: Path):
    """Hugging Face to Megatron and back: q, k, v into one, experts transposed and stacked, all below another name."""
    state = {f"l.{n}.{x}": noise((s, 6), seed=n + s) for n in range(2) for x, s in (("q", 8), ("k", 2), ("v", 3))}
    state |= {f"l.0.e.{e}": noise((4, 6), seed=50 + e) for e in range(3)}
    rules = [
        Concatenate(("l.{n}.q", "l.{n}.k", "l.{n}.v"), "l.{n}.qkv"),
        Transpose("l.{n}.e.{e}"),
        Stack("l.{n}.e.{e}", "l.{n}.experts", dim=1),
        ("l.{rest:*}", ("model", "layers.{rest}")),
    ]
    target = {
        "model": {f"layers.{n}.qkv": torch.zeros(13, 6) for n in range(2)} | {"layers.0.experts": torch.zeros(6, 3, 4)}
    }
    load_one(tmp_path, state, target, rename=rules)
    for n in range(2):
        whole = torch.cat([state[f"l.{n}.{x}"] for x in "qkv"])
        assert same_bits(target["model"][f"layers.{n}.qkv"], whole)
    experts = torch.stack([state[f"l.0.e.{e}"].t() for e in range(3)], dim=1)
    assert same_bits(target["model"]["layers.0.experts"], experts)
    cloudckpt.save(target, tmp_path / "back")
    rules = [
        ("model.layers.{rest:*}", "l.{rest}"),
        Split("l.{n}.qkv", ("l.{n}.q", "l.{n}.k", "l.{n}.v"), (8, 2, 3)),
        Unstack("l.{n}.experts", "l.{n}.e.{e}", dim=1),
        Transpose("l.{n}.e.{e}"),
    ]
    found = cloudckpt.read(tmp_path / "back", rename=rules)
    assert {*found} == {*state}
    assert all(same_bits(found[key], state[key]) for key in state)
    some = cloudckpt.read(tmp_path / "back", "l.0.*", rename=rules)
    assert {*some} == {key for key in state if key.startswith("l.0.")}


def test_numpy_arrays_are_stacked_too(tmp_path: Path):
    import numpy as np

    state = {"a.0": np.arange(3.0), "a.1": np.ones(3), "b.0": np.array(1), "b.1": np.array(2), "u.0": np.array(["x"])}
    target = {"a": np.zeros((3, 2)), "b": np.zeros(2, dtype=int), "u.0": np.array(["y"])}
    load_one(tmp_path, state, target, rename=[Stack("a.{i}", "a", dim=1), Stack("b.{i}", "b")])
    assert target["a"].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert target["b"].tolist() == [1, 2]
    assert target["u.0"].tolist() == ["x"]
    with pytest.raises(InvalidStateError, match="raw bytes"):
        cloudckpt.read(tmp_path / "c", rename=Stack("u.{i}", "u"))
