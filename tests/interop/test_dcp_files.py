"""DCP checkpoints: of several releases, odd ones, and broken ones, whose faults are all told at once."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo

from cloudckpt.config import Config
from cloudckpt.errors import FormatError, NotFoundError
from cloudckpt.interop.dcp_files import open_dcp
from cloudckpt.interop.foreign import Foreign, Origin
from cloudckpt.interop.nesting import nested
from cloudckpt.store.local import LocalStore
from cloudckpt.store.resolve import resolve

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def opened(folder: Path, **options: Any) -> Foreign:
    return open_dcp(Origin(resolve(str(folder), None, Config()), None, Config(), **options))


def saved(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def rewrite_metadata(folder: Path, change: Callable[[dcp_metadata.Metadata], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "dcp", {"a": torch.arange(10.0), "b": {"c": torch.ones(3, 4).t()}, "v": [1, "x"]})


def test_requests(tmp_path: Path):
    """Of small items many come with one request."""
    folder = saved(tmp_path / "dcp", {f"t{i}": torch.full((5,), i) for i in range(500)})
    store = LocalStore(str(folder))
    foreign = open_dcp(Origin(store, None, Config()))
    assert len(foreign.manifest.arrays) == 500
    assert store.counts.gets < 10
    large = saved(tmp_path / "large", {f"t{i}": torch.zeros(100_000) for i in range(20)})
    store = LocalStore(str(large))
    open_dcp(Origin(store, None, Config()))
    assert store.counts.gets <= 22
    assert store.counts.bytes_fetched < 200_000


def test_one_file_an_item(tmp_path: Path):
    folder = saved(tmp_path / "dcp", {"a": torch.ones(2), "b": torch.zeros(3)}, single_file_per_rank=False)
    assert [entry.key for entry in opened(folder).manifest.objects] == ["__0_0.distcp", "__0_1.distcp"]


def test_there_is_nothing(tmp_path: Path):
    with pytest.raises(NotFoundError, match=r"there is no \.metadata, which is written last"):
        opened(tmp_path)


def test_ranks_that_saved_for_themselves(tmp_path: Path):
    (tmp_path / "__0.metadata").touch()
    with pytest.raises(NotFoundError, match="saved without collectives, each for itself"):
        opened(tmp_path)


def test_the_safetensors_form(tmp_path: Path):
    form = SerializationFormat.SAFETENSORS
    folder = saved(tmp_path / "dcp", {"a": torch.ones(50), "v": 1}, serialization_format=form)
    with pytest.raises(FormatError, match=r"a: __0_0\.distcp at byte \d+: in the safetensors form"):
        opened(folder)


def test_all_faults_at_once(checkpoint: Path):
    def change(metadata: dcp_metadata.Metadata) -> None:
        items, entries = metadata.storage_data, metadata.state_dict_metadata
        items[dcp_metadata.MetadataIndex("a", [0])] = _StorageInfo("__7_0.distcp", 0, 10)
        items[dcp_metadata.MetadataIndex("b.c", [0, 0])] = _StorageInfo("__0_0.distcp", 10**6, 10)
        properties = dcp_metadata.TensorProperties(torch.float32)
        size = torch.Size([4])
        parts = [dcp_metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
        entries["gap"] = dcp_metadata.TensorStorageMetadata(properties, size, parts)
        parts = [dcp_metadata.ChunkStorageMetadata(torch.Size([i]), torch.Size([3])) for i in (0, 1)]
        entries["overlap"] = dcp_metadata.TensorStorageMetadata(properties, size, parts)
        parts = [dcp_metadata.ChunkStorageMetadata(torch.Size([2]), torch.Size([3]))]
        entries["outside"] = dcp_metadata.TensorStorageMetadata(properties, size, parts)
        parts = [dcp_metadata.ChunkStorageMetadata(torch.Size([0]), size)]
        entries["nowhere"] = dcp_metadata.TensorStorageMetadata(properties, size, parts)
        entries["value"] = dcp_metadata.BytesStorageMetadata()

    rewrite_metadata(checkpoint, change)
    with pytest.raises(FormatError) as caught:
        opened(checkpoint)
    text = str(caught.value)
    assert "a: its file __7_0.distcp is missing" in text
    assert "b.c: ends at byte 1000010 of __0_0.distcp" in text
    assert "gap: its parts leave out 2 of its 4 elements" in text
    assert "overlap: its parts [0:3] and [1:4] overlap" in text
    assert "outside: its part [2:5] reaches out of its shape (4,)" in text
    assert "nowhere: nowhere said where its part [0:4] lies" in text
    assert "value: listed, but it is nowhere said where it lies" in text


def test_what_does_not_fit(checkpoint: Path):
    def change(metadata: dcp_metadata.Metadata) -> None:
        entry = metadata.state_dict_metadata["a"]
        entry.properties = dcp_metadata.TensorProperties(torch.float64)
        entry = metadata.state_dict_metadata["b.c"]
        entry.size = entry.chunks[0].sizes = torch.Size([3, 4])

    rewrite_metadata(checkpoint, change)
    with pytest.raises(FormatError) as caught:
        opened(checkpoint)
    assert "float32 (10,), where .metadata says float64 (10,)" in str(caught.value)
    assert "float32 (4, 3), where .metadata says float32 (3, 4)" in str(caught.value)


def test_damaged_items(checkpoint: Path):
    path = checkpoint / "__0_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(FormatError) as caught:
        opened(checkpoint)
    assert str(caught.value).count("not a file of torch.save, which is a ZIP archive") == 3


class Opaque:
    def __init__(self) -> None:
        self.made = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    def __hash__(self) -> int:
        return 1


class Executes:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_values_that_only_code_can_make(tmp_path: Path):
    target = tmp_path / "made"
    folder = saved(tmp_path / "dcp", {"a": {"b": [1, Executes(str(target))]}, "c": Opaque()})
    with pytest.raises(FormatError) as caught:
        opened(folder)
    assert "a.b.1: posix.mkdir, which only code can make (allow_pickle=True runs it)" in str(caught.value)
    assert "c: copyreg._reconstructor" in str(caught.value) or "c: tests.interop.test_dcp_files.Opaque" in str(
        caught.value
    )
    assert not target.exists()


def test_values_as_pickles(tmp_path: Path):
    folder = saved(tmp_path / "dcp", {"a": {"b": (1, Opaque())}, "w": torch.ones(2)})
    tree = opened(folder, allow_pickle=True).manifest.document.tree
    assert tree["a"]["b"]["items"][0] == 1
    assert tree["a"]["b"]["items"][1]["$"] == "pickle"


def test_transformed_items_are_refused(checkpoint: Path):
    def change(metadata: dcp_metadata.Metadata) -> None:
        info = metadata.storage_data[dcp_metadata.MetadataIndex("a", [0])]
        info.transform_descriptors = ["stream.zstd/1"]

    rewrite_metadata(checkpoint, change)
    with pytest.raises(FormatError, match=r"a: its bytes went through stream\.zstd/1, which is not undone here"):
        opened(checkpoint)


def test_archives_written_by_others(checkpoint: Path):
    """Where the padding is not torch's, the place of the bytes is read from the archive."""
    path = checkpoint / "__0_0.distcp"
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    index = dcp_metadata.MetadataIndex("a", [0])
    info = metadata.storage_data[index]
    item = path.read_bytes()[info.offset : info.offset + info.length]
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    (checkpoint / "other").write_bytes(buffer.getvalue())
    rewrite_metadata(
        checkpoint, lambda m: m.storage_data.update({index: _StorageInfo("other", 0, len(buffer.getvalue()))})
    )
    foreign = opened(checkpoint)
    number = next(i for i, entry in enumerate(foreign.manifest.arrays) if entry.name == "a")
    chunk = foreign.manifest.arrays[number].first_chunk
    start = int(foreign.manifest.columns.byte_offset[chunk])
    data = (checkpoint / "other").read_bytes()[start : start + 40]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).equal(torch.arange(10.0))


