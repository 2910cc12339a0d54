"""verl-project/verl#6334: tied weights are stored once, and tied again after a load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import TrainingState
from tests.safetensors_reader import INDEX, exported

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


def test_an_export_writes_the_first_name_only(tmp_path: Path):
    model = Model(tied=True)
    cloudckpt.save(TrainingState(gathered(model), rng=False, tied=TIED), tmp_path / "c")
    rename = [("model.{name:*}", "{name}")]
    report = cloudckpt.export_hf(tmp_path / "c", tmp_path / "out", include="model", rename=rename)
    assert (report.num_tensors, report.nbytes, report.tied) == (1, 16 * 4 * 4, {"head.weight": "emb.weight"})
    found = exported(tmp_path / "out")
    assert found is not None
    assert {*found} == {"emb.weight"}
    assert torch.equal(found["emb.weight"], model.emb.weight)
    head = {"include": "model.head.*", "rename": [("model.{name:*}", "{name}")]}
    cloudckpt.export_hf(tmp_path / "c", tmp_path / "head", **head)
    assert {*(exported(tmp_path / "head") or ())} == {"head.weight"}


def test_the_index_has_the_first_name_only(tmp_path: Path):
    tied = torch.arange(64.0)
    state = {"first": tied, "other": torch.ones(70), "last": tied}
    cloudckpt.save(state, tmp_path / "c")
    report = cloudckpt.export_hf(tmp_path / "c", tmp_path / "out", max_shard_bytes=300)
    assert (len(report.files), report.tied) == (2, {"last": "first"})
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert {*index["weight_map"]} == {"first", "other"}
    assert index["metadata"]["total_size"] == 4 * (64 + 70)
    assert {*(exported(tmp_path / "out") or ())} == {"first", "other"}
