"""Dtypes and extents that change on loading: on request, reported, and never else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import cloudckpt
from cloudckpt import FlatLayout, FlatShards, Resize, Transpose
from cloudckpt.errors import InvalidStateError, MismatchError
from tests.ranks import RankPool
from tests.sharding import blank, error_of, make_mesh, noise, same_bits, shard


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_one(tmp_path: Path, state: Any, target: Any, **options: Any) -> cloudckpt.LoadReport:
    cloudckpt.save(state, tmp_path / "c")
    return cloudckpt.load(target, tmp_path / "c", **options)


def grown_vocabulary(folder: str) -> list[str]:
    """10 rows into 12 padded ones over 4 ranks and back; the optimizer's state goes along under its own pattern."""
    wrong: list[str] = []
    mesh = make_mesh((4,))
    emb, avg = noise((10, 4)), noise((10, 4), seed=1)
    cloudckpt.save({"emb": emb, "avg": avg, "rest": noise((3,))}, f"{folder}/10")
    target = {
        "emb": shard(torch.full((12, 4), 5.0), mesh, [Shard(0)]),
        "avg": shard(torch.full((12, 4), 5.0), mesh, [Shard(0)]),
        "rest": torch.zeros(3),
    }
    report = cloudckpt.load(target, f"{folder}/10", resize={"emb": None, "a*": 0, "rest": 1})
    if report.resized != {"emb": ((10, 4), (12, 4)), "avg": ((10, 4), (12, 4))}:
        wrong.append(str(report.resized))
    for name, whole, fill in (("emb", emb, 5.0), ("avg", avg, 0.0)):
        padded = torch.cat([whole, torch.full((2, 4), fill)])
        if not same_bits(local(target[name]), local(shard(padded, mesh, [Shard(0)]))):
            wrong.append(name)
    cloudckpt.save(target, f"{folder}/12")
    back = {"emb": blank(emb, mesh, [Shard(1)]), "avg": blank(avg, mesh, [Shard(1)]), "rest": torch.zeros(3)}
    error = error_of(partial(cloudckpt.load, back, f"{folder}/12", resize={"emb": Resize(shrink=True), "avg": 0}))
    if not isinstance(error, MismatchError) or error.shapes != {"avg": ((12, 4), (10, 4))}:
        wrong.append(f"shrunk unasked: {error}")
    cloudckpt.load(back, f"{folder}/12", resize={"*": Resize(shrink=True)})
    for name, whole in (("emb", emb), ("avg", avg)):
        if not same_bits(local(back[name]), local(shard(whole, mesh, [Shard(1)]))):
            wrong.append(f"back {name}")
    return wrong


def test_a_vocabulary_that_grows_and_shrinks(ranks: RankPool, tmp_path: Path):
    assert ranks.run(4, grown_vocabulary, str(tmp_path)) == [[]] * 4


FLOATS = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("stored", [*FLOATS, "float8_e4m3fn"])
def test_casts_give_what_to_gives(tmp_path: Path, stored: str):
    """Through rules, into flat buffers and into tensors of any strides."""
    values = torch.tensor(
        [[0.1, -0.0, 3e38, 1e-40], [448.0, float("inf"), float("nan"), -65504.0]], dtype=torch.float64
    )
    held = values.to(getattr(torch, stored))
    cloudckpt.save({"w": held, "v": held}, tmp_path / "c")
    for own in [*FLOATS, "float8_e4m3fn", "float8_e5m2"]:
        kind = getattr(torch, own)
        flat = FlatShards(torch.zeros(8, dtype=kind), FlatLayout.of({"w": (4, 2)}), 0)
        target = {"w": flat["w"], "v": torch.zeros(4, 2, dtype=kind).t()}
        load = partial(cloudckpt.load, target, tmp_path / "c", rename=Transpose("w"))
        if own == stored:
            assert load().cast == {}
        elif "float8" in own + stored:
            with pytest.raises(MismatchError) as caught:
                load(cast=True)
            assert caught.value.dtypes == {"w": (stored, own), "v": (stored, own)}
            assert load(cast=(own, stored)).cast == caught.value.dtypes
        else:
            assert load(cast=True).cast == {"w": (stored, own), "v": (stored, own)}
        # As texts, which tell zeros apart by sign; which nan comes out depends on strides, in torch too.
        assert str(flat.local.view(4, 2).t().double().tolist()) == str(held.to(kind).double().tolist())
        assert str(target["v"].double().tolist()) == str(held.to(kind).double().tolist())


