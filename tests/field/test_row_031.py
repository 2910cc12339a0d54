"""pytorch/torchtitan#2622: keys are those of the bare model, whatever wraps it, and in whatever order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import cloudckpt
from cloudckpt import TrainingState
from tests.ranks import RankPool

WRAPPED = {
    "AC(compile(m))": lambda m: checkpoint_wrapper(torch.compile(m)),
    "compile(AC(m))": lambda m: torch.compile(checkpoint_wrapper(m)),
    "DDP(compile(m))": lambda m: DistributedDataParallel(torch.compile(m)),
    "compile(DDP(m))": lambda m: torch.compile(DistributedDataParallel(m)),
    "DDP(compile(AC(m)))": lambda m: DistributedDataParallel(torch.compile(checkpoint_wrapper(m))),
}


class Named(torch.nn.Module):
    """Real submodules that are called like the attributes of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("module", "_orig_mod", "_checkpoint_wrapped_module"):
            setattr(self, name, torch.nn.Linear(2, 2))


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 3)


def inner_wrapped() -> torch.nn.Module:
    """Wrappers deep within, as layers are wrapped one by one."""
    model = torch.nn.Sequential(linear(), Named())
    model[0] = checkpoint_wrapper(torch.compile(model[0]))
    model[1].module = torch.compile(checkpoint_wrapper(model[1].module))
    model[1]._orig_mod = checkpoint_wrapper(model[1]._orig_mod)
    model[1]._checkpoint_wrapped_module = checkpoint_wrapper(model[1]._checkpoint_wrapped_module)
    return model


def job(model: torch.nn.Module, value: float) -> TrainingState:
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.data.fill_(value)
    optimizer.step()
    return TrainingState(model, optimizer, rng=False)


def contents(url: str) -> dict[str, Any]:
    state = cloudckpt.read(url)
    return {
        "keys": [[*state["model"]], [*state["optimizer"]["state"]], [*state["optimizer"]["param_groups"]]],
        "values": {tensor.flatten()[0].item() for tensor in state["model"].values()},
    }


def as_objects(bare: torch.nn.Module, wrapped: torch.nn.Module, url: str) -> bool:
    """The modules themselves in a state, without TrainingState."""
    cloudckpt.save({"model": wrapped}, url)
    cloudckpt.save({"model": bare}, f"{url}-bare")
    for parameter in (*bare.parameters(), *wrapped.parameters()):
        parameter.data.fill_(7.0)
    cloudckpt.load({"model": bare}, url)
    cloudckpt.load({"model": wrapped}, f"{url}-bare")
    first, second = cloudckpt.read(url)["model"], cloudckpt.read(f"{url}-bare")["model"]
    values = [{p.flatten()[0].item() for p in m.parameters()} for m in (bare, wrapped)]
    stored = [{t.flatten()[0].item() for t in state.values()} for state in (first, second)]
    return [*first] == [*second] and values == stored and type(first) is type(second)


def both_ways(root: str) -> dict[str, Any]:
    """Save wrapped, load bare, and save bare, load wrapped."""
    kinds = {
        **{f"{name} of linear": (linear, wrap) for name, wrap in WRAPPED.items()},
        **{f"{name} of named": (Named, wrap) for name, wrap in WRAPPED.items()},
        "layers": (lambda: torch.nn.Sequential(linear(), Named()), lambda _: inner_wrapped()),
    }
    found: dict[str, Any] = {}
    for i, (name, (bare, wrap)) in enumerate(kinds.items()):
        wrapped_url, bare_url = f"{root}/wrapped-{i}", f"{root}/bare-{i}"
        wrapped_model, bare_model = wrap(bare()), bare()
        cloudckpt.save(job(wrapped_model, 1.0), wrapped_url)
        cloudckpt.save(job(bare_model, 2.0), bare_url)
        cloudckpt.load(job(bare_model, 9.0), wrapped_url)
        cloudckpt.load(job(wrapped_model, 9.0), bare_url)
        found[name] = (
            contents(wrapped_url)["keys"] == contents(bare_url)["keys"],
            contents(bare_url)["keys"][0] == [*bare().state_dict()],
            {p.flatten()[0].item() for p in bare_model.parameters()} == contents(wrapped_url)["values"],
            {p.flatten()[0].item() for p in wrapped_model.parameters()} == contents(bare_url)["values"],
            as_objects(bare_model, wrapped_model, f"{root}/objects-{i}"),
        )
    dist.barrier()
    return found


def test_the_same_keys_and_values_both_ways(ranks: RankPool, tmp_path: Path):
    (found,) = ranks.run(1, both_ways, str(tmp_path))
    assert len(found) == 11
    assert {name: ways for name, ways in found.items() if ways != (True,) * 5} == {}
