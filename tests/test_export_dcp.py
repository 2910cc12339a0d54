"""``export dcp``: torch's own loader reads what comes out, bit for bit, into any sharding."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import cloudckpt
from cloudckpt import export_dcp, import_from
from cloudckpt.cli import main
from cloudckpt.config import MIB, Config
from cloudckpt.errors import AlreadyCommittedError, CloudckptError, InvalidStateError, NotFoundError
from cloudckpt.plan import dcp_items
from cloudckpt.plan.dcp_items import item_boxes
from tests.field.places import Place
from tests.ranks import RankPool
from tests.test_import_dcp import same_state, whole
from tests.test_migrate import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def loaded(folder: Path) -> dict[str, Any]:
    """Without a template: nested as ``planner_data`` says."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def test_torch_reads_it(tmp_path: Path):
    cloudckpt.save(whole(), tmp_path / "ours")
    report = export_dcp(tmp_path / "ours", tmp_path / "dcp")
    same_state(loaded(tmp_path / "dcp"), whole())
    assert (report.num_tensors, report.num_values) == (14, 5)
    assert report.files == ["__0_0.distcp", "__0_1.distcp"]
    target = whole()
    for value in (target["model"]["w"], target["float8"].view(torch.uint8)):
        value.zero_()
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    same_state(target, whole())


def test_there_and_back(tmp_path: Path):
    cloudckpt.save(whole(), tmp_path / "ours")
    export_dcp(tmp_path / "ours", tmp_path / "dcp")
    import_from("dcp", tmp_path / "dcp", tmp_path / "again")
    same_state(cloudckpt.read(tmp_path / "again"), whole())


def export_and_load(url: str, options: Any, folder: str) -> None:
    export_dcp(url, folder, src_options=options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = whole()
    target = {
        "model": {
            "w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
            "half": torch.zeros(6, 4, dtype=torch.bfloat16),
        }
    }
    dcp.load(target, checkpoint_id=folder)
    found = target["model"]["w"]
    assert isinstance(found, DTensor)
    assert found.full_tensor().equal(wanted["model"]["w"])
    assert target["model"]["half"].equal(wanted["model"]["half"])


@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_ranks(ranks: RankPool, place: Place, tmp_path: Path):
    place.save(whole())
    ranks.run(2, export_and_load, place.url(), place.options, str(tmp_path / "dcp"))
    same_state(loaded(tmp_path / "dcp"), whole())


@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_to_s3(place: Place, tmp_path: Path):
    cloudckpt.save(whole(), tmp_path / "ours")
    export_dcp(tmp_path / "ours", place.url("dcp"), dst_options=place.options, config=place.config())
    (tmp_path / "dcp").mkdir()
    store = place.store("dcp")
    for key in place.keys("dcp"):
        (tmp_path / "dcp" / key).write_bytes(store.get(key))
    store.close()
    same_state(loaded(tmp_path / "dcp"), whole())


def test_large_tensors_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dcp_items.item_boxes, "__defaults__", (1000,))
    monkeypatch.setattr(dcp_items, "SMALL_FILE_BYTES", 5000)
    state = {"w": torch.randn(40, 30), "wide": torch.randn(3, 700), "f": torch.arange(900.0), "none": torch.zeros(0)}
    cloudckpt.save(state, tmp_path / "ours", config=Config(chunk_bytes=512))
    report = export_dcp(tmp_path / "ours", tmp_path / "dcp", config=Config(memory_bytes=MIB))
    assert len(report.files) > 3
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    assert len(metadata.state_dict_metadata["w"].chunks) == 5
    same_state(loaded(tmp_path / "dcp"), state)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (7, 9), (3, 1, 50), (2, 2, 300), (1, 5, 5, 5)])
def test_items_tile_the_tensor(shape: tuple[int, ...]):
    seen = np.zeros(shape, dtype=int)
    boxes = item_boxes(shape, 4, 128)
    for box in boxes:
        seen[box.slices] += 1
        assert 4 * box.num_elements <= 128
    assert (seen == 1).all()
    assert boxes


def test_what_dcp_flattens_not(tmp_path: Path):
    """Tuples, numpy arrays and what differs per rank are one item each; tied tensors are stored once."""
    shared = torch.randn(300, 10)
    state = {
        "tied": {"a": shared, "b": shared},
        "pair": (torch.ones(2), np.arange(3), "x"),
        "array": np.arange(6.0).reshape(2, 3),
        "rng": cloudckpt.PerRank({"n": 1}),
        "lists": [[1, [2]], [torch.zeros(1)], []],
        3: {4.5: torch.ones(1)},
    }
    cloudckpt.save(state, tmp_path / "ours")
    report = export_dcp(tmp_path / "ours", tmp_path / "dcp")
    assert report.nbytes < 25_000
    found = loaded(tmp_path / "dcp")
    assert same(found["tied"]["a"], shared)
    assert same(found["tied"]["b"], shared)
    assert found["pair"][0].tolist() == [1, 1]
    assert (found["pair"][1] == np.arange(3)).all()
    assert (found["array"] == state["array"]).all()
    assert found["rng"] == [{"n": 1}]
    assert found["lists"][0] == [1, [2]]
    assert found["lists"][2] == []
    assert found["3"]["4.5"].tolist() == [1]


