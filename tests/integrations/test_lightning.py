"""Lightning's own Trainer and ModelCheckpoint, with checkpoints of this library."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.errors import FormatError, InvalidStateError, MismatchError, NotFoundError, RankError
from cloudckpt.verify import verify
from tests.examples.within import run_here
from tests.ranks import RankPool
from tests.servers.process import S3Server

pytest.importorskip("lightning")

from cloudckpt.integrations.lightning import CheckpointIO
from tests.integrations import lightning_jobs as jobs

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),  # Lightning, with torch's newest pytree
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*You defined a `validation_step` but have no `val_dataloader`"),
]


class Odd:
    def __init__(self, size: int):
        self.size = size


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name]) for name in one)


@pytest.mark.parametrize("background", [False, True])
def test_resumes_as_if_it_had_not_stopped_and_keeps_the_best(tmp_path: Path, background: bool):
    whole, _, _ = jobs.fit(str(tmp_path / "whole"), 5)
    run = tmp_path / "parts"
    jobs.fit(str(run), 2, io=CheckpointIO(background=background), save_top_k=2)
    rest, callback, _ = jobs.fit(
        str(run), 5, io=CheckpointIO(background=background), ckpt_path=str(run / "last.ckpt"), save_top_k=2
    )

    assert equal(jobs.weights(rest), jobs.weights(whole))
    names = {Path(path).name for path in callback.best_k_models}
    assert {path.name for path in run.iterdir()} == {*names, "last.ckpt"}
    assert names == {"epoch=3.ckpt", "epoch=4.ckpt"}
    for path in run.iterdir():  # what was replaced is gone
        assert len(list(path.rglob("*.zarr.zip"))) == 1
        assert verify(path).ok


def test_on_s3(juicefs_s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    bucket = juicefs_s3.make_bucket(f"lightning-{secrets.token_hex(4)}")
    # Lightning itself looks whether a path exists, with what the environment says.
    monkeypatch.setenv("AWS_ENDPOINT_URL", juicefs_s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", juicefs_s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", juicefs_s3.secret)
    url = f"s3://{bucket}/run"
    whole, _, _ = jobs.fit(str(tmp_path), 3)
    jobs.fit(url, 2, io=CheckpointIO(background=True), save_top_k=1)
    rest, callback, _ = jobs.fit(url, 3, io=CheckpointIO(background=True), ckpt_path=f"{url}/last.ckpt", save_top_k=1)

    assert equal(jobs.weights(rest), jobs.weights(whole))
    assert callback.best_model_path == f"{url}/epoch=2.ckpt"
    client = juicefs_s3.client()
    keys = [found["Key"] for found in client.list_objects_v2(Bucket=bucket)["Contents"]]
    client.close()
    assert sorted({key.split("/")[1] for key in keys if "/" in key and not key.endswith("/")}) == [
        "epoch=2.ckpt",
        "last.ckpt",
    ]
    assert sum(key.endswith(".zarr.zip") for key in keys) == 2


def test_plain_values_come_back(tmp_path: Path):
    state = {
        "state_dict": {"w": torch.arange(3.0)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"betas": (0.9, 0.95)}]}],
        "hyper_parameters": {"path": tmp_path, "none": None, "names": ("a", "b")},
        "global_step": 7,
        "Data.<locals>.Module": {"seen": 3},
    }
    io = CheckpointIO()
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    found = io.load_checkpoint(tmp_path / "a.ckpt", map_location=torch.device("cpu"))
    assert torch.equal(found.pop("state_dict")["w"], state.pop("state_dict")["w"])
    assert found == state
    with cloudckpt.open_checkpoint(tmp_path / "a.ckpt") as checkpoint:
        assert checkpoint.step == 7
    with pytest.raises(InvalidStateError, match="must be a device"):
        io.load_checkpoint(tmp_path / "a.ckpt", map_location=lambda storage, _: storage)


def test_what_is_no_plain_value_is_refused_by_name(tmp_path: Path):
    module = jobs.Net(hidden=Odd(3))
    with pytest.raises(InvalidStateError, match=r"hyper_parameters\.hidden"):
        jobs.fit(str(tmp_path), 1, module=module)
    module = jobs.Net(hidden=Odd(3))
    io = CheckpointIO(allow_pickle=True)
    jobs.fit(str(tmp_path), 1, io=io, module=module)
    assert io.load_checkpoint(tmp_path / "last.ckpt")["hyper_parameters"]["hidden"].size == 3
    with pytest.raises(FormatError, match="allow_pickle"):
        CheckpointIO().load_checkpoint(tmp_path / "last.ckpt")


def test_a_background_save_that_fails_ends_the_fit_and_costs_no_checkpoint(tmp_path: Path):
    io = CheckpointIO(background=True)
    io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "old.ckpt")
    (tmp_path / "file").write_text("in the way")
    io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "file" / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(cloudckpt.errors.CloudckptError, match="file"):
        io.teardown()
    assert io.load_checkpoint(tmp_path / "old.ckpt")["w"].tolist() == [1, 1]
    io.remove_checkpoint(tmp_path / "old.ckpt")
    assert not (tmp_path / "old.ckpt").exists()


def test_only_checkpoints_are_removed(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("mine")
    CheckpointIO().remove_checkpoint(tmp_path / "notes")
    CheckpointIO().remove_checkpoint(tmp_path / "nothing")
    assert (tmp_path / "notes" / "text").read_text() == "mine"
    with pytest.raises(NotFoundError):
        CheckpointIO().load_checkpoint(tmp_path / "nothing")


def test_ddp_saves_from_one_rank(ranks: RankPool, tmp_path: Path):
    whole = ranks.run(2, jobs.fit_ddp, str(tmp_path / "whole"), 3)
    ranks.run(2, jobs.fit_ddp, str(tmp_path / "parts"), 2)
    rest = ranks.run(2, jobs.fit_ddp, str(tmp_path / "parts"), 3, str(tmp_path / "parts" / "last.ckpt"))
    assert all(equal(one, other) for one, other in zip(rest, whole, strict=True))


def test_shards_are_saved_by_their_ranks_and_loaded_on_any_number(ranks: RankPool, tmp_path: Path):
    whole, _ = ranks.run(2, jobs.fit_sharded, str(tmp_path / "whole"), 3)
    half = tmp_path / "half"
    ranks.run(2, jobs.fit_sharded, str(half), 2)
    assert jobs.num_writers(half / "last.ckpt") == 2

    for rest in ranks.run(2, jobs.fit_sharded, str(half), 3, str(half / "epoch=1.ckpt")):
        assert equal(rest, whole)
    (rest,) = ranks.run(1, jobs.fit_sharded, str(tmp_path / "on-1"), 3, str(half / "epoch=1.ckpt"))
    assert close(rest, whole)
    module, _, _ = jobs.fit(str(tmp_path / "plain"), 3, ckpt_path=str(half / "epoch=1.ckpt"), monitor=None)
    assert close(jobs.weights(module), whole)
    rest, _ = ranks.run(2, jobs.fit_sharded, str(tmp_path / "back"), 4, str(tmp_path / "plain" / "last.ckpt"))
    more, _ = ranks.run(2, jobs.fit_sharded, str(half), 4, str(tmp_path / "whole" / "last.ckpt"))
    assert close(rest, more)


def test_validating_loads_the_model_alone_and_misses_nothing_silently(ranks: RankPool, tmp_path: Path):
    ranks.run(2, jobs.fit_sharded, str(tmp_path), 1)
    losses = ranks.run(2, jobs.validate_sharded, str(tmp_path / "last.ckpt"))
    assert losses[0] == losses[1]
    state: dict[str, Any] = CheckpointIO().load_checkpoint(tmp_path / "last.ckpt")
    del state["state_dict"]["net.2.bias"]
    CheckpointIO().save_checkpoint(state, tmp_path / "cut.ckpt")
    told = ranks.run(2, jobs.error_of, "validate_sharded", str(tmp_path / "cut.ckpt"))
    assert all(name == MismatchError.__name__ and "net.2.bias" in text for name, text in told)
    told = ranks.run(2, jobs.error_of, "fit_sharded", str(tmp_path), 2, str(tmp_path / "cut.ckpt"))
    assert all(name in (MismatchError.__name__, RankError.__name__) and "net.2.bias" in text for name, text in told)


def test_what_is_not_sharded_is_the_first_ranks(ranks: RankPool, tmp_path: Path):
    ranks.run(2, jobs.fit_unreduced, str(tmp_path))
    (state,) = CheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["callbacks"].values()
    assert state["best_model_score"] == 0
    assert jobs.num_writers(tmp_path / "last.ckpt") == 2


def test_a_slash_at_the_end(tmp_path: Path):
    io = CheckpointIO()
    for _ in range(2):
        io.save_checkpoint({"w": torch.ones(2)}, f"{tmp_path}/a.ckpt/")
    assert len(list(tmp_path.rglob("*.zarr.zip"))) == 1
    io.remove_checkpoint(f"{tmp_path}/a.ckpt/")
    assert not list(tmp_path.iterdir())


def test_the_example(tmp_path: Path):
    assert "weights equal" in run_here("lightning_trainer.py", str(tmp_path))
