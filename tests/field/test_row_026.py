"""NVIDIA/Megatron-LM#6858: every rank resumes on its own stream of random numbers."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import TrainingState
from cloudckpt.errors import InvalidStateError
from tests.ranks import RankPool
from tests.sharding import error_of


def rng_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002


def draw() -> list[float]:
    return [*torch.rand(3).tolist(), *np.random.random_sample(3).tolist(), *(random.random() for _ in range(3))]  # noqa: NPY002


def save_and_go_on(url: str) -> list[float]:
    seed = 100 + dist.get_rank()
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    draw()
    cloudckpt.save({"rng": cloudckpt.PerRank(rng_state())}, url)
    return draw()


def resume(url: str) -> list[float]:
    target = {"rng": cloudckpt.PerRank()}
    cloudckpt.load(target, url)
    state = target["rng"].value
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])
    return draw()


def resume_fails(url: str) -> Exception | None:
    return error_of(lambda: resume(url))


def test_the_next_numbers_are_those_without_the_stop(ranks: RankPool, tmp_path: Path):
    expected = ranks.run(4, save_and_go_on, str(tmp_path / "c"))
    assert len({tuple(numbers) for numbers in expected}) == 4
    assert ranks.run(4, resume, str(tmp_path / "c")) == expected


def test_another_number_of_ranks_is_an_error(ranks: RankPool, tmp_path: Path):
    ranks.run(4, save_and_go_on, str(tmp_path / "c"))
    for error in ranks.run(2, resume_fails, str(tmp_path / "c")):
        assert "'rng' was saved per rank by ranks [0, 1, 2, 3]" in str(error)
    assert isinstance(error_of(lambda: resume(str(tmp_path / "c"))), InvalidStateError)


def save_unmarked(url: str) -> Exception | None:
    torch.manual_seed(dist.get_rank())
    return error_of(lambda: cloudckpt.save({"rng": torch.get_rng_state()}, url))


def test_not_marked_it_is_refused(ranks: RankPool, tmp_path: Path):
    for error in ranks.run(4, save_unmarked, str(tmp_path / "c")):
        assert isinstance(error, InvalidStateError)
        assert "'rng'" in str(error)
        assert "PerRank" in str(error)


def train_and_go_on(url: str) -> list[float]:
    seed = 100 + dist.get_rank()
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    draw()
    cloudckpt.save({"train": TrainingState(torch.nn.Module())}, url)
    return draw()


def resume_training(url: str) -> tuple[list[float], list[str]]:
    draw()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cloudckpt.load({"train": TrainingState(torch.nn.Module())}, url)
    return draw(), [str(w.message) for w in told]


def test_training_state_goes_on_or_derives_new_streams(ranks: RankPool, tmp_path: Path):
    url = str(tmp_path / "c")
    expected = ranks.run(4, train_and_go_on, url)
    assert [numbers for numbers, _ in ranks.run(4, resume_training, url)] == expected
    seen = {tuple(numbers) for numbers in expected}
    for num_ranks in (2, 8):
        answers = ranks.run(num_ranks, resume_training, url)
        again = ranks.run(num_ranks, resume_training, url)
        assert [numbers for numbers, _ in again] == [numbers for numbers, _ in answers]
        assert ["every rank starts a new stream" in "".join(told) for _, told in answers] == [
            rank == 0 for rank in range(num_ranks)
        ]
        # Distinct per rank, per generator, and from every saved stream and every other number of ranks.
        for part in (slice(0, 3), slice(3, 6), slice(6, 9)):
            assert len({tuple(numbers[part]) for numbers, _ in answers}) == num_ranks
        assert not seen & {tuple(numbers) for numbers, _ in answers}
        seen |= {tuple(numbers) for numbers, _ in answers}
    assert len(seen) == 4 + 2 + 8
