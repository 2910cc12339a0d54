"""verl-project/verl#6334: tied weights are stored once, and tied again after a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import TrainingState

TIED = {"head.weight": "emb.weight"}


class Model(torch.nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(16, 4)
        self.head = torch.nn.Linear(4, 16, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def gathered(model: Model) -> Model:
    """The full state in tensors of their own, as a gather makes them."""
    own = Model(tied=False)
    own.load_state_dict(model.state_dict())
    assert own.head.weight.data_ptr() != own.emb.weight.data_ptr()
    return own


def stored(url: Path) -> tuple[int, dict[str, Any]]:
    with cloudckpt.open_checkpoint(url) as checkpoint:
        return len(checkpoint.manifest.arrays), checkpoint.manifest.document.tree["model"]


def test_one_stored_copy_and_the_alias(tmp_path: Path):
    model = Model(tied=True)
    commit = cloudckpt.save(TrainingState(gathered(model), rng=False, tied=TIED), tmp_path / "c")
    count, tree = stored(tmp_path / "c")
    assert (count, commit.nbytes) == (1, 16 * 4 * 4 + 4 * commit.num_chunks)
    assert tree["head.weight"] == tree["emb.weight"]
    again = Model(tied=True)
    cloudckpt.load(TrainingState(again, rng=False), tmp_path / "c")
    assert again.head.weight is again.emb.weight
    assert torch.equal(again.head.weight, model.emb.weight)
    state = cloudckpt.read(tmp_path / "c")["model"]
    assert state["head.weight"] is state["emb.weight"]
    apart = Model(tied=False)
    cloudckpt.load(TrainingState(apart, rng=False), tmp_path / "c")
    assert torch.equal(apart.head.weight, apart.emb.weight)
    assert torch.equal(apart.head.weight, model.emb.weight)


def test_undeclared_copies_are_stored_apart_and_tied_by_the_target(tmp_path: Path):
    model = Model(tied=True)
    cloudckpt.save(TrainingState(gathered(model), rng=False), tmp_path / "c")
    assert stored(tmp_path / "c")[0] == 2
    again = Model(tied=True)
    cloudckpt.load(TrainingState(again, rng=False), tmp_path / "c")
    assert torch.equal(again.head.weight, model.emb.weight)


def test_copies_that_differ_are_both_kept_with_a_warning(tmp_path: Path):
    model = gathered(Model(tied=True))
    with torch.no_grad():
        model.head.weight[15, 3] += 1
    with pytest.warns(UserWarning, match="'model.head.weight' is declared to be tied to 'model.emb.weight', but they"):
        cloudckpt.save(TrainingState(model, rng=False, tied=TIED), tmp_path / "c")
    assert stored(tmp_path / "c")[0] == 2
    apart = Model(tied=False)
    cloudckpt.load(TrainingState(apart, rng=False), tmp_path / "c")
    assert torch.equal(apart.head.weight, model.head.weight)
    assert torch.equal(apart.emb.weight, model.emb.weight)
