"""Pipeline stages, virtual ones, and what is tied across them: saved by some ranks, loaded by others."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cloudckpt
from cloudckpt import ParallelConfig, ShardingRules, TrainingState, global_expert_names, global_layer_names
from cloudckpt.errors import CloudckptError
from tests.ranks import RankPool
from tests.sharding import error_of

NUM_LAYERS = 8
TIED = {"head.weight": "embed.weight"}
BY_HAND = [[[5], [0, 7]], [[]], [[6, 1, 2, 3, 4]]]
"""Layers bound to non-adjacent stages, and a stage without any."""

Layout = tuple[int, int, Any]
"""Stages, parts of each, and the layers by hand."""


def whole() -> dict[str, torch.Tensor]:
    """What a model in one piece holds, with every value different."""
    generator = torch.Generator().manual_seed(5)
    names = [f"layers.{i}.{kind}" for i in range(NUM_LAYERS) for kind in ("weight", "bias")]
    tensors = {n: torch.randn(*((3, 3) if n.endswith("weight") else (3,)), generator=generator) for n in names}
    tensors["embed.weight"] = tensors["head.weight"] = torch.randn(6, 3, generator=generator)
    return tensors


class Part(nn.Module):
    """One model part: its layers are numbered from 0."""

    def __init__(self, num_layers: int, *, embed: bool, head: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(num_layers))
        if embed:
            self.embed = nn.Embedding(6, 3)
        if head:
            self.head = nn.Linear(3, 6, bias=False)
        if embed and head:
            self.head.weight = self.embed.weight


class Job:
    """One rank's parts, filled with ``scale`` times the whole model, and Adam stepped if ``scale`` is 1."""

    def __init__(self, layout: Layout, scale: float, **options: Any) -> None:
        (pp, vpp, layers), rank = layout, dist.get_rank() if dist.is_initialized() else 0
        num_chunks = vpp if layers is None else len(layers[rank])
        last = (pp - 1, (vpp if layers is None else len(layers[-1])) - 1)
        self.parts: list[nn.Module] = []
        names = []
        for chunk in range(num_chunks):
            name = global_layer_names(NUM_LAYERS, stage=rank, pp=pp, chunk=chunk, vpp=vpp, layers=layers)
            has_embed, has_head = (rank, chunk) == (0, 0), (rank, chunk) == last
            part = Part(len(name.numbers), embed=has_embed, head=has_head)
            full = whole()
            with torch.no_grad():
                for local, parameter in part.named_parameters():
                    parameter.copy_(full[name(local)] * scale)
                    parameter.grad = full[name(local)] * 2
            self.parts.append(part)
            names.append(name)
        # Two groups: weights and biases, with other rates; a stage without layers has an empty one.
        self.optimizers = [torch.optim.Adam(groups(part), lr=9.0 if scale != 1 else 0.1) for part in self.parts]
        if scale == 1:
            for optimizer in self.optimizers:
                optimizer.param_groups[1]["lr"] = 0.2
                optimizer.step()
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 4) for o in self.optimizers]
        self.state = TrainingState(
            self.parts, self.optimizers, self.schedulers, rng=False, names=names, step=7 if scale == 1 else 0, **options
        )


def groups(part: nn.Module) -> list[dict[str, Any]]:
    named = [*part.named_parameters()]
    return [{"params": [p for n, p in named if n.endswith(kind)]} for kind in ("weight", "bias")]


def contents(job: Job) -> dict[str, Any]:
    """By global name, as plain data."""
    state = job.state.state_dict()
    found: dict[str, Any] = {f"model.{n}": t.tolist() for n, t in state["model"].items()}
    for name, entry in state["optimizer"]["state"].items():
        found |= {f"{name}.{what}": tensor.tolist() for what, tensor in entry.items()}
        found[f"{name}.lr"] = state["optimizer"]["param_groups"][name]["lr"]
        found[f"{name}.base_lr"] = state["scheduler"]["base_lrs"][name]
    return {**found, "step": state["step"]}


def save_job(url: str, layout: Layout, tied: dict[str, str] | None) -> dict[str, Any]:
    job = Job(layout, 1.0, tied=tied)
    cloudckpt.save({"train": job.state}, url)
    return contents(job)


