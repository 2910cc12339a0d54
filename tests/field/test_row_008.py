"""pytorch/pytorch#187138: a load must not cast to the target's dtype in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.errors import MismatchError

CASES = [
    (torch.tensor([16777217], dtype=torch.int32), torch.float32),
    (torch.tensor([1.2345678]), torch.bfloat16),
    (torch.tensor([1.0], dtype=torch.bfloat16), torch.float32),
    (torch.tensor([1], dtype=torch.int64), torch.int32),
    (torch.tensor([1], dtype=torch.uint8), torch.int8),
]


@pytest.mark.parametrize(("stored", "dtype"), CASES, ids=lambda v: str(getattr(v, "dtype", v)))
def test_another_dtype_is_an_error_that_names_both(tmp_path: Path, stored: torch.Tensor, dtype: torch.dtype):
    cloudckpt.save({"opt": {"w": stored}}, tmp_path / "c")
    target = {"opt": {"w": torch.full((1,), 7, dtype=dtype)}}
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load(target, tmp_path / "c")
    names = (str(stored.dtype).removeprefix("torch."), str(dtype).removeprefix("torch."))
    assert caught.value.dtypes == {"opt.w": names}
    assert all(text in str(caught.value) for text in ("opt.w", *names))
    assert target["opt"]["w"].item() == 7


@pytest.mark.parametrize("strict", [True, False])
def test_lenient_loads_do_not_cast_either(tmp_path: Path, strict: bool):
    cloudckpt.save({"w": CASES[0][0]}, tmp_path / "c")
    with pytest.raises(MismatchError):
        cloudckpt.load({"w": torch.zeros(1)}, tmp_path / "c", strict=strict)


def test_a_cast_that_is_asked_for_gives_the_values_of_to_and_is_reported(tmp_path: Path):
    stored = CASES[1][0]
    cloudckpt.save({"w": stored}, tmp_path / "c")
    target = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    report = cloudckpt.load(target, tmp_path / "c", cast=True)
    assert torch.equal(target["w"], stored.to(torch.bfloat16))
    assert report.cast == {"w": ("float32", "bfloat16")}


@pytest.mark.parametrize("case", [0, 3, 4])
def test_numbers_that_count_are_never_cast(tmp_path: Path, case: int):
    stored, dtype = CASES[case]
    cloudckpt.save({"w": stored}, tmp_path / "c")
    target = {"w": torch.full((1,), 7, dtype=dtype)}
    with pytest.raises(MismatchError):
        cloudckpt.load(target, tmp_path / "c", cast=True)
    assert target["w"].item() == 7
