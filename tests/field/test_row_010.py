"""intelligent-machine-learning/dlrover#867: every dtype comes back bit for bit, with no detour through another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.format.dtypes import DTYPES
from tests.sharding import bits, noise, other_bits, same_bits

NAMES = [name for name in DTYPES if hasattr(torch, name)]
SPECIAL = torch.tensor([1.0, -0.0, float("nan"), float("inf"), 3.14])


def test_the_types_of_the_report_are_among_them():
    reported = {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex32", "float4_e2m1fn_x2"}
    assert reported <= set(NAMES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("name", NAMES)
def test_bits_and_dtype_come_back(tmp_path: Path, name: str, layout: str):
    dtype = getattr(torch, name)
    state = {
        "dense": noise((4, 5), dtype, seed=1),
        "scalar": noise((), dtype, seed=2),
        "empty": noise((0, 3), dtype),
        "transposed": noise((4, 5), dtype, seed=3).t(),
    }
    cloudckpt.save(state, tmp_path / "c", layout=layout)
    with cloudckpt.open_checkpoint(tmp_path / "c") as checkpoint:
        assert {info.dtype for info in checkpoint.arrays.values()} == {name}
    target = {key: other_bits(tensor) for key, tensor in state.items()}
    cloudckpt.load(target, tmp_path / "c")
    found = cloudckpt.read(tmp_path / "c")
    for key, tensor in state.items():
        assert same_bits(target[key], tensor), key
        assert same_bits(found[key], tensor), key


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_special_values(tmp_path: Path, name: str):
    values = SPECIAL.to(getattr(torch, name))
    cloudckpt.save({"w": values, "one": values[1]}, tmp_path / "c")
    found = cloudckpt.read(tmp_path / "c")
    assert bits(found["w"]) == bits(values)
    assert bits(found["one"]) == bits(values[1])
    assert found["one"].shape == ()
