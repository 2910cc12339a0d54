"""Ranks that meet in a store: what they tell one another arrives, failures reach all, and nothing stays behind."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from cloudckpt.config import Config
from cloudckpt.errors import (
    CloudckptError,
    InterruptedTransferError,
    InvalidStateError,
    NoBucketError,
    RankError,
    StoreError,
)
from cloudckpt.format.keys import sync_key, sync_root
from cloudckpt.pytorch.messages import Messages, Session
from cloudckpt.pytorch.rounds import packed
from cloudckpt.pytorch.store_ranks import StoreRanks, make_session
from cloudckpt.store.base import Store
from cloudckpt.store.local import LocalStore
from cloudckpt.store.resolve import resolve
from tests.ranks import RankPool
from tests.recipes.kills import Zygote
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3
from tests.servers.process import S3Server
from tests.sharding import error_of

T = TypeVar("T")

SESSION = Session.draw()
LARGE = 300_000


def join(store: Store, rank: int, size: int, *, timeout_s: float = 60.0, number: int = 1) -> StoreRanks:
    return StoreRanks(store, session=SESSION, number=number, rank=rank, size=size, timeout_s=timeout_s, kept={})


def in_threads(size: int, function: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(function, range(size))]


def leftovers(store: Store) -> list[str]:
    return sorted(found.key for found in store.list(""))


@pytest.fixture(params=["local", "moto", "juicefs", "juicefs-fsspec"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, Config]:
    """What `resolve` takes for an empty place on every kind of store."""
    server, _, engine = request.param.partition("-")
    if server == "local":
        return str(tmp_path / "c"), None, Config()
    running: S3Server = request.getfixturevalue(f"{server}_s3")
    bucket = running.make_bucket(f"ranks-{secrets.token_hex(4)}")
    return f"s3://{bucket}/run/c", running.storage_options, Config(engine=engine or "auto")


def test_rounds_of_processes(ranks: RankPool, root: tuple[str, Any, Config]):
    outcomes = ranks.run(4, rounds_of_all_kinds, *root)
    assert outcomes == [[4, 4 * LARGE, "rank 2: InvalidStateError: of rank 2", "refused", 4]] * 4
    store = resolve(*root)
    assert leftovers(store) == []
    store.close()


def rounds_of_all_kinds(*root: Any) -> list[Any]:
    session = make_session(None, 60.0)
    store = resolve(*root)
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []

    def refuse(_: object) -> None:
        raise InvalidStateError("refused")

    for number in (1, 2):  # the second has a group of its own, as the next save has
        ranks = StoreRanks(store, session=session, number=number, rank=rank, size=size, timeout_s=60.0, kept={})
        if number == 1:
            found.append(ranks.round(lambda: None, len))
            found.append(ranks.round(lambda: os.urandom(LARGE), lambda parts: sum(map(len, parts))))
            found.append(str(error_of(lambda: ranks.round(lambda: fail_on(2), len))))  # noqa: B023  # called at once
            found.append(str(error_of(lambda: ranks.round(lambda: None, refuse))))  # noqa: B023  # called at once
        else:
            found.append(ranks.round(lambda: None, len, is_last=True))
    store.close()
    return found


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise InvalidStateError(f"of rank {rank}")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_parts_come_by_rank_and_the_outcome_goes_to_all(store: LocalStore):
    def rounds(rank: int) -> list[Any]:
        ranks = join(store, rank, 8)
        found = []
        for number in range(5):
            time.sleep(0.01 * ((rank * 3 + number) % 8))
            found.append(ranks.round(lambda: (rank, number), list, is_last=number == 4))  # noqa: B023  # called at once
        return found

    expected = [[(rank, number) for rank in range(8)] for number in range(5)]
    assert in_threads(8, rounds) == [expected] * 8
    assert leftovers(store) == []


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_failure_stops_the_others_and_is_raised_by_all(store: LocalStore, failing: int):
    def fail(rank: int) -> tuple[CloudckptError | None, bool]:
        ranks = join(store, rank, 4)

        def part() -> None:
            if rank == failing:
                raise InvalidStateError("what is wrong")
            if not ranks.cancel.wait(30.0):
                raise AssertionError("nobody said that another rank failed")
            raise InterruptedTransferError("stopped")

        error = error_of(lambda: ranks.round(part, len))
        return error, ranks.cancel.is_set()

    for rank, (error, was_told) in enumerate(in_threads(4, fail)):
        assert isinstance(error, RankError)
        assert error.causes == {failing: "InvalidStateError: what is wrong"}
        assert was_told == (rank != failing)
    assert leftovers(store) == []


def test_an_error_that_all_have_is_that_error(store: LocalStore):
    def part() -> None:
        raise InvalidStateError("the same everywhere")

    for error in in_threads(3, lambda rank: error_of(lambda: join(store, rank, 3).round(part, len))):
        assert type(error) is InvalidStateError
        assert str(error) == "the same everywhere"


def test_parts_and_outcomes_that_cannot_be_pickled_are_failures(store: LocalStore):
    def rounds(rank: int) -> list[str]:
        ranks = join(store, rank, 2)
        odd: Any = threading.Lock()
        first = error_of(lambda: ranks.round(lambda: odd if rank else None, len))
        second = error_of(lambda: ranks.round(lambda: None, lambda _: odd))
        return [str(first), str(second)]

    for texts in in_threads(2, rounds):
        assert all("cannot pickle" in text for text in texts)


def test_a_rank_that_never_comes_is_named_and_learns_of_it_later(store: LocalStore):
    def come(rank: int) -> CloudckptError | None:
        ranks = join(store, rank, 3, timeout_s=1.0)
        return error_of(lambda: ranks.round(lambda: None, len))

    errors = in_threads(2, come)  # of three
    for error in [*errors, come(2)]:
        assert isinstance(error, RankError)
        assert list(error.causes) == [2]
        assert "not here within 1 s" in error.causes[2]
    root = sync_root(SESSION.id, 1)
    assert leftovers(store) == [sync_key(root, 1, "outcome")]  # for other late ones; the sweep removes it


def test_a_coordinator_that_never_comes_is_named(store: LocalStore):
    def come(rank: int) -> CloudckptError | None:
        return error_of(lambda: join(store, rank + 1, 3, timeout_s=1.0).round(lambda: None, len))

    for error in in_threads(2, come):
        assert isinstance(error, RankError)
        assert list(error.causes) == [0]
        assert "no sign of life for 1 s" in error.causes[0]
    assert leftovers(store) == []


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_takes_long_but_lives_is_waited_for(store: LocalStore, slow: int):
    def come(rank: int) -> int:
        ranks = join(store, rank, 2, timeout_s=1.0)
        ranks.round(lambda: time.sleep(4.0 if rank == slow else 0.0), len)
        return ranks.round(lambda: None, len, is_last=True)

    assert in_threads(2, come) == [2, 2]
    assert leftovers(store) == []


def killed_in_round_two(root: str, session: bytes, rank: int, victim: int) -> tuple[list[int], str]:
    """The process of the victim is killed between two rounds; what the others raise."""
    ranks = StoreRanks(
        LocalStore(root), session=pickle.loads(session), number=1, rank=rank, size=3, timeout_s=2.0, kept={}
    )
    ranks.round(lambda: None, len)

    def part() -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        ranks.round(part, len)
    except RankError as error:
        return list(error.causes), str(error)
    return [], "no error"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_named(zygote: Zygote, tmp_path: Path, victim: int):
    session = pickle.dumps(SESSION)
    calls = [(killed_in_round_two, str(tmp_path), session, rank, victim) for rank in range(3)]
    for rank, ended in enumerate(zygote.run(calls)):
        if rank == victim:
            assert ended.signal == signal.SIGKILL
        else:
            assert ended.raised is None
            assert ended.returned[0] == [victim]
            assert f"rank {victim}" in ended.returned[1]


class Hostile:
    """Unpickling it is noticed."""

    was_unpickled = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Hostile, "was_unpickled", True)


def test_a_part_that_another_wrote_is_refused(store: LocalStore):
    key = sync_key(sync_root(SESSION.id, 1), 1, "here", 1)
    Messages(store, Session.draw()).put(key, b"\0" + pickle.dumps(Hostile()))
    ranks = join(store, 0, 2)
    with pytest.raises(RankError, match=rf"rank 1: ForgedMessageError: {key} in .* was not written by this job"):
        ranks.round(lambda: None, len)
    assert not Hostile.was_unpickled


def test_an_outcome_that_another_wrote_is_refused(store: LocalStore):
    key = sync_key(sync_root(SESSION.id, 1), 1, "outcome")
    store.put(key, b"\0" + pickle.dumps(Hostile()))
    with pytest.raises(RankError, match=rf"rank 0: {key} in .* was not written by this job"):
        join(store, 1, 2).round(lambda: None, len)
    assert not Hostile.was_unpickled


def test_the_messages_of_another_save_do_not_count(store: LocalStore):
    """One that was copied to the key of this one."""
    key, copied = (sync_key(sync_root(SESSION.id, number), 1, "outcome") for number in (2, 1))
    Messages(store, SESSION).put(copied, b"\0old")
    store.put(key, store.get(copied))
    with pytest.raises(RankError, match="was not written by this job"):
        join(store, 1, 2, number=2).round(lambda: None, len)


class FullStore(LocalStore):
    """Takes no messages that contain one of ``refused`` for the first ``times`` times."""

    def __init__(self, root: Path, refused: str, times: int) -> None:
        super().__init__(root)
        self._refused, self._times = refused, times

    def put(self, key: str, data: Any) -> None:
        if self._refused in key and self._times > 0:
            self._times -= 1
            raise StoreError(f"cannot write {key}: No space left on device", key=key, retryable=False)
        super().put(key, data)


def test_a_failure_is_told_once_there_is_room_again(tmp_path: Path):
    def part() -> None:
        raise InvalidStateError("no room for the pack")

    def come(rank: int) -> CloudckptError | None:
        store = FullStore(tmp_path, "sync", 5) if rank == 1 else LocalStore(tmp_path)
        return error_of(lambda: join(store, rank, 3).round(part if rank == 1 else lambda: None, len))

    for error in in_threads(3, come):
        assert isinstance(error, RankError)
        assert error.causes == {1: "InvalidStateError: no room for the pack"}


def test_a_rank_that_can_tell_nobody_says_why(tmp_path: Path):
    def part() -> None:
        raise InvalidStateError("no room for the pack")

    with pytest.raises(RankError) as caught:
        join(FullStore(tmp_path, "sync", 10**6), 1, 2).round(part, len)
    text = caught.value.causes[1]
    assert "no room for the pack" in text
    assert "cannot exchange messages" in text
    assert "No space left on device" in text


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("before", [0, 2])
def test_others_hear_of_a_rank_that_was_given_up(store: LocalStore, gone: int, before: int):
    """It takes part in some rounds; then somebody else, who knows of none, speaks for it."""

    def come(rank: int) -> CloudckptError | None:
        ranks = join(store, rank, 3)
        for _ in range(before):
            ranks.round(lambda: None, len)
        if rank == gone:
            join(store, rank, 3).abandon(InvalidStateError("its helper is gone"))
            return None
        return error_of(lambda: ranks.round(lambda: None, len))

    for rank, error in enumerate(in_threads(3, come)):
        if rank != gone:
            assert isinstance(error, RankError)
            assert error.causes == {gone: "InvalidStateError: its helper is gone"}


def test_an_outcome_stands_when_the_coordinator_is_given_up(store: LocalStore):
    def come(rank: int) -> int | None:
        if rank == 1:
            while not any(key.endswith("outcome") for key in leftovers(store)):
                time.sleep(0.01)
            join(store, 0, 2).abandon(InvalidStateError("its helper is gone"))
        return join(store, rank, 2).round(lambda: None, len)

    key = sync_key(sync_root(SESSION.id, 1), 1, "here", 1)
    join(store, 1, 2)._tell(key, packed(None))  # rank 1 has sent its part, and not yet seen the outcome
    assert in_threads(2, come) == [2, 2]


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


def over_s3(server: FaultyS3, size: int, function: Callable[[int, Store], T]) -> list[T]:
    config = Config(retry_deadline_s=5.0, request_timeout_s=2.0)

    def run(rank: int) -> T:
        store = resolve("s3://bkt/run/c", server.storage_options, config)
        try:
            return function(rank, store)
        finally:
            store.close()

    return in_threads(size, run)


def error_of_a_round(rank: int, store: Store) -> CloudckptError | None:
    return error_of(lambda: join(store, rank, 3).round(lambda: None, len))


def test_a_coordinator_that_may_not_list_tells_the_others(server: FaultyS3):
    server.faults = [Fault("status", "GET", "list-type", ALWAYS, 403, "AccessDenied")]
    for error in over_s3(
        server, 3, lambda rank, store: error_of(lambda: join(store, rank, 3).round(lambda: None, len))
    ):
        assert isinstance(error, RankError)
        assert list(error.causes) == [0]
        assert "AccessDenied" in error.causes[0]


def test_no_bucket_is_no_bucket(server: FaultyS3):
    server.faults = [Fault("status", "", "", ALWAYS, 404, "NoSuchBucket")]
    for error in over_s3(
        server, 2, lambda rank, store: error_of(lambda: join(store, rank, 2).round(lambda: None, len))
    ):
        assert type(error) is NoBucketError


def test_faults_of_the_wire_are_ridden_out(server: FaultyS3):
    server.faults = [
        Fault("status", "PUT", "here", 2, 503, "SlowDown"),
        Fault("reset", "GET", "outcome", 2),
        Fault("lost_reply", "PUT", "outcome"),
        Fault("status", "GET", "list-type", 1, 500),
        Fault("reset", "DELETE", "", 1),
    ]

    def rounds(rank: int, store: Store) -> list[int]:
        ranks = join(store, rank, 3)
        return [ranks.round(lambda: None, len, is_last=number == 3) for number in range(4)]

    assert over_s3(server, 3, rounds) == [[3] * 4] * 3
    assert server.objects == {}


@pytest.mark.parametrize("size", [2, 6])
def test_requests(server: FaultyS3, size: int):
    """Of a save of three rounds. What grows with the waiting are GETs of the outcome, and LISTs."""
    over_s3(server, size, lambda rank, store: rounds_of_a_save(join(store, rank, size)))
    assert server.count("PUT") == 3 * size  # a part of each rank, or the outcome
    assert server.count("DELETE") + server.count("POST") == 3 * size
    assert server.count("GET", "/here/") == 3 * (size - 1)
    assert server.count("HEAD") == 0
    assert server.objects == {}


def rounds_of_a_save(ranks: StoreRanks) -> None:
    for number in range(3):
        ranks.round(lambda: None, len, is_last=number == 2)


def test_what_is_kept_is_the_callers(store: LocalStore):
    kept: dict[type, Any] = {}
    first, second = (
        StoreRanks(store, session=SESSION, number=n, rank=1, size=2, timeout_s=1.0, kept=kept) for n in (1, 2)
    )
    assert first.kept(list) is second.kept(list)
    assert first.kept(list) is not join(store, 1, 2).kept(list)


def sessions() -> tuple[Session, Session]:
    return make_session(None, 60.0), make_session(None, 60.0)


def test_sessions_are_the_same_on_all_ranks_and_never_twice(ranks: RankPool):
    found = ranks.run(3, sessions)
    assert found[0] == found[1] == found[2]
    assert found[0][0].secret != found[0][1].secret
