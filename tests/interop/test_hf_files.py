"""Which files of a folder are the model, and what is said of those that are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _TYPES, save_file

from cloudckpt.config import Config
from cloudckpt.errors import FormatError, InvalidStateError, NotFoundError
from cloudckpt.format.dtypes import DTYPES
from cloudckpt.interop.foreign import Foreign, Origin, file_in
from cloudckpt.interop.hf_files import TORCH_DTYPES, open_hf
from cloudckpt.interop.hf_index import SUFFIXES, choose, parse_index
from cloudckpt.interop.safetensors_header import DTYPE_BITS
from cloudckpt.store.resolve import resolve
from tests.interop.safetensors_files import entry, file_bytes, write_index

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def found(url: Path) -> Foreign:
    folder, name = file_in(url, SUFFIXES)
    return open_hf(Origin(resolve(folder), name, Config()))


def names(foreign: Foreign) -> list[str]:
    return list(foreign.manifest.document.tree)


def write(folder: Path, **files: list[str]) -> Path:
    """Safetensors files by stem, each with small tensors of the given names."""
    for stem, tensors in files.items():
        save_file({name: torch.full((2, 3), float(len(name))) for name in tensors}, folder / f"{stem}.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"b": torch.ones(2), "a": torch.zeros(3, dtype=torch.int64)}, tmp_path / ONE)
    save_file({"c": torch.ones(4)}, tmp_path / TWO)
    write_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    return tmp_path


def test_an_index(sharded: Path):
    foreign = found(sharded)
    assert names(foreign) == ["a", "b", "c"]
    assert [entry.key for entry in foreign.manifest.objects] == [ONE, TWO]
    assert foreign.notes == ()
    assert names(found(sharded / INDEX)) == ["a", "b", "c"]
    assert names(found(sharded / TWO)) == ["c"]


def test_one_listing_and_one_request_a_file(sharded: Path):
    store = resolve(sharded)
    open_hf(Origin(store, None, Config()))
    assert store.counts.requests == 1 + 1 + 2  # the listing, the index, the headers


def test_all_that_an_index_names_and_is_not_there(sharded: Path):
    write_index(sharded, {"a": ONE, "b": TWO, "c": TWO, "x": ONE, "y": "no.safetensors", "z": "no.safetensors"})
    for url in (sharded, sharded / INDEX):
        with pytest.raises(FormatError) as caught:
            found(url)
        assert str(caught.value).splitlines() == [
            f"{sharded}/{INDEX} names what is not there; nothing was loaded:",
            "  file no.safetensors",
            f"  tensor 'b' in {TWO} ({ONE} has it)",
            f"  tensor 'x' in {ONE}",
            "  tensor 'y' in no.safetensors",
            "  tensor 'z' in no.safetensors",
        ]


def test_tensors_that_an_index_does_not_list(sharded: Path):
    write_index(sharded, {"a": ONE, "c": TWO})
    foreign = found(sharded)
    assert names(foreign) == ["a", "c"]
    assert foreign.notes == (f"{sharded}/{INDEX} does not list tensors of its files, which are left out: 'b' in {ONE}",)


def test_a_stray_file_beside_an_index(sharded: Path):
    write(sharded, stray=["a", "q"])
    foreign = found(sharded)
    assert names(foreign) == ["a", "b", "c"]
    assert foreign.notes == (
        f"{sharded}: safetensors files that do not belong to the model are ignored: stray.safetensors",
    )
    assert found(sharded / INDEX).notes == ()


def test_the_single_file_comes_before_its_index(sharded: Path):
    """As transformers has it."""
    write(sharded, model=["s"])
    foreign = found(sharded)
    assert names(foreign) == ["s"]
    assert [f"model.safetensors is taken, not {INDEX}" in note for note in foreign.notes] == [True, False]
    assert ONE in foreign.notes[1]


def test_the_index_of_diffusers_comes_before_the_single_file(sharded: Path):
    (sharded / INDEX).rename(sharded / "diffusion_pytorch_model.safetensors.index.json")
    write(sharded, diffusion_pytorch_model=["s"], **{"diffusion_pytorch_model.fp16": ["s"]})
    foreign = found(sharded)
    assert names(foreign) == ["a", "b", "c"]
    assert len(foreign.notes) == 1


def test_names_of_others(tmp_path: Path):
    write(tmp_path, **{"diffusion_pytorch_model": ["a"], "diffusion_pytorch_model.fp16": ["b"]})
    assert names(found(tmp_path)) == ["a"]
    other = tmp_path / "other"
    other.mkdir()
    write(other, consolidated=["a"])
    assert names(found(other)) == ["a"]
    write(other, part=["b"])
    write_index(other, {"b": "part.safetensors"}, "consolidated.safetensors.index.fp16.json")
    assert names(found(other)) == ["b"]
    write_index(other, {"a": "consolidated.safetensors"}, "x.safetensors.index.json")
    with pytest.raises(
        InvalidStateError, match=r"several indexes, pass the URL of one: consolidated.*, x\.safetensors"
    ):
        found(other)


def test_files_in_folders_below_do_not_count(sharded: Path):
    (sharded / "onnx").mkdir()
    write(sharded / "onnx", model=["s"])
    assert found(sharded).notes == ()


class TestWithoutIndex:
    def test_a_complete_set_of_numbered_files(self, tmp_path: Path):
        write(tmp_path, **{"model-00001-of-00002": ["a"], "model-00002-of-00002": ["b"]})
        foreign = found(tmp_path)
        assert (names(foreign), foreign.notes) == (["a", "b"], ())

    def test_numbers_that_are_missing(self, tmp_path: Path):
        write(tmp_path, **{"model-00002-of-00004": ["a"], "x-1-of-1": ["b"]})
        with pytest.raises(FormatError) as caught:
            found(tmp_path)
        said = ", ".join(f"model-0000{i}-of-00004.safetensors" for i in (1, 3, 4))
        assert str(caught.value) == f"{tmp_path} has no index, and of the numbered files 3 are not there: {said}"

    def test_other_names_are_united(self, tmp_path: Path):
        write(tmp_path, adapter=["a"], base=["b", "c"])
        foreign = found(tmp_path)
        assert names(foreign) == ["a", "b", "c"]
        said = f"{tmp_path} has no index: its 2 safetensors files are taken together"
        assert foreign.notes == (f"{said} (adapter.safetensors, base.safetensors)",)

    def test_one_name_in_two_files(self, tmp_path: Path):
        write(tmp_path, adapter=["a", "b"], base=["b", "c"])
        with pytest.raises(FormatError, match=r"'b' is in adapter\.safetensors and in base\.safetensors"):
            found(tmp_path)

    def test_a_name_that_claims_any_number_of_files(self):
        with pytest.raises(FormatError, match="no model has so many files"):
            choose(["m-1-of-999999999.safetensors"], "here")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "holds no safetensors files$"),
        (["pytorch_model.bin", "config.json"], r"but pickles \(pytorch_model.bin\): see `cloudckpt import torch`"),
        ([".metadata", "__0_0.distcp"], "cloudckpt import dcp"),
        (["manifest.json"], r"see cloudckpt\.load"),
    ],
)
def test_no_model(names: list[str], said: str):
    with pytest.raises(NotFoundError, match=said):
        choose(names, "here")


def test_a_file_or_folder_that_is_not_there(tmp_path: Path):
    for name in ("x", "x.safetensors", "x.json"):
        with pytest.raises(NotFoundError):
            found(tmp_path / name)


INDEXES: dict[str, tuple[Any, str]] = {
    "a file above": ({"weight_map": {"a": "../a.safetensors"}}, r"'\.\./a\.safetensors'.*part"),
    "a file elsewhere": ({"weight_map": {"a": "/etc/passwd"}}, "has an empty, '.' or '..' part"),
    "a file below": ({"weight_map": {"a": "x/a.safetensors"}}, "'x/a.safetensors' is not beside the index"),
    "a file above, Windows": ({"weight_map": {"a": "..\\a.safetensors"}}, "has a backslash"),
    "a file of a step beside": ({"weight_map": {"a": "../step-00000001/a.safetensors"}}, "is not beside the index"),
    "a URL": ({"weight_map": {"a": "https://host/a.safetensors"}}, "starts with a scheme"),
    "a drive": ({"weight_map": {"a": "C:a.safetensors"}}, "starts with a scheme or a drive"),
    "no name": ({"weight_map": {"a": ""}}, "unsafe object key ''"),
    "a null character": ({"weight_map": {"a": "a\0.safetensors"}}, "control character"),
    "a number": ({"weight_map": {"a": 1}}, "the file of tensor 'a' must be a string, not 1"),
    "a pickle": ({"weight_map": {"a": "pytorch_model.bin"}}, "is a pickle: see `cloudckpt import torch`"),
    "no weight_map": ({"metadata": {}}, "has no weight_map"),
    "a list for it": ({"weight_map": []}, "has no weight_map"),
    "a list": ([], "has no weight_map"),
    "a tensor twice": ('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "'a' is there twice"),
    "two maps": ('{"weight_map": {}, "weight_map": {}}', "'weight_map' is there twice"),
    "nothing": ("", "not valid JSON"),
    "no UTF-8": (b'{"weight_map": {"\xff": "x"}}', "not valid JSON"),
    "nesting without end": ("[" * 10**6, "not valid JSON"),
}


@pytest.mark.parametrize(("index", "said"), INDEXES.values(), ids=INDEXES)
def test_a_hostile_index(index: Any, said: str):
    data = index if isinstance(index, (str, bytes)) else json.dumps(index)
    with pytest.raises(FormatError, match=said) as caught:
        parse_index(data if isinstance(data, bytes) else data.encode(), "here.json")
    assert str(caught.value).startswith("here.json: ")


def test_sizes_in_an_index_are_information_only(sharded: Path):
    write_index(sharded, {"c": TWO}, metadata={"total_size": "many"})
    assert names(found(sharded)) == ["c"]


def test_a_damaged_file_is_named(sharded: Path):
    data = (sharded / TWO).read_bytes()
    (sharded / TWO).write_bytes(data[:-1])
    with pytest.raises(FormatError, match=f"{TWO}: tensor 'c' ends at byte"):
        found(sharded)


def test_what_files_say_about_themselves_is_kept_where_they_agree(sharded: Path):
    save_file({"b": torch.ones(2), "a": torch.ones(1)}, sharded / ONE, {"format": "pt", "part": "1"})
    save_file({"c": torch.ones(4)}, sharded / TWO, {"format": "pt", "part": "2"})
    assert found(sharded).manifest.document.metadata == {"safetensors": {"format": "pt"}}


class TestDataTypes:
    def test_all_of_the_format_have_a_name(self):
        assert set(TORCH_DTYPES) == set(DTYPE_BITS)
        assert {name for name in TORCH_DTYPES.values() if name} <= set(DTYPES)
        for name, dtype in _TYPES.items():  # the official library's, for those that its Python part knows
            assert f"torch.{TORCH_DTYPES[name]}" == str(dtype)

    def test_two_half_byte_elements_are_one_of_torch(self, tmp_path: Path):
        (tmp_path / "x.safetensors").write_bytes(file_bytes({"a": entry("F4", (3, 4), (0, 6))}, bytes(6)))
        (array,) = found(tmp_path).manifest.arrays
        assert (array.dtype, array.shape) == ("float4_e2m1fn_x2", (3, 2))

    def test_what_torch_cannot_have_is_listed(self, tmp_path: Path):
        header = {
            "a": entry("F6_E2M3", (4,), (0, 3)),
            "b": entry("F4", (2, 1), (3, 4)),
            "c": entry("F32", (0, 2**63), (4, 4)),
            "d": entry("F32", (1,) * 65, (4, 8)),
            "e": entry("F32", (1,), (8, 12)),
        }
        (tmp_path / "x.safetensors").write_bytes(file_bytes(header, bytes(12)))
        with pytest.raises(FormatError) as caught:
            found(tmp_path)
        assert str(caught.value).splitlines() == [
            f"{tmp_path} holds tensors that torch cannot have:",
            "  'a' in x.safetensors: it has no data type F6_E2M3",
            "  'b' in x.safetensors: the last dim of F4 [2, 1] must be even",
            f"  'c' in x.safetensors: shape [0, {2**63}]",
            "  'd' in x.safetensors: 65 dims",
        ]
