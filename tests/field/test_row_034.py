"""apache/paimon#9714: two jobs commit one name, the later destroys the earlier, and both report success."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt import catalog
from cloudckpt.errors import AlreadyCommittedError
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from tests.field.places import Place
from tests.ranks import RankPool

ROUNDS = 32
THREADS = 4


def race(place: Place, num_rounds: int) -> list[str]:
    """Every process is a job of its own; what each of its saves came to. All commits of a round start together."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    meeting = dist.distributed_c10d._get_default_store()
    real_commit = catalog.commit

    def commit(store: Store, *args: Any, **kwargs: Any) -> None:
        meeting.set(f"{store.url}/{rank}", "1")
        # Not wait(): it would keep the other threads out.
        while not meeting.check([f"{store.url}/{1 - rank}"]):
            time.sleep(0.001)
        real_commit(store, *args, **kwargs)

    def one(number: int) -> str:
        try:
            return place.save(state(rank), f"step-{number}", group=alone).commit_id
        except AlreadyCommittedError:
            return "already committed"

    catalog.commit = commit
    try:
        # A few at a time: on servers that ignore conditions a commit waits a while for its rivals.
        with ThreadPoolExecutor(THREADS) as pool:
            return [*pool.map(one, range(num_rounds))]
    finally:
        catalog.commit = real_commit


def state(rank: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(rank + 1)), "job": rank}


def winner_at(place: Place, number: int, *, alone: bool = True) -> tuple[int, str]:
    """The job whose state lies there, whole, and the commit id. Nothing else may lie there, if it won ``alone``."""
    found = place.read(f"step-{number}")
    assert torch.equal(found["w"], state(found["job"])["w"])
    store = place.store(f"step-{number}")
    manifest = catalog.read_manifest(store)
    store.close()
    expected = {catalog.MANIFEST, *(entry.key for entry in manifest.objects)}
    assert set(place.keys(f"step-{number}")) == expected or not alone
    return found["job"], manifest.document.commit_id


@pytest.mark.parametrize(
    ("place", "num_rounds"), [("local", ROUNDS), ("moto", ROUNDS), ("moto-fsspec", 4)], indirect=["place"]
)
def test_one_wins_and_the_other_is_told(place: Place, ranks: RankPool, num_rounds: int):
    answers = ranks.run(2, race, place, num_rounds)
    for number, pair in enumerate(zip(*answers, strict=True)):
        job, commit_id = winner_at(place, number)
        assert pair[job] == commit_id
        assert pair[1 - job] == "already committed"


@pytest.mark.parametrize("place", ["juicefs"], indirect=True)
def test_where_conditions_are_ignored_the_last_one_wins_and_nothing_is_mixed(place: Place, ranks: RankPool):
    """The weaker rule: whose put came last has it, and is always told so; the other may take itself for the winner
    only if the machine held it up for longer than a commit waits for its rivals."""
    answers = ranks.run(2, race, place, ROUNDS)
    for number, pair in enumerate(zip(*answers, strict=True)):
        job, commit_id = winner_at(place, number, alone="already committed" in pair)
        assert pair[job] == commit_id
    assert any("already committed" in pair for pair in zip(*answers, strict=True))


class Staged:
    """A store whose conditional put waits for the other job, on a server that ignores the condition."""

    def __init__(self, real: Any, barrier: threading.Barrier, turn: threading.Event, first: bool) -> None:
        self._real, self._barrier, self._turn, self._first = real, barrier, turn, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def honours_conditions(self) -> bool:
        return False

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._barrier.wait()  # both have seen nothing there
        if not self._first:
            assert self._turn.wait(30)
        self._real.put(key, data)
        self._turn.set()
        return True


@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_two_puts_that_both_saw_nothing(place: Place, monkeypatch: pytest.MonkeyPatch):
    """The worst order, on purpose: both checks, both puts, both read-backs."""
    barrier, turn, names = threading.Barrier(2), threading.Event(), threading.local()

    def staged(url: Any, *args: Any) -> Any:
        return Staged(resolve(url, *args), barrier, turn, names.first)

    monkeypatch.setattr("cloudckpt._write.resolve", staged)

    def one(rank: int) -> str:
        names.first = rank == 0
        try:
            return place.save(state(rank)).commit_id
        except AlreadyCommittedError:
            return "already committed"

    with ThreadPoolExecutor(2) as pool:
        answers = [future.result() for future in [pool.submit(partial(one, rank)) for rank in range(2)]]
    assert answers[0] == "already committed"
    found = place.read()
    assert found["job"] == 1
    assert torch.equal(found["w"], state(1)["w"])
    with cloudckpt.open_checkpoint(place.url()) as checkpoint:
        assert checkpoint.manifest.document.commit_id == answers[1]
