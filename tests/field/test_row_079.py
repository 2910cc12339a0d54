"""huggingface/transformers#26961: order by time, by text or by number alone finds or removes the wrong checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cloudckpt import Checkpointer
from tests.field.places import Place


def save(run: Checkpointer, *steps: int) -> None:
    for step in steps:
        run.save(step, {"w": torch.full((10,), float(step))})


def value(run: Checkpointer, step: int | None = None) -> float:
    target = {"w": torch.zeros(10)}
    run.load(target, step)
    return target["w"][0].item()


def opened(place: Place, **settings: int) -> Checkpointer:
    return Checkpointer(place.root, storage_options=place.options, config=place.config(), **settings)


def test_after_a_rollback(place: Place):
    with opened(place) as run:
        save(run, 9, 10, 100)
        assert (run.steps(), run.latest()) == ([9, 10, 100], 100)
    with opened(place, keep_last=1) as run:  # a restart
        assert value(run, 9) == 9
        save(run, 20)
        # What was just written is never what goes, however large the abandoned number.
        assert (run.latest(), value(run)) == (20, 20)
    with opened(place) as run:
        assert run.steps() == [20]


@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_times_and_names_say_nothing(place: Place):
    with opened(place) as run:
        save(run, 9, 10, 100)
    root = Path(place.root)
    (root / "step-00000009").rename(root / "step-9")
    (root / "step-00000010").rename(root / "step-010")
    for name in ("step-final", "step-", "step-1e3", "steps-7", "epoch-99"):
        (root / name).mkdir()
        (root / name / "model.pt").write_text("mine")
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, (1e9 + number, 1e9 + number))
    for name in ("step-9", "step-010", "step-00000100"):
        age = {"step-9": 3e9, "step-010": 2e9, "step-00000100": 1e9}[name]
        os.utime(root / name / "manifest.json", (age, age))
    with opened(place, keep_last=2) as run:
        assert (run.steps(), run.latest()) == ([9, 10, 100], 100)
        assert value(run, 10) == 10
        run.keep(9)
        run.keep(10)
        assert run.prune() == []
        run.release(9)
        assert run.prune() == [9]
        save(run, 101)
        assert run.latest() == 101
    with opened(place, keep_last=1) as run:
        run.prune()
        assert run.steps() == [10, 101]
    assert sorted(path.name for path in root.iterdir()) == [
        "epoch-99",
        "step-",
        "step-00000101",
        "step-010",
        "step-1e3",
        "step-final",
        "steps-7",
    ]
    assert (root / "step-final/model.pt").read_text() == "mine"


@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_the_recorded_step_counts(place: Place):
    with opened(place) as run:
        save(run, 5, 6)
    root = Path(place.root)
    (root / "step-00000005").rename(root / "step-99999999")
    with opened(place) as run:
        assert (run.steps(), run.latest()) == ([5, 6], 6)
        assert value(run, 5) == 5
