"""The ``.metadata`` of DCP checkpoints of several releases, and of attackers."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from cloudckpt.errors import FormatError
from cloudckpt.format.box import Box
from cloudckpt.interop.dcp_metadata import DcpItem, DcpTensor, read_metadata
from tests.interop.test_pickle_reader import Attack

DATA = Path(__file__).parents[1] / "data"


def written(**fields: Any) -> dcp.Metadata:
    size = torch.Size([4, 6])
    chunks = [dcp.ChunkStorageMetadata(torch.Size([0, 3 * i]), torch.Size([4, 3])) for i in range(2)]
    entries = {
        "w": dcp.TensorStorageMetadata(dcp.TensorProperties(torch.bfloat16), size, chunks),
        "lr": dcp.BytesStorageMetadata(),
    }
    items = {
        dcp.MetadataIndex("w", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 1180),
        dcp.MetadataIndex("w", [0, 3], 1): _StorageInfo("__1_0.distcp", 7, 1180, ["stream.zstd/1"]),
        dcp.MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 1180, 700),
    }
    paths = {"w": ("model", "w"), "lr": ("groups", 0, "lr")}
    made = dcp.Metadata(entries, paths, items, dcp.StorageMeta(Path("somewhere"), "1"), "1.0.0")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_it_says(protocol: int):
    found = read_metadata(pickle.dumps(written(), protocol), "it")
    halves = (Box((0, 0), (4, 3)), Box((0, 3), (4, 3)))
    assert found.entries == {"w": DcpTensor("bfloat16", (4, 6), halves), "lr": None}
    assert found.items == {
        ("w", (0, 0)): DcpItem("__0_0.distcp", 0, 1180),
        ("w", (0, 3)): DcpItem("__1_0.distcp", 7, 1180, ("stream.zstd/1",)),
        ("lr", None): DcpItem("__0_0.distcp", 1180, 700),
    }
    assert found.paths == {"w": ("model", "w"), "lr": ("groups", 0, "lr")}
    assert found.version == "1.0.0"


@pytest.mark.parametrize("folder", ["dcp-1.13", "dcp-2.4", "torch-dist"])
def test_other_releases(folder: str):
    found = read_metadata((DATA / folder / ".metadata").read_bytes(), folder)
    shapes = {tensor.shape for tensor in found.entries.values() if tensor is not None}
    assert (4, 6) in shapes
    assert {item.key for item in found.items.values()} <= {path.name for path in (DATA / folder).iterdir()}


@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "state_dict_metadata", "extra"])
def test_what_would_execute_is_refused_by_name(tmp_path: Path, where: str):
    target = tmp_path / "made"
    with pytest.raises(FormatError, match=r"refers to posix\.mkdir, which is no part of DCP's metadata"):
        read_metadata(pickle.dumps(written(**{where: Attack(os.mkdir, str(target))})), "it")
    assert not target.exists()


def test_what_planners_of_others_keep_is_no_matter():
    assert read_metadata(pickle.dumps(written(planner_data=[1, 2], mcore_data={"w": {"a": (1,)}})), "it").paths == {}


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1},
        None,
        torch.Size([1]),
        written(state_dict_metadata={"w": 3}),
        written(state_dict_metadata={3: dcp.BytesStorageMetadata()}),
        written(storage_data=None),
        written(storage_data={"w": _StorageInfo("a", 0, 1)}),
        written(storage_data={dcp.MetadataIndex("w"): _StorageInfo("a", -1, 1)}),
        written(storage_data={dcp.MetadataIndex("w"): _StorageInfo(7, 0, 1)}),
        written(
            state_dict_metadata={"w": dcp.TensorStorageMetadata(dcp.TensorProperties(torch.bfloat16), (2, "x"), [])}
        ),
    ],
)
def test_what_is_no_metadata(value: Any):
    with pytest.raises(FormatError, match="not the metadata of a DCP checkpoint"):
        read_metadata(pickle.dumps(value), "it")


@given(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=5))
def test_damage(changes: list[tuple[int, int]]):
    data = bytearray((DATA / "dcp-2.4" / ".metadata").read_bytes())
    for place, value in changes:
        data[place % len(data)] = value
    with contextlib.suppress(FormatError):
        read_metadata(bytes(data), "it")
