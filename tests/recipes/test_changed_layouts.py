"""Experts per name and stacked, flat buffers and whole tensors: from each to each, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import cloudckpt
from cloudckpt import Concatenate, FlatLayout, FlatParam, FlatShards, Resize, Split, Stack, Transpose, Unstack
from cloudckpt.errors import CloudckptError, InvalidStateError, MismatchError
from tests.ranks import RankPool
from tests.sharding import blank, error_of, make_mesh, noise, other_bits, same_bits, shard

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


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_experts_by_name_and_stacked(ranks: RankPool, tmp_path: Path):
    assert ranks.run(4, per_expert_to_stacked_and_back, str(tmp_path)) == [[]] * 4


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


def load_one(tmp_path: Path, state: Any, target: Any, **options: Any) -> cloudckpt.LoadReport:
    cloudckpt.save(state, tmp_path / "c")
    return cloudckpt.load(target, tmp_path / "c", **options)


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
