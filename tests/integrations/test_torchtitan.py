"""torchtitan's CheckpointManager over a run; the example has shown that it resumes."""

from __future__ import annotations

import importlib.util
import runpy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.examples.within import EXAMPLES
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")

_EXAMPLE: dict[str, Any] = {}


def make_trainer(folder: str, **settings: Any) -> Any:
    """The example's, with other settings of ``checkpoint``."""
    if not _EXAMPLE:
        _EXAMPLE.update(runpy.run_path(str(EXAMPLES / "titan.py")))
    variables = _EXAMPLE["Trainer"].__init__.__globals__
    with mock.patch.dict(variables, Checkpoint=partial(variables["Checkpoint"], **settings)):
        return _EXAMPLE["Trainer"](folder)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in trainer.model.named_parameters()}


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))


def train(url: str) -> dict[str, torch.Tensor]:
    trainer = make_trainer(url)
    trainer.train(10)
    return weights(trainer)


def load_on_one(url: str) -> dict[str, torch.Tensor]:
    trainer = make_trainer(url)
    assert trainer.checkpointer.load()
    assert trainer.step == 10
    trainer.checkpointer.close()
    return weights(trainer)


def load_this_and_that(url: str) -> None:
    from cloudckpt.errors import InvalidStateError, MismatchError, NotFoundError

    trained, first = make_trainer(f"{url}/run"), make_trainer(f"{url}/other")
    assert not trained.checkpointer.load()
    trained.train(10)
    with pytest.raises(NotFoundError, match="step 7"):
        trained.checkpointer.load(step=7)
    assert trained.checkpointer.load(step=5)
    assert trained.step == 5

    # Without what is excluded; and only what is asked for must be there.
    part = make_trainer(f"{url}/run", exclude_from_loading=["optimizer", "train_state"])
    assert part.checkpointer.load(step=5)
    assert equal(part, trained)
    assert part.step == 0
    assert not any(optimizer.state for optimizer in part.optimizers)
    more = make_trainer(f"{url}/run")
    more.checkpointer.states["extra"] = {"a": 1}
    with pytest.raises(MismatchError, match=r"extra\.a"):
        more.checkpointer.load(step=5)

    # Another run's model, to begin with: of this library's, and DCP's.
    fresh = make_trainer(f"{url}/fresh", initial_load_path=f"file://{url}/run/step-00000005")
    assert fresh.checkpointer.load()
    assert equal(fresh, trained)
    assert fresh.step == 0
    torch.distributed.checkpoint.save(dict(first.model.state_dict()), checkpoint_id=f"{url}/dcp")
    moved = make_trainer(f"{url}/moved", initial_load_path=f"{url}/dcp")
    assert moved.checkpointer.load()
    assert equal(moved, first)

    with pytest.raises(InvalidStateError, match="export hf"):
        make_trainer("s3://bucket/run", last_save_in_hf=True)
    assert not make_trainer(f"{url}/off", enable=False).checkpointer.load()


def test_loads_what_is_asked_for(ranks: RankPool, tmp_path: Path):
    ranks.run(2, load_this_and_that, str(tmp_path))


def test_another_number_of_ranks(ranks: RankPool, tmp_path: Path):
    saved, _ = ranks.run(2, train, str(tmp_path))
    (loaded,) = ranks.run(1, load_on_one, str(tmp_path))
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000010"]
