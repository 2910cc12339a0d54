"""TrainingState in one process: what is stored, and how it gets back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cloudckpt
from cloudckpt import PerRank, TrainingState
from cloudckpt.errors import InvalidStateError, MismatchError


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def step(model: nn.Module, *optimizers: Any) -> None:
    model(torch.arange(12.0).reshape(3, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def same_model(a: nn.Module, b: nn.Module) -> bool:
    states = a.state_dict(), b.state_dict()
    return [*states[0]] == [*states[1]] and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_it_stands_within_a_state_or_is_the_state(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    cloudckpt.save(TrainingState(model, optimizer, step=3), tmp_path / "root")
    cloudckpt.save({"train": TrainingState(model, optimizer, step=3), "other": 1}, tmp_path / "inner")
    root, inner = cloudckpt.read(tmp_path / "root"), cloudckpt.read(tmp_path / "inner")
    assert [*root] == [*inner["train"]] == ["model", "optimizer", "rng", "step"]
    assert [*root["model"]] == [*model.state_dict()]
    assert {*root["optimizer"]["state"]} == {*root["optimizer"]["param_groups"]} == {*dict(model.named_parameters())}
    assert root["optimizer"]["param_groups"]["0.bias"]["betas"] == (0.9, 0.999)
    for name, wrap in (("root", lambda s: s), ("inner", lambda s: {"train": s, "other": 0})):
        again = make(1)
        fresh = torch.optim.AdamW(again.parameters(), lr=7.0)
        state = TrainingState(again, fresh, step=0)
        cloudckpt.load(wrap(state), tmp_path / name)
        assert state.extra == {"step": 3}
        assert same_model(model, again)
        assert fresh.param_groups[0]["lr"] == 0.1
    expected = torch.randn(2)
    torch.randn(5)
    cloudckpt.load(TrainingState(again, fresh, step=0), tmp_path / "root")
    assert torch.equal(torch.randn(2), expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adam, {"lr": torch.tensor(0.1), "capturable": False, "foreach": False}),
    ],
)
def test_a_fresh_optimizer_goes_on_where_the_saved_one_stopped(kind: Any, options: Any, tmp_path: Path) -> None:
    model, again = make(), make(1)
    options = {"lr": 0.1, **options}
    optimizer = kind(model.parameters(), **options)
    if isinstance(options["lr"], torch.Tensor):
        options["lr"] = torch.tensor(5.0)
    fresh = kind([*reversed([*again.parameters()])], **options)
    step(model, optimizer)
    cloudckpt.save(TrainingState(model, optimizer), tmp_path / "c")
    before = [p.clone() for p in again.parameters()]
    cloudckpt.load(TrainingState(again, fresh), tmp_path / "c")
    assert not all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True))
    for _ in range(2):
        step(model, optimizer)
        step(again, fresh)
    assert same_model(model, again)


def test_schedulers_of_several_optimizers(tmp_path: Path) -> None:
    def job(seed: int, split: bool) -> tuple[nn.Module, list[Any], list[Any]]:
        model = make(seed)
        parts = [[model[0]], [model[1], model[2]]] if split else [[model[2], model[0], model[1]]]
        optimizers = [torch.optim.SGD([{"params": m.parameters()} for m in part], lr=0.1) for part in parts]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * len(group["params"][0])
        schedulers = [
            torch.optim.lr_scheduler.SequentialLR(
                o,
                [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 3])],
                milestones=[2],
            )
            for o in optimizers
        ]
        for _ in range(3 if seed == 0 else 0):
            step(model, *optimizers)
            for scheduler in schedulers:
                scheduler.step()
        return model, optimizers, schedulers

    model, optimizers, schedulers = job(0, True)
    cloudckpt.save(TrainingState(model, optimizers, schedulers), tmp_path / "c")
    rates = {id(p): g["lr"] for o in optimizers for g in o.param_groups for p in g["params"]}
    again, (optimizer,), (scheduler,) = job(1, False)
    cloudckpt.load(TrainingState(again, optimizer, scheduler), tmp_path / "c")
    for _ in range(3):
        for s in (*schedulers, scheduler):
            s.step()
        rates = {n: g["lr"] for o in optimizers for g in o.param_groups for n in names(model, g)}
        assert rates == {n: g["lr"] for g in optimizer.param_groups for n in names(again, g)}


def names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    return [n for n, p in model.named_parameters() if any(p is q for q in group["params"])]


def test_schedulers_that_differ_are_refused(tmp_path: Path) -> None:
    model = make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[0], model[2])]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, i + 1) for i, o in enumerate(optimizers)]
    with pytest.raises(InvalidStateError, match=r"'scheduler.step_size' is 1 in one scheduler and 2 in another"):
        cloudckpt.save(TrainingState(model, optimizers, schedulers), tmp_path / "c")


def test_parts_by_include_and_by_strict_false(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    url = tmp_path / "c"
    cloudckpt.save(TrainingState(model, optimizer, epoch=4), url)

    weights = make(1)
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load(TrainingState(weights), url)
    assert "optimizer.state.0.bias.step" in caught.value.unexpected
    report = cloudckpt.load(TrainingState(weights), url, strict=False)
    assert "epoch" in report.unexpected
    assert same_model(weights, model)

    weights = make(1)
    report = cloudckpt.load(TrainingState(weights, include="model"), url)
    assert (report.missing, report.unexpected) == ([], [])
    assert same_model(weights, model)

    weights = make(1)
    before = weights[0].weight.clone()
    fresh = torch.optim.Adam(weights.parameters(), lr=0.3)
    state = TrainingState(weights, fresh, epoch=0, include=["model.2.*", "optimizer.state.*.bias", "ep*"])
    cloudckpt.load(state, url)
    assert torch.equal(weights[0].weight, before)
    assert torch.equal(weights[2].weight, model[2].weight)
    assert {*fresh.state} == {weights[0].bias, weights[1].bias, weights[2].bias}
    assert torch.equal(fresh.state[weights[0].bias]["exp_avg"], optimizer.state[model[0].bias]["exp_avg"])
    assert fresh.param_groups[0]["lr"] == 0.3
    assert state.extra == {"epoch": 4}

    cloudckpt.save(TrainingState(model, optimizer, epoch=4, include=["optimizer"]), tmp_path / "d")
    assert [*cloudckpt.read(tmp_path / "d")] == ["optimizer"]
    weights = make(1)
    cloudckpt.load(TrainingState(weights, torch.optim.Adam(weights.parameters()), include="optimizer"), tmp_path / "d")
    with pytest.raises(MismatchError, match=r"missing \(asked for, not stored\): model.0.weight"):
        cloudckpt.load(TrainingState(weights, include="model"), tmp_path / "d")


def test_a_part_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    url = tmp_path / "c"
    cloudckpt.save(
        {"train": TrainingState(model, optimizer, include=["model", "optimizer.*", "optimizer.state.*.exp_avg"])}, url
    )
    # Saved before the first step: an optimizer's state may be asked for all the same.
    cloudckpt.load({"train": TrainingState(model, optimizer, include=["model", "optimizer.state.*"])}, url)
    for wrong in ("modle", "model.2.wieght", "optimizer.sate.*", "scheduler", "model.[ab].*", "model.0.weight.x"):
        state = {"train": TrainingState(model, optimizer, include=["model.0.*", wrong])}
        for call in (cloudckpt.load, lambda s, u: cloudckpt.save(s, u, overwrite=True)):
            with pytest.raises(InvalidStateError, match="matches nothing of the state on any rank") as caught:
                call(state, url)
            assert f"'train': include={wrong!r}" in str(caught.value)
    step(model, optimizer)
    cloudckpt.save(TrainingState(model, optimizer), tmp_path / "d")
    fresh = torch.optim.Adam(model.parameters())
    with pytest.raises(InvalidStateError, match=r"include='optimizer.state.\*.exp_average' matches nothing"):
        cloudckpt.load(TrainingState(model, fresh, include="optimizer.state.*.exp_average"), tmp_path / "d")
    cloudckpt.load(TrainingState(model, fresh, include="optimizer.state.*.exp_avg"), tmp_path / "d")


class InState(torch.optim.Optimizer):
    """Keeps an fp32 master of each bf16 parameter in its state, and a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(master=p.float().clone(), history=[torch.zeros(2), torch.zeros(2)], calls=0, note=None)
                state["master"] -= group["lr"] * p.grad.float()
                state["history"][state["calls"] % 2] += 1
                state["calls"] += 1
                p.copy_(state["master"])