def test_compressed_archives_are_refused(checkpoint: Path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("archive/data.pkl", b"N." + b"a" * 1000)
    (checkpoint / "other").write_bytes(buffer.getvalue())
    rewrite_metadata(
        checkpoint,
        lambda m: m.storage_data.update(
            {dcp_metadata.MetadataIndex("a", [0]): _StorageInfo("other", 0, len(buffer.getvalue()))}
        ),
    )
    with pytest.raises(FormatError, match=r"is compressed; torch\.save stores all"):
        opened(checkpoint)


def test_megatron_of_another_format(checkpoint: Path):
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(FormatError, match="format 'zarr'; save them as 'torch_dist'"):
        opened(checkpoint)


def test_megatron_without_its_common_part(tmp_path: Path):
    folder = tmp_path / "torch-dist"
    shutil.copytree(Path(__file__).parents[1] / "data" / "torch-dist", folder)
    (folder / "common.pt").unlink()
    with pytest.raises(FormatError, match=r"common\.pt is missing"):
        opened(folder)


def test_nesting():
    paths = {"a.b": ("a", "b"), "l.1": ("l", 1, "x"), "l.0": ("l", 0, "x")}
    assert nested({"a.b": 1, "l.1": 2, "l.0": 3, "z": 4}, paths, "it") == {
        "a": {"b": 1},
        "l": [{"x": 3}, {"x": 2}],
        "z": 4,
    }
    assert nested({"l": 1}, {"l": ("l", 2)}, "it") == {"l": [None, None, 1]}


@pytest.mark.parametrize(
    "paths",
    [
        {"x": ("a",), "y": ("a",)},
        {"x": ("a",), "y": ("a", "b")},
        {"x": ("a", "b"), "y": ("a",)},
        {"x": ("a", 0), "y": ("a", "b")},
        {"x": (0,)},
        {"x": ("a", -1)},
        {"x": ("a", 10**9)},
        {"x": ("a", 60_000), "y": ("b", 60_000)},
        {"x": ("a",) * 1000},
    ],
)
def test_places_that_clash(paths: dict[str, Any]):
    with pytest.raises(FormatError, match=r"^it: "):
        nested(dict.fromkeys(paths, 1), paths, "it")
