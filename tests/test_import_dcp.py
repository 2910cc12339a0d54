"""``import dcp``: what torch's checkpoints hold comes out of ours bit for bit, at the places that it had."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt import import_from
from cloudckpt.cli import main
from cloudckpt.config import MIB, Config
from cloudckpt.errors import AlreadyCommittedError, InvalidStateError
from tests.data.make_dcp import numbers
from tests.field.places import Place
from tests.ranks import RankPool
from tests.test_migrate import same

DATA = Path(__file__).parent / "data"


def whole() -> dict[str, Any]:
    torch.manual_seed(5)
    return {
        "model": {"w": torch.randn(7, 5), "half": torch.randn(6, 4).to(torch.bfloat16), "one": torch.randn(4)},
        "optimizer": {
            "state": {"w": {"exp_avg": torch.randn(7, 5), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"]}],
        },
        "few": torch.randn(3, 2),
        "turned": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "short": torch.arange(5).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "none": torch.zeros(0, 4),
        "text": "x",
        "pair": (1, torch.ones(2), None),
        "list": [torch.ones(1), {"deep": torch.zeros(2)}],
    }


def save_by_torch(folder: str) -> None:
    """Shards of a mesh of 2 x 2: sharded twice, sharded and replicated, uneven, and fewer rows than ranks."""
    mesh = init_device_mesh("cpu", (2, 2))
    state = whole()
    state["model"]["w"] = distribute_tensor(state["model"]["w"], mesh, [Shard(0), Shard(1)])
    state["model"]["half"] = distribute_tensor(state["model"]["half"], mesh, [Shard(1), Replicate()])
    moment = state["optimizer"]["state"]["w"]
    moment["exp_avg"] = distribute_tensor(moment["exp_avg"], mesh, [Shard(0), Shard(0)])
    state["few"] = distribute_tensor(state["few"], mesh, [Shard(0), Shard(0)])
    dcp.save(state, checkpoint_id=folder)


def same_state(found: Any, wanted: Any, path: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert same(found.contiguous(), wanted.contiguous()), path
        return
    assert type(found) is type(wanted), path
    if isinstance(wanted, dict):
        assert sorted(found) == sorted(wanted), path
        for key, value in wanted.items():
            same_state(found[key], value, f"{path}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), path
        for index, value in enumerate(wanted):
            same_state(found[index], value, f"{path}.{index}")
    else:
        assert found == wanted, path


def import_on_ranks(folder: str, url: str, options: Any) -> tuple[int, str]:
    commit = import_from("dcp", folder, url, dst_options=options, step=7)
    return dist.get_rank(), commit.commit_id


@pytest.mark.parametrize("place", ["local", "juicefs"], indirect=True)
def test_shards_come_together(ranks: RankPool, tmp_path: Path, place: Place):
    folder = str(tmp_path / "dcp")
    ranks.run(4, save_by_torch, folder)
    found = ranks.run(2, import_on_ranks, folder, place.url(), place.options)
    assert len({commit for _, commit in found}) == 1
    same_state(place.read(), whole())
    with cloudckpt.open_checkpoint(place.url(), storage_options=place.options) as checkpoint:
        assert checkpoint.manifest.document.step == 7


def test_from_s3(place: Place, ranks: RankPool, tmp_path: Path):
    if place.options is None:
        pytest.skip("the source is local in the other tests")
    store = place.store("dcp")
    ranks.run(4, save_by_torch, str(tmp_path / "dcp"))
    for path in (tmp_path / "dcp").iterdir():
        store.put(path.name, path.read_bytes())
    store.close()
    import_from("dcp", place.url("dcp"), tmp_path / "ours", src_options=place.options, config=place.config())
    same_state(cloudckpt.read(tmp_path / "ours"), whole())


def test_other_names_and_dtypes(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_by_torch, str(tmp_path / "dcp"))
    import_from(
        "dcp", tmp_path / "dcp", tmp_path / "ours", rename=[("model.{k:*}", "net.{k:*}")], cast={"net.w": "bfloat16"}
    )
    state = cloudckpt.read(tmp_path / "ours", names=["net.*"])
    assert state["net"]["w"].equal(whole()["model"]["w"].bfloat16())
    assert state["net"]["one"].equal(whole()["model"]["one"])


def import_in_different_ways(url: str, options: list[dict[str, Any]]) -> None:
    import_from("dcp", DATA / "dcp-2.4", **{"dst": url, **options[dist.get_rank()]})


@pytest.mark.parametrize(
    ("name", "own", "others"),
    [
        ("compression", {}, {"compression": "zstd"}),
        ("cast", {"cast": "float16"}, {"cast": "bfloat16"}),
        ("rename", {}, {"rename": [("{name:*}", "x.{name:*}")]}),
        ("memory_bytes", {"config": Config(memory_bytes=8 * MIB)}, {"config": Config(memory_bytes=64 * MIB)}),
        ("dst", {}, {"dst": "elsewhere"}),
    ],
)
def test_ranks_that_want_different_things(
    ranks: RankPool, tmp_path: Path, name: str, own: dict[str, Any], others: dict[str, Any]
):
    """What they would write does not belong together: nothing is written."""
    with pytest.raises(AssertionError, match=rf"InvalidStateError: import dcp was called with {name}=.* on rank 1"):
        ranks.run(2, import_in_different_ways, str(tmp_path / "ours"), [own, others])
    assert not (tmp_path / "ours").exists()


def test_there_is_a_checkpoint(tmp_path: Path):
    import_from("dcp", DATA / "dcp-2.4", tmp_path / "ours")
    with pytest.raises(AlreadyCommittedError):
        import_from("dcp", DATA / "dcp-2.4", tmp_path / "ours")
    with pytest.raises(InvalidStateError):
        import_from("dcp", DATA / "dcp-2.4", tmp_path / "other", rename=[("nothing", "x")])
    assert not (tmp_path / "other").exists()


def test_megatron(tmp_path: Path):
    with pytest.warns(UserWarning, match=r"common\.args\.backend: __mp_main__\.Backend"):
        commit = import_from("dcp", DATA / "torch-dist", tmp_path / "ours")
    assert commit.step == 1200
    state = cloudckpt.read(tmp_path / "ours")
    assert same(state["embedding.weight"], numbers((4, 6), torch.bfloat16, 0))
    assert same(state["decoder.layers.weight"], numbers((2, 3, 4), torch.float32, 100))
    assert same(state["optimizer.state.exp_avg.embedding.weight"], numbers((4, 6), torch.float32, 200))
    assert state["rng_state/shard_1_2"][0][0]["torch"].tolist() == [1, 1, 1, 1]
    assert state["common"]["args"] == argparse.Namespace(hidden_size=6, bf16=True, dtype=torch.bfloat16)
    assert state["common"]["opt_param_scheduler"] == {"max_lr": 0.5, "num_steps": 9600}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["import", "dcp", str(DATA / "dcp-2.4"), str(tmp_path / "ours"), "--step", "3"]) == 0
    assert "wrote" in capsys.readouterr().out
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    assert main(["import", "dcp", str(tmp_path / "bad"), str(tmp_path / "other")]) == 1
    assert "posix.system, which is no part of DCP's metadata" in capsys.readouterr().err