def load_job(url: str, layout: Layout, tied: dict[str, str] | None) -> dict[str, Any]:
    job = Job(layout, -3.0, tied=tied)
    report = cloudckpt.load({"train": job.state}, url)
    assert (report.missing, report.unexpected) == ([], [])
    return contents(job)


def united(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


LAYOUTS: dict[str, Layout] = {
    "pp4-vpp2": (4, 2, None),
    "pp2": (2, 1, None),
    "pp1": (1, 1, None),
    "pp2-vpp4": (2, 4, None),
    "pp1-vpp4": (1, 4, None),
    "by-hand": (3, 1, BY_HAND),
}


@pytest.mark.parametrize("saved", ["pp4-vpp2", "pp1", "by-hand"])
def test_any_pipeline_into_any_other(ranks: RankPool, tmp_path: Path, saved: str) -> None:
    url = str(tmp_path / "c")
    expected = united(ranks.run(LAYOUTS[saved][0], save_job, url, LAYOUTS[saved], TIED))
    with cloudckpt.open_checkpoint(url) as checkpoint:
        arrays = [array.name for array in checkpoint.manifest.arrays]
        tree = checkpoint.manifest.document.tree["train"]
    # The tied pair is stored once, with its optimizer state.
    assert not any("head.weight" in name for name in arrays)
    assert tree["model"]["head.weight"] == tree["model"]["embed.weight"]
    assert len(arrays) == 4 * (2 * NUM_LAYERS + 1)
    for name, layout in LAYOUTS.items():
        found = united(ranks.run(layout[0], load_job, url, layout, TIED))
        same = {k: v for k, v in found.items() if k in expected}
        assert {k for k, v in same.items() if v != expected[k]} == set(), name
        # One part that holds both calls them by the first name only.
        assert {k for k in {*expected} ^ {*found} if not k.startswith("head.weight.")} == set(), name


def test_undeclared_ties_are_two_arrays_that_load_into_one(ranks: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    expected = united(ranks.run(2, save_job, url, LAYOUTS["pp2"], None))
    assert "train.model.head.weight" in [*arrays_of(url)]
    found = united(ranks.run(1, load_job, url, LAYOUTS["pp1"], None))
    assert {k for k, v in found.items() if v != expected[k]} == set()


def arrays_of(url: str) -> list[str]:
    with cloudckpt.open_checkpoint(url) as checkpoint:
        return [checkpoint.manifest.path(i) for i in range(len(checkpoint.manifest.arrays))]


def save_different(url: str) -> list[str]:
    """The copies have drifted apart on the last stage; and a tie with a name that nobody holds."""
    job = Job(LAYOUTS["pp2"], 1.0, tied=TIED)
    for part in job.parts:
        if hasattr(part, "head"):
            with torch.no_grad():
                part.head.weight[0, 0] += 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cloudckpt.save({"train": job.state}, url)
    return [str(w.message) for w in told]


def load_different(url: str, layout: Layout) -> tuple[CloudckptError | None, dict[str, Any]]:
    job = Job(layout, -3.0, tied=TIED)
    return error_of(lambda: cloudckpt.load({"train": job.state}, url)), contents(job)


def wrong_names(url: str) -> list[CloudckptError | None]:
    """Names of which each rank has a part, and those that none has."""
    layout, half = LAYOUTS["pp2"], NUM_LAYERS // 2
    patterns = ["model.layers.0.*", f"model.layers.{half}.*", "step"]
    jobs = [
        Job(layout, 1.0, include=patterns),
        Job(layout, 1.0, include=[*patterns, "model.layers.99.*"]),
        Job(layout, 1.0, tied={"haed.weight": "embed.weight"}),
    ]
    saves = [error_of(partial(cloudckpt.save, job.state, f"{url}/{i}")) for i, job in enumerate(jobs)]
    return saves + [error_of(partial(cloudckpt.load, job.state, f"{url}/0")) for job in jobs[:2]]


def test_some_rank_must_have_what_is_named(ranks: RankPool, tmp_path: Path) -> None:
    for saved, no_save, no_tie, loaded, no_load in ranks.run(2, wrong_names, str(tmp_path)):
        assert (saved, loaded) == (None, None)
        for error in (no_save, no_load):
            assert str(error).startswith("include='model.layers.99.*' matches nothing of the state on any rank")
        assert "tied: 'haed.weight' is in the model of no rank that declares it" in str(no_tie)


def wrong_ties(root: str) -> list[CloudckptError | None]:
    unknown = Job(LAYOUTS["pp2"], 1.0, tied={"head.weight": "embedding.weight"})
    uneven = Job(LAYOUTS["pp2"], 1.0, tied=TIED if dist.get_rank() else None)
    return [
        error_of(lambda: cloudckpt.save(unknown.state, f"{root}/a")),
        error_of(lambda: cloudckpt.save(uneven.state, f"{root}/b")),
    ]


def test_copies_that_differ_are_both_stored(ranks: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    first, second = ranks.run(2, save_different, url)
    assert second == []
    pair = "'train.model.head.weight' is declared to be tied to 'train.model.embed.weight'"
    assert first == [f"{pair}, but they differ: both are stored"]
    assert {"train.model.embed.weight", "train.model.head.weight"} <= {*arrays_of(url)}
    # Their optimizer states are equal all the same.
    assert not any(path.startswith("train.optimizer.state.head") for path in arrays_of(url))
    (first_error, first_state), (second_error, second_state) = ranks.run(2, load_different, url, LAYOUTS["pp2"])
    assert (first_error, second_error) == (None, None)
    assert first_state["model.embed.weight"] != second_state["model.head.weight"]
    ((error, state),) = ranks.run(1, load_different, url, LAYOUTS["pp1"])
    assert "'train.model.embed.weight' and 'train.model.head.weight' are the same memory in the target" in str(error)
    assert state["step"] == 0
    for errors in ranks.run(2, wrong_ties, str(tmp_path)):
        assert "'model.head.weight' is declared to be tied to 'model.embedding.weight', which no" in str(errors[0])
        assert "'model.embed.weight' is tied to 'model.head.weight' on some ranks only" in str(errors[1])


def sharded(scale: float, size: int) -> tuple[nn.Module, torch.optim.Adam]:
    """FSDP2, with the wrapper's prefix of activation checkpointing on a layer."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Part(2, embed=True, head=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole()[name] * scale)
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, torch.optim.Adam(model.parameters(), lr=0.1 if scale == 1 else 9.0)


def forward(model: nn.Module) -> torch.Tensor:
    hidden = model.embed(torch.arange(6)).sum()
    return model.layers[1](model.layers[0](torch.ones(2, 3))).sum() + hidden


def save_sharded(url: str) -> list[float]:
    model, optimizer = sharded(1.0, dist.get_world_size())
    forward_hooked(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        forward_hooked(model)  # leaves the whole parameters in place: a save must see the shards
    cloudckpt.save(TrainingState(model, optimizer), url)
    return finish(model, optimizer)


def forward_hooked(model: nn.Module) -> torch.Tensor:
    type(model).forward = forward
    return model()


def load_sharded(url: str) -> list[float]:
    model, optimizer = sharded(-3.0, dist.get_world_size())
    cloudckpt.load(TrainingState(model, optimizer), url, strict=True)
    kinds = {type(value).__name__ for entry in optimizer.state.values() for k, value in entry.items() if k != "step"}
    assert kinds == {"DTensor"}
    assert [*optimizer.state_dict()["state"]] == [*range(5)]
    return finish(model, optimizer)


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    forward_hooked(model).backward()
    optimizer.step()
    return [x for p in model.parameters() for x in p.full_tensor().flatten().tolist()]


@pytest.mark.filterwarnings("ignore:the states of the random number generators")
def test_fsdp2_resumes_on_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    expected = ranks.run(2, save_sharded, url)[0]
    assert ranks.run(2, load_sharded, url)[0] == expected
    assert ranks.run(3, load_sharded, url)[0] == pytest.approx(expected)
    assert [*cloudckpt.read(url, "model")["model"]] == [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "embed.weight",
    ]


def stage_on_mesh(scale: float, **options: Any) -> tuple[nn.Module, TrainingState]:
    """Two stages, each with FSDP2 over two ranks: the first has the embedding, the second the head."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    model = Part(1, embed=stage == 0, head=stage == 1)
    names = global_layer_names(2, pp=2, stage=stage)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole()[names(name)] * scale)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if scale == 1:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, TrainingState(model, optimizer, rng=False, names=names, tied=TIED, **options)


def save_stages_on_mesh(url: str) -> list[str]:
    model, state = stage_on_mesh(1.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cloudckpt.save(state, url)
        if hasattr(model, "head"):
            model.head.weight.detach().to_local().add_(dist.get_rank() % 2)  # on one of the two ranks only
        cloudckpt.save(state, url + "-apart")
    return [str(w.message) for w in told if issubclass(w.category, UserWarning)]


def load_stages_on_mesh(url: str) -> list[float]:
    model, state = stage_on_mesh(-3.0)
    cloudckpt.load(state, url)
    parameter = model.head.weight if hasattr(model, "head") else model.embed.weight
    return parameter.full_tensor().flatten().tolist()


def test_ties_of_sharded_stages(ranks: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    told = ranks.run(4, save_stages_on_mesh, url)
    assert ["'model.head.weight' is declared" in "".join(texts) for texts in told] == [True, False, False, False]
    assert not [path for path in arrays_of(url) if "head" in path]
    assert [path for path in arrays_of(url + "-apart") if "head" in path] == ["model.head.weight"]
    first = ranks.run(4, load_stages_on_mesh, url)
    assert all(values == first[0] for values in first)
    assert cloudckpt.read(url)["model"]["embed.weight"].flatten().tolist() == first[0]
    apart = ranks.run(4, load_stages_on_mesh, url + "-apart")
    assert apart[0] == apart[1] == first[0]
    assert apart[2] == apart[3] != first[0]


def cut_by_hand(scale: float, tp: int, dim: int) -> tuple[nn.Module, torch.optim.Adam, dict[str, Any]]:
    """Megatron's way: plain tensors, of which each rank has a part."""
    part = slice(dist.get_rank() * 6 // tp, (dist.get_rank() + 1) * 6 // tp)
    full = torch.arange(36.0).reshape(6, 6) * scale
    model = nn.ParameterDict({"wq": full[part] if dim == 0 else full[:, part], "norm": torch.ones(6) * scale})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rules = ShardingRules([("*.model.wq", {"tp": dim})], ParallelConfig(tp=tp))
    return model, optimizer, {"rules": rules}


def save_cut(url: str) -> None:
    model, optimizer, options = cut_by_hand(1.0, 2, 0)
    for parameter in model.values():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    cloudckpt.save({"train": TrainingState(model, optimizer, rng=False)}, url, **options)


def load_cut(url: str, tp: int) -> list[Any]:
    model, optimizer, options = cut_by_hand(-3.0, tp, 1)
    cloudckpt.load({"train": TrainingState(model, optimizer, rng=False)}, url, **options)
    return [model["wq"].tolist(), optimizer.state[model["wq"]]["exp_avg"].tolist()]


def test_a_rule_for_a_parameter_cuts_its_optimizer_state_too(ranks: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    ranks.run(2, save_cut, url)
    state = cloudckpt.read(url)["train"]
    whole = [state["model"]["wq"], state["optimizer"]["state"]["wq"]["exp_avg"]]
    assert [tensor.shape for tensor in whole] == [(6, 6), (6, 6)]
    assert torch.allclose(whole[1], torch.arange(36.0).reshape(6, 6) * 0.1)
    for tp in (1, 2, 3):
        for rank, loaded in enumerate(ranks.run(tp, load_cut, url, tp)):
            part = slice(rank * 6 // tp, (rank + 1) * 6 // tp)
            assert loaded == [tensor[:, part].tolist() for tensor in whole]


class Experts(nn.Module):
    def __init__(self, numbers: tuple[int, ...], scale: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in numbers)
        for number, expert in zip(numbers, self.experts, strict=True):
            nn.init.constant_(expert.weight, number * scale)


def expert_job(ep: int, scale: float) -> tuple[nn.Module, TrainingState]:
    names = global_expert_names(4, ep=ep, rank=dist.get_rank())
    model = Experts(names.numbers, scale)
    return model, TrainingState(model, rng=False, names=names)


def save_experts(url: str, ep: int) -> None:
    cloudckpt.save(expert_job(ep, 1.0)[1], url)


def load_experts(url: str, ep: int) -> list[float]:
    model, state = expert_job(ep, -1.0)
    cloudckpt.load(state, url)
    return [expert.weight[0, 0].item() for expert in model.experts]


def test_experts_on_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, save_experts, str(tmp_path / "c"), 4)
    assert ranks.run(2, load_experts, str(tmp_path / "c"), 2) == [[0.0, 1.0], [2.0, 3.0]]
