"""``import torch``: states of ``torch.save`` come out of ours with equal values, whatever their strides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import export_dcp, import_from
from cloudckpt.cli import main
from cloudckpt.config import MIB, Config
from tests.field.places import Place
from tests.ranks import RankPool
from tests.recipes.test_memory import ALLOWANCE, extra_memory
from tests.test_import_dcp import same_state


def state() -> dict[str, Any]:
    torch.manual_seed(2)
    base = torch.randn(50, 120)
    return {
        "model": torch.nn.Linear(30, 40).state_dict(),
        "bf16": torch.randn(33).to(torch.bfloat16),
        "views": {
            "columns": base[:, ::3],
            "box": base[10:40, 20:50],
            "turned": base.t(),
            "same turned": base.t(),
            "diagonal": base[:50, :50].diagonal(),
            "overlapping": base.as_strided((40, 40), (3, 2), 1),
            "expanded": base[0:1].expand(7, 120),
            "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        },
        "tied": [base, base, base.view(-1)],
        "none": torch.zeros(0, 4),
        "one": torch.tensor(3),
        "optimizer": {"param_groups": [{"lr": 0.5, "params": [0, 1]}], "state": {0: {"step": torch.tensor(1.0)}}},
    }


def import_on_ranks(file: str, url: str, options: Any) -> int:
    import_from("torch", file, url, src_options=options, dst_options=options)
    return dist.get_rank()


@pytest.mark.parametrize("place", ["local", "juicefs"], indirect=True)
def test_values_are_equal(ranks: RankPool, tmp_path: Path, place: Place):
    torch.save(state(), tmp_path / "x.pt")
    store = place.store("files")
    store.put("x.pt", (tmp_path / "x.pt").read_bytes())
    store.close()
    ranks.run(2, import_on_ranks, place.url("files/x.pt"), place.url(), place.options)
    found = place.read()
    found["model"] = dict(found["model"])
    same_state(found, {**state(), "model": dict(state()["model"])})
    assert found["tied"][0] is found["tied"][1]
    assert found["views"]["turned"] is found["views"]["same turned"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save({"a": torch.ones(3), "b": torch.nn.Linear(1, 1)}, tmp_path / "x.pth")
    arguments = ["import", "torch", str(tmp_path / "x.pth"), str(tmp_path / "ours")]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "b: torch.nn.modules.linear.Linear" in said
    assert "Save the state_dict() alone" in said
    assert main([*arguments, "--allow-pickle"]) == 0
    assert cloudckpt.read(tmp_path / "ours", names="a")["a"].tolist() == [1, 1, 1]


def prepare(folder: str, num_mib: int) -> None:
    """A file of that size, which takes twice as much in a checkpoint; and what imports and connections take."""
    (Path(folder) / "zeros").touch()
    tensor = torch.from_file(f"{folder}/zeros", shared=True, size=num_mib * MIB // 4).view(-1, 1024)
    torch.save({"w": tensor, "turned": tensor.t(), "small": torch.ones(10)}, f"{folder}/x.pt")
    torch.save({"a": torch.ones(2)}, f"{folder}/small.pt")
    import_from("torch", f"{folder}/small.pt", f"{folder}/small")
    export_dcp(f"{folder}/small", f"{folder}/small-dcp")


def measure_torch(folder: str, settings: dict[str, Any]) -> int:
    return extra_memory(lambda: import_from("torch", f"{folder}/x.pt", f"{folder}/ours", **settings))


def measure_export(folder: str, settings: dict[str, Any]) -> int:
    return extra_memory(lambda: export_dcp(f"{folder}/ours", f"{folder}/dcp", include=["w", "small"], **settings))


def measure_dcp(folder: str, settings: dict[str, Any]) -> int:
    return extra_memory(lambda: import_from("dcp", f"{folder}/dcp", f"{folder}/again", **settings))


def measured(pool: RankPool, folder: str, num_mib: int, **settings: Any) -> dict[str, int]:
    """Files of so many MiB, from torch to ours to DCP and back again: peaks of memory, in bytes."""
    pool.run(1, prepare, folder, num_mib)
    steps = (measure_torch, measure_export, measure_dcp)
    return {step.__name__: pool.run(1, step, folder, settings)[0] for step in steps}


@pytest.fixture
def untouched() -> Iterator[RankPool]:
    """A process in which nothing has grown the heap before."""
    pool = RankPool()
    yield pool
    pool.stop()


def test_memory(tmp_path: Path, untouched: RankPool):
    found = measured(untouched, str(tmp_path), 160, config=Config(memory_bytes=48 * MIB))
    assert max(found.values()) <= 48 * MIB + ALLOWANCE, found


@pytest.mark.long
def test_memory_of_4_gib(tmp_path: Path, untouched: RankPool):
    found = measured(untouched, str(tmp_path), 2048)
    assert max(found.values()) <= 256 * MIB, found
