"""sgl-project/sglang#32279, huggingface/huggingface_hub#4725: an index names what is not there, and loading goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cloudckpt
from cloudckpt.errors import FormatError, NotFoundError
from tests.field.places import Place
from tests.interop.safetensors_files import write_index

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def write(folder: Path) -> Path:
    folder.mkdir()
    save_file({"a": torch.ones(3), "b": torch.ones(4)}, folder / ONE)
    save_file({"c": torch.ones(5)}, folder / TWO)
    write_index(folder, {"a": ONE, "b": ONE, "c": TWO})
    return folder


def put(folder: Path, place: Place) -> None:
    store = place.store("model")
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    store.close()


def load(place: Place) -> dict[str, torch.Tensor]:
    state = {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(5)}
    cloudckpt.load_hf(state, place.url("model"), storage_options=place.options, config=place.config())
    return state


def refused(place: Place, said: list[str]) -> None:
    """By load_hf, with its target as it was, and by an import, with nothing written."""
    state = {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(5)}
    common = {"config": place.config()}
    with pytest.raises(FormatError) as caught:
        cloudckpt.load_hf(state, place.url("model"), storage_options=place.options, strict=False, **common)
    assert all(text in str(caught.value) for text in said)
    assert not any(tensor.any() for tensor in state.values())
    with pytest.raises(FormatError) as again:
        cloudckpt.import_from(
            "hf", place.url("model"), place.url("c"), src_options=place.options, dst_options=place.options, **common
        )
    assert str(again.value) == str(caught.value)
    assert place.keys("c") == []


def test_a_file_that_is_not_there(place: Place, tmp_path: Path):
    folder = write(tmp_path / "files")
    (folder / TWO).unlink()
    put(folder, place)
    refused(place, [INDEX, f"file {TWO}\n", f"tensor 'c' in {TWO}"])


def test_a_tensor_that_its_file_lacks(place: Place, tmp_path: Path):
    folder = write(tmp_path / "files")
    write_index(folder, {"a": ONE, "b": ONE, "c": TWO, "x": TWO, "y": ONE})
    put(folder, place)
    refused(place, [INDEX, f"tensor 'x' in {TWO}", f"tensor 'y' in {ONE}"])


def test_a_stray_file_is_ignored_with_a_warning(place: Place, tmp_path: Path):
    folder = write(tmp_path / "files")
    save_file({"a": torch.zeros(3), "z": torch.ones(1)}, folder / "consolidated.safetensors")
    put(folder, place)
    with pytest.warns(UserWarning, match=r"are ignored: consolidated\.safetensors"):
        assert all(tensor.all() for tensor in load(place).values())


def test_files_without_an_index_are_taken_together(place: Place, tmp_path: Path):
    folder = write(tmp_path / "files")
    (folder / INDEX).unlink()
    put(folder, place)
    assert all(tensor.all() for tensor in load(place).values())


def test_files_without_an_index_that_share_a_name(place: Place, tmp_path: Path):
    folder = write(tmp_path / "files")
    (folder / INDEX).unlink()
    save_file({"a": torch.zeros(3), "c": torch.ones(5)}, folder / TWO)
    put(folder, place)
    refused(place, [f"'a' is in {ONE} and in {TWO}"])


def test_one_of_the_numbered_files_without_an_index(place: Place, tmp_path: Path):
    folder = write(tmp_path / "files")
    (folder / INDEX).unlink()
    (folder / ONE).unlink()
    put(folder, place)
    refused(place, [f"1 are not there: {ONE}"])


def test_nothing_at_all_is_another_error(place: Place):
    """A job that starts anew where nothing is found must not do so over a model that is damaged."""
    with pytest.raises(NotFoundError):
        load(place)