@pytest.mark.parametrize("cast", ["int8", "nothing", 3, ["float32", 1], "complex64", "float4_e2m1fn_x2"])
def test_what_is_never_cast(tmp_path: Path, cast: Any):
    target = {"w": torch.zeros(2)}
    with pytest.raises(InvalidStateError, match="cast"):
        load_one(tmp_path, {"w": torch.ones(2)}, target, cast=cast)
    assert target["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("resize", "fault"),
    [
        (["w"], "must be a dict"),
        ({"w": "x"}, "is no pattern with a number"),
        ({3: 0}, "is no pattern with a number"),
        ({"i": 300}, "cannot be filled with 300|cannot hold"),
        ({"i": 0.5}, "cannot hold the fill value 0.5"),
    ],
)
def test_what_cannot_fill(tmp_path: Path, resize: Any, fault: str):
    target = {"w": torch.zeros(3), "i": torch.zeros(3, dtype=torch.int8)}
    with pytest.raises(InvalidStateError, match=fault):
        load_one(tmp_path, {"w": torch.ones(3), "i": torch.ones(2, dtype=torch.int8)}, target, resize=resize)
    assert target["w"].tolist() == [0, 0, 0]


def test_resized_flat_and_renamed_targets(tmp_path: Path):
    """A vocabulary of 3 rows, transposed and in bf16, in a flat buffer of 5 rows."""
    flat = FlatShards(torch.full((12,), -1.0), FlatLayout.of({"emb": (2, 5)}), 1)
    emb = torch.arange(6.0).reshape(3, 2).bfloat16()
    report = load_one(
        tmp_path, {"emb": emb, "x": 1}, {"m": flat, "x": 0},
        rename=[("emb", ("m", "emb")), Transpose("m.emb")], resize={"m.*": 9}, cast=True,
    )  # fmt: skip
    assert flat.local.tolist() == [2, 4, 9, 9, 1, 3, 5, 9, 9, -1, -1, -1]
    assert report.resized == {"m.emb": ((2, 3), (2, 5))}
    assert report.cast == {"m.emb": ("bfloat16", "float32")}


def test_a_broadcast_is_still_no_resize(tmp_path: Path):
    for resize in (None, {"b": 0}, {"*": Resize(shrink=True)}):
        target = {"w": torch.zeros(4, 3), "b": torch.zeros(2)}
        call: Callable[[], Any] = partial(load_one, tmp_path, {"w": torch.ones(3), "b": torch.ones(2)}, target)
        with pytest.raises(MismatchError):
            call(resize=resize) if not (tmp_path / "c").exists() else cloudckpt.load(
                target, tmp_path / "c", resize=resize
            )
        assert target["w"].sum() == 0


def test_a_fresh_optimizer_of_a_grown_model_gets_state_of_its_size(tmp_path: Path):
    def job(rows: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, rows, bias=False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = job(4)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    cloudckpt.save({"model": model, "opt": optimizer}, tmp_path / "c")
    grown, fresh = job(6)
    resize = {"model.weight": 0, "opt.state.*": 0}
    report = cloudckpt.load({"model": grown, "opt": fresh}, tmp_path / "c", resize=resize)
    average = fresh.state[grown.weight]["exp_avg"]
    assert torch.equal(average[:4], optimizer.state[model.weight]["exp_avg"])
    assert average[4:].tolist() == [[0, 0, 0]] * 2
    assert fresh.state[grown.weight]["step"] == 1
    assert {*report.resized} == {"model.weight", "opt.state.0.exp_avg", "opt.state.0.exp_avg_sq"}
    grown(torch.ones(2, 3)).sum().backward()
    fresh.step()