def bf16(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2).to(torch.bfloat16)


def push(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 1 / 512)
    optimizer.step()


def test_fp32_masters_in_the_optimizers_state(tmp_path: Path) -> None:
    model, again = bf16(0), bf16(1)
    optimizer, fresh = InState(model.parameters()), InState(again.parameters())
    push(model, optimizer)
    cloudckpt.save(TrainingState(model, optimizer), tmp_path / "c")
    cloudckpt.load(TrainingState(again, fresh), tmp_path / "c")
    assert fresh.state[again.weight]["master"].dtype == torch.float32
    assert fresh.state[again.weight]["calls"] == 1
    for m, o in ((model, optimizer), (again, fresh)):
        push(m, o)
    for a, b in ((model.weight, again.weight), (model.bias, again.bias)):
        assert torch.equal(optimizer.state[a]["master"], fresh.state[b]["master"])
        assert torch.equal(a, b)
        assert [t.tolist() for t in fresh.state[b]["history"]] == [[1.0, 1.0], [1.0, 1.0]]


def test_fp32_masters_in_a_list_of_their_own(tmp_path: Path) -> None:
    def job(seed: int) -> tuple[nn.Module, dict[str, torch.Tensor], torch.optim.Adam]:
        model = bf16(seed)
        masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        return model, masters, torch.optim.Adam(masters.values(), lr=0.01)

    model, masters, optimizer = job(0)
    for master in masters.values():
        master.grad = torch.ones_like(master)
    optimizer.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(masters[name])
    cloudckpt.save(TrainingState(model, optimizer, masters=masters), tmp_path / "c")
    assert [*cloudckpt.read(tmp_path / "c")["optimizer"]] == ["state", "param_groups", "master"]
    again, copies, fresh = job(1)
    cloudckpt.load(TrainingState(again, fresh, masters=copies), tmp_path / "c")
    assert same_model(model, again)
    for name, master in masters.items():
        assert torch.equal(copies[name], master)
        assert copies[name].dtype == torch.float32
        assert torch.equal(fresh.state[copies[name]]["exp_avg"], optimizer.state[master]["exp_avg"])
    with pytest.raises(InvalidStateError, match="parameter 0 of group 0 of the optimizer, of shape \\(2, 3\\), is in"):
        cloudckpt.save(TrainingState(model, optimizer), tmp_path / "d")