def test_names_and_dtypes(tmp_path: Path):
    cloudckpt.save(whole(), tmp_path / "ours")
    rename = [("model.{k:*}", "net.{k:*}")]
    export_dcp(tmp_path / "ours", tmp_path / "dcp", include="model", rename=rename, cast={"net.w": "bfloat16"})
    found = loaded(tmp_path / "dcp")
    assert found["net"]["w"].equal(whole()["model"]["w"].bfloat16())
    assert found["net"]["one"].equal(whole()["model"]["one"])
    with pytest.raises(InvalidStateError, match="floats do not become 'int8'"):
        export_dcp(tmp_path / "ours", tmp_path / "other", cast="int8")
    with pytest.raises(NotFoundError):
        export_dcp(tmp_path / "ours", tmp_path / "other", include="nothing")


def test_keys_that_clash(tmp_path: Path):
    cloudckpt.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "ours")
    with pytest.raises(InvalidStateError, match=r"\('a\.b',\) and \('a', 'b'\) are both 'a\.b' for DCP"):
        export_dcp(tmp_path / "ours", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def test_another_checkpoint_is_there(tmp_path: Path):
    cloudckpt.save({"a": torch.ones(1)}, tmp_path / "ours")
    dcp.save(whole(), storage_writer=dcp.FileSystemWriter(tmp_path / "dcp", thread_count=3), no_dist=True)
    before = sorted(path.name for path in (tmp_path / "dcp").iterdir())
    with pytest.raises(AlreadyCommittedError, match="holds a DCP checkpoint"):
        export_dcp(tmp_path / "ours", tmp_path / "dcp")
    same_state(loaded(tmp_path / "dcp"), whole())
    report = export_dcp(tmp_path / "ours", tmp_path / "dcp", overwrite=True)
    assert report.removed == [name for name in before if name not in (".metadata", "__0_1.distcp")]
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_1.distcp"]
    same_state(loaded(tmp_path / "dcp"), {"a": torch.ones(1)})


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cloudckpt.save(whole(), tmp_path / "ours")
    arguments = ["export", "dcp", str(tmp_path / "ours"), str(tmp_path / "dcp")]
    assert main([*arguments, "--dtype", "model.*=bf16"]) == 0
    assert "exported 14 tensors and 5 values" in capsys.readouterr().out
    assert loaded(tmp_path / "dcp")["model"]["w"].dtype == torch.bfloat16
    assert main(arguments) == 1
    assert "holds a DCP checkpoint" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--files", "x"]) == 1
    assert "--files is for hf" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--max-shard-size", "1GB"]) == 1
    assert "--max-shard-size is for hf" in capsys.readouterr().err


def test_casts_by_name(tmp_path: Path):
    cloudckpt.save({"a[0]": torch.ones(3), "n": torch.arange(2)}, tmp_path / "ours")
    for pattern in ("b*", "n"):
        with pytest.raises(InvalidStateError, match="cast: no tensor of floats matches"):
            export_dcp(tmp_path / "ours", tmp_path / "theirs", cast={pattern: "bfloat16"})
    assert not (tmp_path / "theirs" / ".metadata").exists()
    export_dcp(tmp_path / "ours", tmp_path / "theirs", cast={"a[0]": "bfloat16"})
    state = {"a[0]": torch.zeros(3, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=tmp_path / "theirs")
    assert state["a[0]"].equal(torch.ones(3, dtype=torch.bfloat16))


def test_a_checkpoint_of_megatron_is_not_mixed_with_another(tmp_path: Path):
    theirs = tmp_path / "theirs"
    shutil.copytree(Path(__file__).parent / "data" / "torch-dist", theirs)
    before = sorted(path.name for path in theirs.iterdir())
    cloudckpt.save({"w": torch.ones(3)}, tmp_path / "ours")
    with pytest.raises(AlreadyCommittedError, match="holds a checkpoint of Megatron"):
        export_dcp(tmp_path / "ours", theirs, overwrite=True)
    assert sorted(path.name for path in theirs.iterdir()) == before


def export_otherwise(src: str, dsts: list[str], options: list[dict[str, Any]]) -> str:
    rank = dist.get_rank()
    try:
        export_dcp(src, dsts[rank], dst_options=options[rank])
    except CloudckptError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_other", [True, False], ids=["another place", "a store that cannot be opened"])
def test_ranks_that_are_called_otherwise(ranks: RankPool, tmp_path: Path, is_other: bool):
    cloudckpt.save({"w": torch.ones(3)}, tmp_path / "ours")
    dsts = [str(tmp_path / "theirs"), str(tmp_path / ("others" if is_other else "theirs"))]
    told = ranks.run(2, export_otherwise, str(tmp_path / "ours"), dsts, [{}, {} if is_other else {"no": "such"}])
    expected = "export_dcp() was called with dst=" if is_other else "a local path takes no storage_options"
    assert [expected in text for text in told] == [True, True], told
    assert not (tmp_path / "theirs" / ".metadata").exists()
