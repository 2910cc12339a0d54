"""Ranks over connections of their own: nothing that they wait for keeps the training, and the other way round."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cloudckpt.errors import RankError
from cloudckpt.pytorch.connections import own_client, rendezvous_store
from cloudckpt.pytorch.group import Alone, background_ranks
from tests import pretend_device
from tests.ranks import RankPool
from tests.recipes.kills import Zygote
from tests.sharding import error_of

NUM_ROUNDS = 200
LARGE = 300_000


class InBackground:
    """Runs a function in a thread; ``result()`` gives what it returned, or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._function()
        except BaseException as error:  # noqa: BLE001  # raised by the test's thread
            self._error = error

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome


def rounds_beside_collectives(device: str = "cpu") -> tuple[list[int], list[float]]:
    ranks = background_ranks(None, 60.0)
    rank = dist.get_rank()

    def rounds() -> list[int]:
        sizes = [LARGE if (number + rank) % 50 == 0 else 10 for number in range(NUM_ROUNDS)]
        return [ranks.round(lambda n=n: os.urandom(n), lambda parts: sum(map(len, parts))) for n in sizes]

    background = InBackground(rounds)
    sums = []
    for number in range(NUM_ROUNDS):
        value = torch.full((1000,), float(rank + number), device=device)
        dist.all_reduce(value)
        if number % 10 == 0:
            dist.barrier()
        sums.append(value.mean().item())
    return background.result(), sums


def check_rounds(outcomes: list[tuple[list[int], list[float]]], size: int) -> None:
    lengths = [sum(LARGE if (n + rank) % 50 == 0 else 10 for rank in range(size)) for n in range(NUM_ROUNDS)]
    sums = [float(sum(rank + number for rank in range(size))) for number in range(NUM_ROUNDS)]
    assert outcomes == [(lengths, sums)] * size


def test_rounds_beside_collectives_of_the_training(ranks: RankPool):
    check_rounds(ranks.run(4, rounds_beside_collectives), 4)


def test_rounds_beside_collectives_on_devices(accelerated_ranks: RankPool):
    check_rounds(accelerated_ranks.run(2, rounds_beside_collectives, pretend_device.NAME), 2)


def waits_in_the_rendezvous_store() -> int:
    """The training waits in its client of the store, until a round in the background lets it go on."""
    ranks = background_ranks(None, 60.0)
    store: Any = rendezvous_store()
    other = own_client(store)

    def rounds() -> int:
        found = ranks.round(lambda: None, len)
        other.set(f"go/{ranks.rank}", str(found))
        return found

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    background = InBackground(rounds)
    told = int(store.get(f"go/{ranks.rank}"))
    assert told == background.result()
    return told


def test_a_wait_of_the_training_keeps_no_round(ranks: RankPool):
    assert ranks.run(3, waits_in_the_rendezvous_store) == [3, 3, 3]


def rounds_after_the_group() -> list[int]:
    ranks = background_ranks(None, 20.0)
    dist.destroy_process_group()
    first, last = (
        ranks.round(lambda n=n: os.urandom(n), lambda parts: sum(map(len, parts)), is_last=n == LARGE)
        for n in (10, LARGE)
    )
    return [first, last]


def test_rounds_go_on_when_the_training_has_destroyed_its_group(zygote: Zygote):
    for ended in zygote.run([(rounds_after_the_group,)] * 3):
        assert ended.raised is None
        assert ended.returned == [30, 3 * LARGE]


def killed_in_a_round(victim: int) -> list[int]:
    ranks = background_ranks(None, 2.0)

    def part() -> None:
        if ranks.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    error = error_of(lambda: InBackground(lambda: ranks.round(part, len)).result())
    assert isinstance(error, RankError)
    return list(error.causes)


def test_a_rank_that_is_killed_is_named(zygote: Zygote):
    outcomes = zygote.run([(killed_in_a_round, 2)] * 3)
    assert outcomes[2].signal == signal.SIGKILL
    assert [ended.returned for ended in outcomes[:2]] == [[2], [2]]


def not_everybody_asks() -> list[int] | None:
    if dist.get_rank() == 1:
        return None
    error = error_of(lambda: background_ranks(None, 1.0))
    assert isinstance(error, RankError)
    return list(error.causes)


def test_a_rank_that_does_not_ask_is_named(ranks: RankPool):
    assert ranks.run(2, not_everybody_asks) == [[1], None]


def test_one_process_is_alone():
    assert isinstance(background_ranks(None, 1.0), Alone)