def test_what_is_tied_within_a_model_has_one_state(tmp_path: Path) -> None:
    def job(order: str) -> tuple[nn.Module, torch.optim.Adam]:
        model = nn.Module()
        for name in order:
            model.register_module(name, nn.Linear(2, 2, bias=False))
        model.b.weight = model.a.weight
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = job("ab")
    model.a.weight.sum().backward()
    optimizer.step()
    cloudckpt.save(TrainingState(model, optimizer), tmp_path / "c")
    state = cloudckpt.read(tmp_path / "c")
    assert ([*state["model"]], [*state["optimizer"]["state"]]) == (["a.weight", "b.weight"], ["a.weight"])
    again, fresh = job("ba")  # here the other name comes first
    cloudckpt.load(TrainingState(again, fresh), tmp_path / "c")
    assert torch.equal(fresh.state[again.a.weight]["exp_avg"], optimizer.state[model.a.weight]["exp_avg"])
    split = nn.ModuleDict({"b": nn.Linear(2, 2, bias=False)})  # the last of two stages, with nothing declared
    last = torch.optim.Adam(split.parameters(), lr=0.7)
    cloudckpt.load(TrainingState(split, last), tmp_path / "c", strict=False)
    assert torch.equal(last.state[split.b.weight]["exp_avg"], optimizer.state[model.a.weight]["exp_avg"])
    assert last.param_groups[0]["lr"] == 0.1


def test_extras_of_every_kind(tmp_path: Path) -> None:
    ema = make(3)
    extra = {"ema": ema, "seen": {1: torch.arange(3), "1": 2}, "mine": PerRank([1, 2]), "best": 0.25, "note": None}
    cloudckpt.save(TrainingState(make(), **extra), tmp_path / "c")
    other = make(4)
    seen = {1: torch.zeros(3, dtype=torch.int64), "1": 0}
    state = TrainingState(make(), ema=other, seen=seen, mine=PerRank(), best=0.0, note=1)
    cloudckpt.load(state, tmp_path / "c")
    assert same_model(ema, other)
    assert (seen[1].tolist(), seen["1"]) == ([0, 1, 2], 2)
    assert (state.extra["mine"].value, state.extra["best"], state.extra["note"]) == ([1, 2], 0.25, None)


def test_in_memory_there_and_back() -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    again = make(1)
    fresh = torch.optim.Adam(again.parameters(), lr=0.2)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    state = TrainingState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3), step=2).state_dict()
    expected = random.random(), np.random.random_sample()  # noqa: NPY002
    target = TrainingState(again, fresh, torch.optim.lr_scheduler.StepLR(fresh, 7), step=0)
    target.load_state_dict(state)
    assert same_model(model, again)
    assert (target.extra["step"], fresh.param_groups[0]["lr"]) == (2, 0.1)
    assert fresh.state[again[0].weight]["step"] == 1
    assert (random.random(), np.random.random_sample()) == expected  # noqa: NPY002


