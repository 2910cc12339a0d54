"""Comfy-Org/ComfyUI#15602, safetensors/safetensors#401: a reader takes malformed headers, or refuses valid ones.

All kinds of headers, with the official library as the oracle: tests/interop/test_safetensors_header.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cloudckpt
from cloudckpt.errors import FormatError
from tests.interop.safetensors_files import entry, file_bytes

ONE = json.dumps(entry())

MALFORMED: dict[str, tuple[bytes, str]] = {
    "overlap": (
        file_bytes({"a": entry(), "w": entry(data_offsets=(2, 6))}, bytes(6)),
        "tensor 'w' overlaps tensor 'a'",
    ),
    "gap": (
        file_bytes({"a": entry(), "w": entry(data_offsets=(8, 12))}, bytes(12)),
        "tensor 'w': the 4 bytes before it",
    ),
    "trailing bytes": (file_bytes({"w": entry()}, bytes(5)), "the 1 bytes at its end"),
    "truncated": (file_bytes({"w": entry()}, bytes(3)), "tensor 'w' ends at byte"),
    "size": (file_bytes({"w": entry(shape=(3,))}, bytes(4)), r"tensor 'w' of F32 \[3\] takes 12 bytes, its offsets 4"),
    "duplicate names": (file_bytes(f'{{"w": {ONE}, "w": {ONE}}}', bytes(4)), "tensor 'w' is listed twice"),
    "end before start": (file_bytes({"w": entry(data_offsets=(4, 0))}, bytes(4)), "tensor 'w' ends 4 bytes before"),
    "header length": (
        file_bytes({"w": entry()}, bytes(4), length=2**60),
        "its header would be 1152921504606846976 bytes",
    ),
    "metadata": (
        file_bytes({"__metadata__": {"x": 1}, "w": entry()}, bytes(4)),
        "__metadata__ must be an object of str",
    ),
}


@pytest.mark.parametrize(("data", "said"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_are_refused(tmp_path: Path, data: bytes, said: str):
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    state = {"a": torch.ones(1), "w": torch.ones(1)}
    for call in (
        lambda: cloudckpt.load_hf(state, path, strict=False),
        lambda: cloudckpt.import_from("hf", path, tmp_path / "c"),
    ):
        with pytest.raises(FormatError, match=rf"m\.safetensors.*{said}"):
            call()
    assert [tensor.item() for tensor in state.values()] == [1, 1]
    assert not (tmp_path / "c").exists()


VALID: dict[str, tuple[Any, bytes]] = {
    "empty metadata": ({"__metadata__": {}, "w": entry()}, bytes(range(4))),
    "no tensors": ({}, b""),
    "0-dim": ({"w": entry("F64", (), (0, 8))}, bytes(range(8))),
    "an empty tensor": ({"w": entry("BF16", (3, 0, 2), (0, 0)), "x": entry("U8", (2,), (0, 2))}, b"xy"),
}


@pytest.mark.parametrize(("header", "data"), VALID.values(), ids=VALID)
def test_valid_files_are_accepted(tmp_path: Path, header: Any, data: bytes):
    path = tmp_path / "v.safetensors"
    path.write_bytes(file_bytes(header, data))
    expected = load_file(path)
    state = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
    cloudckpt.load_hf(state, path)
    cloudckpt.import_from("hf", path, tmp_path / "c")
    for found in (state, cloudckpt.read(tmp_path / "c")):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name], tensor)
