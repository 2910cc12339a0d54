"""pytorch/pytorch#148252: missing, unexpected and misshapen keys are listed all at once, before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt.errors import CloudckptError, MismatchError
from tests.ranks import RankPool
from tests.sharding import error_of

STORED = {
    "w": torch.arange(4.0),
    "v": torch.ones(2),
    "row": torch.ones(1, 3),
    "scalar": torch.tensor(2.0),
    "wide": torch.ones(2, dtype=torch.float64),
    "step": 7,
    "list": [torch.ones(1), torch.ones(1)],
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    cloudckpt.save(STORED, tmp_path / "c")
    return str(tmp_path / "c")


def zeros() -> dict[str, Any]:
    target = {key: torch.zeros_like(value) for key, value in STORED.items() if isinstance(value, torch.Tensor)}
    return {**target, "step": 0, "list": [torch.zeros(1), torch.zeros(1)]}


def faulty_target() -> dict[str, Any]:
    target = zeros()
    del target["v"]
    return {
        **target,
        "u": {"a": torch.zeros(1), "b": 0},
        "row": torch.zeros(4, 3),
        "scalar": torch.zeros(1),
        "wide": torch.zeros(2),
        "list": [torch.zeros(1), torch.zeros(1), torch.zeros(1)],
    }


def check(error: CloudckptError | None) -> None:
    assert isinstance(error, MismatchError)
    assert sorted(error.missing) == ["list.2", "u.a", "u.b"]
    assert error.unexpected == ["v"]
    assert error.shapes == {"row": ((1, 3), (4, 3)), "scalar": ((), (1,))}
    assert error.dtypes == {"wide": ("float64", "float32")}
    assert error.kinds == {}
    for text in ("missing", "u.a", "unexpected", "v", "row", "(1, 3)", "(4, 3)", "scalar", "wide", "float64"):
        assert text in str(error)


def unchanged(target: dict[str, Any]) -> bool:
    tensors = [value for value in target.values() if isinstance(value, torch.Tensor)] + target["list"]
    return target["step"] == 0 and not any(tensor.any() for tensor in tensors)


def test_all_faults_in_one_error(url: str):
    target = faulty_target()
    check(error_of(lambda: cloudckpt.load(target, url)))
    assert unchanged(target)


def test_lenient_loads_do_not_forgive_shapes_and_dtypes(url: str):
    target = faulty_target()
    error = error_of(lambda: cloudckpt.load(target, url, strict=False))
    assert isinstance(error, MismatchError)
    assert set(error.shapes) == {"row", "scalar"}
    assert set(error.dtypes) == {"wide"}
    assert unchanged(target)


def test_lenient_loads_give_back_the_rest_and_two_lists(url: str):
    target = zeros()
    del target["v"]
    target["u"] = torch.full((2,), 3.0)
    target["list"].append(torch.full((1,), 4.0))
    report = cloudckpt.load(target, url, strict=False)
    assert sorted(report.missing) == ["list.2", "u"]
    assert report.unexpected == ["v"]
    assert target["u"].tolist() == [3.0, 3.0]
    assert [item.item() for item in target["list"]] == [1.0, 1.0, 4.0]
    assert target["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert target["step"] == 7
    assert "v" not in target


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3), (3, 1), (0, 3), (1, 3, 1)], ids=str)
def test_shapes_are_never_broadcast_squeezed_or_reshaped(url: str, shape: tuple[int, ...]):
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({**zeros(), "row": torch.zeros(shape)}, url)
    assert caught.value.shapes == {"row": ((1, 3), shape)}


def load_on_rank(url: str) -> tuple[CloudckptError | None, bool]:
    """Only rank 1 asks for what does not fit."""
    target = zeros() if dist.get_rank() == 0 else faulty_target()
    return error_of(lambda: cloudckpt.load(target, url)), unchanged(target)


def test_all_ranks_hear_of_a_fault_on_one(ranks: RankPool, url: str):
    for error, untouched in ranks.run(2, load_on_rank, url):
        assert isinstance(error, MismatchError)
        assert sorted(error.missing) == ["list.2", "u.a", "u.b"]
        assert error.unexpected == []  # rank 0 asks for "v"
        assert set(error.shapes) == {"row", "scalar"}
        assert untouched


def load_parts(url: str) -> tuple[list[str], list[str]]:
    """Each rank asks for one part, as pipeline stages do; "v" is left over."""
    keys = [("w", "row", "step"), ("scalar", "wide", "list")][dist.get_rank()]
    everything = zeros()
    report = cloudckpt.load({key: everything[key] for key in keys}, url, strict=False)
    return report.missing, report.unexpected


def test_keys_are_united_over_the_ranks(ranks: RankPool, url: str):
    assert ranks.run(2, load_parts, url) == [([], ["v"])] * 2