class Counting(nn.Module):
    """A module with state that is no tensor, in its own key."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    model = nn.Sequential(Counting())
    model[0].count = 7
    cloudckpt.save(TrainingState(model), tmp_path / "c")
    again = nn.Sequential(Counting())
    cloudckpt.load(TrainingState(again), tmp_path / "c")
    assert again[0].count == 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: TrainingState({"w": 1}).state_dict(), "a model must be a torch.nn.Module or a sequence"),
        (lambda m: TrainingState(m, object()).state_dict(), "is not an optimizer with param_groups and state"),
        (lambda m: TrainingState(m, torch.optim.LBFGS(m.parameters())).state_dict(), "LBFGS keeps one history over"),
        (lambda m: TrainingState(m, scheduler=3), "a int has no state_dict"),
        (lambda m: TrainingState(m, dataloader=[1]), "a list has no state_dict"),
        (lambda m: TrainingState([m, m], names=[None]), "names= has 1 entries for 2 model parts"),
        (lambda m: TrainingState([m, m]).state_dict(), "'0.weight' is in model part 0 and in model part 1"),
        (lambda m: TrainingState(m, tied={"a": "b", "b": "c"}), "'a' is tied to 'b', which is itself tied"),
        (
            lambda m: TrainingState(m, masters={"0.wieght": m[0].weight}),
            "masters: '0.wieght' is no parameter of the mod",
        ),
        (
            lambda m: TrainingState(m, names=cloudckpt.global_layer_names(4, pp=2, stage=1)).state_dict(),
            "after 'layers', but this part has .2, 3. in global numbers: the names are '0.weight', '0.bias'",
        ),
        (lambda m: TrainingState(m, names=lambda _: "x").state_dict(), "'0.weight' and '0.bias' of the model are both"),
        (
            lambda m: TrainingState(m, [torch.optim.SGD(m.parameters(), lr=1) for _ in range(2)]).state_dict(),
            "parameter '0.weight' is in optimizer 0 and in optimizer 1",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(InvalidStateError, match=message):
        call(make())


def test_a_tie_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    model = make()
    cloudckpt.save({"train": TrainingState(model, rng=False)}, tmp_path / "c")
    for tied in ({"0.wieght": "2.weight"}, {"2.weight": "0.wieght"}):
        wrong = {"train": TrainingState(model, rng=False, tied=tied, include="model.1.*")}
        for call in (cloudckpt.load, lambda s, u: cloudckpt.save(s, u, overwrite=True)):
            with pytest.raises(InvalidStateError, match=r"'train': tied: '0.wieght' is in the model of no rank"):
                call(wrong, tmp_path / "c")


def test_a_state_of_a_parameter_that_is_gone_is_refused() -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(InvalidStateError, match=r"an entry for a tensor of shape \(2,\), which is no parameter"):
        TrainingState(model, optimizer).state_dict()
    optimizer.state["global"] = {"step": 1}
    optimizer.state.pop(model[2].bias)
    with pytest.raises(InvalidStateError, match="an entry for 'global', which is no parameter of its groups"):
        TrainingState(model, optimizer).state_dict()


def test_a_checkpoint_of_another_kind_is_named(tmp_path: Path) -> None:
    cloudckpt.save({"train": 3}, tmp_path / "c")
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"train": TrainingState(make())}, tmp_path / "c")
    assert caught.value.kinds == {"train": ("int", "TrainingState")}
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"other": TrainingState(make(), step=1)}, tmp_path / "c")
    assert "other.model.0.weight" in caught.value.missing
    assert caught.value.unexpected == ["train"]


def test_the_generator_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretend one: kind and module are all that is asked of it."""
    from cloudckpt.pytorch import rng

    class Device:
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(1)

        def get_rng_state(self) -> torch.Tensor:
            return self.generator.get_state()

        def set_rng_state(self, state: torch.Tensor) -> None:
            self.generator.set_state(state)

        def manual_seed(self, seed: int) -> None:
            self.generator.manual_seed(seed)

    def draw(device: Device) -> list[float]:
        return torch.rand(2, generator=device.generator).tolist()

    device = Device()
    monkeypatch.setattr(rng, "_device_module", lambda: ("npu", device))
    draw(device)
    state = rng.rng_state()
    assert state["device"]["kind"] == "npu"
    expected = draw(device)
    rng.set_rng_state(state)
    assert draw(device) == expected
    monkeypatch.setattr(rng, "_device_module", lambda: ("cuda", device))
    with pytest.warns(UserWarning, match="saved with a device of kind 'npu': the generator of 'cuda' is seeded anew"):
        rng.set_rng_state(state)
    other = draw(device)
    assert other != expected
    with pytest.warns(UserWarning, match="were saved by 2 ranks and are loaded by 3"):
        rng.set_rng_state(rng.derived_rng_state([state, state], 0, 3))
    assert draw(device) not in (expected, other)
    monkeypatch.setattr(rng, "_device_module", lambda: None)
    rng.set_rng_state(state)
    with pytest.raises(InvalidStateError, match="not the state of random number generators: KeyError"):
        rng.set_rng_state({"torch": torch.get_rng_state()})
