"""States whose memory, containers or keys are out of the ordinary: right, or refused with the path, never wrong."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt.errors import InvalidStateError, MismatchError, RankError
from tests.ranks import RankPool


def freed() -> torch.Tensor:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_off() -> torch.Tensor:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(400)
    return tensor


@pytest.mark.parametrize("make", [freed, cut_off])
def test_freed_memory_is_neither_stored_nor_filled(make: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match=r"'a\.x'.*memory"):
        cloudckpt.save({"a": {"x": make()}}, tmp_path / "c")
    cloudckpt.save({"a": {"x": torch.zeros(1000)}}, tmp_path / "c")
    with pytest.raises(InvalidStateError, match=r"'a\.x'.*memory"):
        cloudckpt.load({"a": {"x": make()}}, tmp_path / "c")


def test_lazy_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match=r"'m\.weight'.*not initialised"):
        cloudckpt.save({"m": torch.nn.LazyLinear(3)}, tmp_path / "c")


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(4).as_strided((2, 3), (1, 1)),
        torch.zeros(1).expand(2, 3),
        np.lib.stride_tricks.as_strided(np.zeros(4, dtype=np.float32), (2, 3), (4, 4), writeable=True),
    ],
    ids=["strided", "expanded", "numpy"],
)
def test_targets_that_overlap_themselves_are_refused(target: Any, tmp_path: Path) -> None:
    value = np.ones((2, 3), dtype=np.float32) if isinstance(target, np.ndarray) else torch.ones(2, 3)
    cloudckpt.save({"w": value}, tmp_path / "c")
    with pytest.raises(InvalidStateError, match=r"'w'.*share memory"):
        cloudckpt.load({"w": target}, tmp_path / "c")


def test_tied_targets_need_equal_tensors(tmp_path: Path) -> None:
    cloudckpt.save({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "c")
    x = torch.full((3,), 9.0)
    with pytest.raises(InvalidStateError, match="'a' and 'b' are the same memory"):
        cloudckpt.load({"a": x, "b": x}, tmp_path / "c")
    assert x.tolist() == [9.0] * 3
    cloudckpt.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "equal")
    cloudckpt.load({"a": x, "b": x}, tmp_path / "equal")
    assert x.tolist() == [1.0] * 3


def test_tensors_in_other_containers(tmp_path: Path) -> None:
    cloudckpt.save({"d": deque([torch.ones(2), 5]), "n": SimpleNamespace(w=torch.full((2,), 3.0), k=1)}, tmp_path / "c")
    target = {"d": deque([torch.zeros(2), 0]), "n": SimpleNamespace(w=torch.zeros(2), k=0)}
    cloudckpt.load(target, tmp_path / "c")
    d, n = target["d"], target["n"]
    assert isinstance(d, deque)
    assert isinstance(n, SimpleNamespace)
    assert d[0].tolist() == [1.0, 1.0]
    assert d[1] == 5
    assert n.w.tolist() == [3.0, 3.0]
    assert n.k == 1


def test_other_parameter_groups_are_found_before_anything_is_changed(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    cloudckpt.save({"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}, tmp_path / "c")
    other = torch.nn.Linear(2, 2)
    before = other.weight.clone()
    groups = [{"params": [other.weight]}, {"params": [other.bias]}]
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load({"m": other, "o": torch.optim.SGD(groups, lr=0.1)}, tmp_path / "c")
    assert caught.value.kinds["o.param_groups"] == ("groups of [2] parameters", "groups of [1, 1] parameters")
    assert torch.equal(other.weight, before)


def _ranks_differ(url: str) -> list[str]:
    rank = dist.get_rank()
    states: list[tuple[Any, str]] = [
        ({"l": [torch.ones(2)] * (rank + 1)}, "rank0"),
        ({"c": {1: 5} if rank == 0 else {1.0: 5}}, "check"),
        ({"w": torch.full((2,), float(rank))}, "check"),
    ]
    texts = []
    for i, (state, values) in enumerate(states):
        with pytest.raises(InvalidStateError) as caught:
            cloudckpt.save(state, f"{url}/{i}", values=values)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    with pytest.raises(RankError) as failed:
        cloudckpt.save({}, None if rank == 1 else url)  # type: ignore[arg-type]
    return [*texts, str(failed.value)]


def test_what_differs_between_ranks_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for texts in ranks.run(2, _ranks_differ, str(tmp_path)):
        assert "'l' has a different length per rank" in texts[0]
        assert "'c' has the keys 1 and 1.0" in texts[1]
        assert "'w'" in texts[2]
        assert texts[3].startswith("rank 1:")
