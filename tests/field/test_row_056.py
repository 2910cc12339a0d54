"""pytorch/pytorch#163941: a tensor with a pending reduction is refused, not stored as if it were final."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard

import cloudckpt
from cloudckpt.errors import CloudckptError, InvalidStateError, NotFoundError
from tests.ranks import RankPool
from tests.sharding import error_of, make_mesh


def save_partial(url: str, reduction: str) -> CloudckptError | None:
    held = DTensor.from_local(torch.ones(4), make_mesh((2,)), [Partial(reduction)], run_check=False)
    return error_of(lambda: cloudckpt.save({"grads": {"w": held}}, url))


def save_mixed(url: str) -> CloudckptError | None:
    held = DTensor.from_local(torch.ones(2), make_mesh((2, 2)), [Shard(0), Partial()], run_check=False)
    return error_of(lambda: cloudckpt.save({"grads": {"w": held}}, url))


def check(errors: list[CloudckptError | None], url: Path) -> None:
    for error in errors:
        assert isinstance(error, InvalidStateError)
        assert "'grads.w'" in str(error)
        assert "pending reduction" in str(error)
    with pytest.raises(NotFoundError):
        cloudckpt.read(url)


@pytest.mark.parametrize("reduction", ["sum", "avg"])
def test_partial(ranks: RankPool, tmp_path: Path, reduction: str):
    check(ranks.run(2, save_partial, str(tmp_path / "c"), reduction), tmp_path / "c")


def test_partial_along_one_of_two_axes(ranks: RankPool, tmp_path: Path):
    check(ranks.run(4, save_mixed, str(tmp_path / "c")), tmp_path / "c")


def load_partial(url: str) -> CloudckptError | None:
    target = DTensor.from_local(torch.ones(4), make_mesh((2,)), [Partial()], run_check=False)
    return error_of(lambda: cloudckpt.load({"w": target}, url))


def test_as_a_target_it_is_refused_too(ranks: RankPool, tmp_path: Path):
    cloudckpt.save({"w": torch.zeros(4)}, tmp_path / "c")
    for error in ranks.run(2, load_partial, str(tmp_path / "c")):
        assert isinstance(error, InvalidStateError)
        assert "'w'" in str(error)
