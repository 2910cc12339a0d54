"""pragmaticalabs/pragmatica#801: what a running save has just decided to reuse is deleted under it.

A save of step 3 and retention that drops the steps it refers to take turns, from one call of the store to the next, in
every order that matters and some at random, and are killed in between. Whatever is committed in the end must load.
"""

from __future__ import annotations

import itertools
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import catalog, leases
from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError
from cloudckpt.format.keys import MANIFEST, step_dir
from cloudckpt.plan.retention import KeepLast
from cloudckpt.pytorch.group import Alone
from cloudckpt.retention import Retention
from cloudckpt.store import memory
from cloudckpt.store.memory import MemoryStore
from cloudckpt.store.resolve import resolve
from cloudckpt.transfer import reuse
from cloudckpt.transfer.reuse import LastSave, LastSaves
from cloudckpt.verify import verify

RUN = "memory://row-22/run"
CONFIG = Config(chunk_bytes=64, pack_bytes=400, num_threads=1)
HANG_S = 60.0
ALL_CALLS = 10**6


class KilledError(BaseException):
    """The process that a thread stands for is no more. No `Exception`: nobody may handle it."""


class Course:
    """Threads that take turns. ``choose`` picks who goes on, of those who are held before a call of the store."""

    def __init__(self, choose: Callable[[Sequence[str]], str]) -> None:
        self._choose = choose
        self._changed = threading.Condition()
        self._held: set[str] = set()
        self._alive: set[str] = set()
        self._turn: str | None = None
        self.dead: set[str] = set()
        self.failures: dict[str, BaseException] = {}
        self.calls: list[str] = []

    def run(self, **actors: Callable[[], object]) -> None:
        self._alive = set(actors)
        threads = [threading.Thread(target=self._live, args=item, daemon=True) for item in actors.items()]
        for thread in threads:
            thread.start()
        while self._pick():
            pass
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive()

    def _pick(self) -> bool:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn is None and self._held == self._alive, HANG_S)
            if not self._alive:
                return False
            self._turn = self._choose(sorted(self._held))
            self._changed.notify_all()
            return True

    def _live(self, name: str, actor: Callable[[], object]) -> None:
        _LOCAL.seat = (self, name)
        try:
            actor()
        except (CloudckptError, KilledError) as error:
            self.failures[name] = error
        finally:
            with self._changed:
                self._alive.discard(name)
                self._changed.notify_all()

    def hold(self, name: str, call: str) -> None:
        with self._changed:
            if name in self.dead:
                raise KilledError
            self._held.add(name)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._turn == name, HANG_S)
            self._held.discard(name)
            self._turn = None
            self.calls.append(f"{name}: {call}")
            if name in self.dead:
                raise KilledError


_LOCAL = threading.local()


class Stepped(MemoryStore):
    """Belongs to the actor whose thread opened it, whichever thread it is called in."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._seat = getattr(_LOCAL, "seat", None)

    @property
    def num_streams(self) -> int:
        return 1  # an actor makes one call at a time

    def _hold(self, call: str) -> None:
        if self._seat is not None:
            course, name = self._seat
            course.hold(name, call)

    def get(self, key: str) -> bytes:
        self._hold(f"get {key}")
        return super().get(key)

    def stream(self, key: str, byte_offset: int, nbytes: int) -> Iterator[Any]:
        self._hold(f"stream {key}")
        return super().stream(key, byte_offset, nbytes)

    def size(self, key: str) -> int:
        self._hold(f"size {key}")
        return super().size(key)

    def put(self, key: str, data: Any) -> None:
        self._hold(f"put {key}")
        super().put(key, data)

    def put_if_absent(self, key: str, data: Any) -> bool:
        self._hold(f"put_if_absent {key}")
        return super().put_if_absent(key, data)

    def list(self, prefix: str) -> Iterator[Any]:
        self._hold(f"list {prefix}")
        return iter(tuple(super().list(prefix)))

    def common_prefixes(self, prefix: str) -> Sequence[str]:
        self._hold(f"common_prefixes {prefix}")
        return super().common_prefixes(prefix)

    def delete(self, keys: Any) -> dict[str, str]:
        for key in keys:
            self._hold(f"delete {key}")
            super().delete([key])
        return {}


def make_state(step: int) -> dict[str, Any]:
    """Half is frozen; of the rest each step changes one part, so that step 3 needs bytes of both others."""
    parts = {f"p{i}": torch.arange(16) + (100.0 * step if i == step % 3 else 0.0) for i in range(3)}
    return {"frozen": torch.arange(64.0), **parts, "step": step}


def save(step: int) -> None:
    cloudckpt.save(make_state(step), f"{RUN}/{step_dir(step)}", step=step, incremental=True, config=CONFIG)


def drop(*steps: int, census: Callable[[Any], leases.InUse] = leases.in_use) -> None:
    """What docs/format.md asks of whoever deletes."""
    run = resolve(RUN)
    run.delete([f"{step_dir(step)}/{MANIFEST}" for step in steps])
    used = census(run)
    for step in steps:
        below = [info.key.removeprefix(f"{step_dir(step)}/") for info in run.list(step_dir(step))]
        run.delete([f"{step_dir(step)}/{key}" for key in below if not used.holds(step_dir(step), key)])


def faults() -> list[str]:
    """Of all that is committed."""
    found = []
    for entry in catalog.list_steps(resolve(RUN)):
        if entry.manifest is None:
            continue
        url = f"{RUN}/{entry.name}"
        found += [str(fault) for fault in verify(url).faults]
        if not found:
            state = cloudckpt.read(url)
            expected = make_state(entry.step)
            found += [
                name
                for name, value in expected.items()
                if not torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value))
            ]
    return found


Stored = tuple[dict[str, Any], LastSave]


@pytest.fixture(scope="module")
def stored() -> Stored:
    """Steps 1 and 2, the second of which refers to the first; and what the job remembers of the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "MemoryStore", Stepped)
        save(1)
        save(2)
        last = Alone().kept(LastSaves).get(RUN)
        assert last is not None
        assert last.needed.keys() == {step_dir(1), step_dir(2)}
        return dict(resolve(RUN)._fs.store), last  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MemoryStore", Stepped)


def restore(stored: Stored, *, is_warm: bool) -> None:
    objects, last = stored
    store = resolve(RUN)._fs.store  # type: ignore[attr-defined]
    store.clear()
    store.update(objects)
    kept = Alone().kept(LastSaves)
    kept._by_run.clear()
    if is_warm:
        kept.keep(RUN, last)


def in_order(*stretches: tuple[str, int]) -> Callable[[Sequence[str]], str]:
    """So many calls of one, then so many of another, and so on; in the end whoever is left."""
    left = [[name, count] for name, count in stretches]

    def choose(held: Sequence[str]) -> str:
        while left and (left[0][1] == 0 or left[0][0] not in held):
            left.pop(0)
        if not left:
            return held[0]
        left[0][1] -= 1  # type: ignore[operator]
        return str(left[0][0])

    return choose


def num_calls(stored: Stored, *, is_warm: bool) -> tuple[int, int]:
    """Of the save alone, and of retention alone."""
    counts = []
    for name, actor in (("save", lambda: save(3)), ("drop", lambda: drop(1, 2))):
        restore(stored, is_warm=is_warm)
        course = Course(lambda held: held[0])
        course.run(**{name: actor})
        assert course.failures == {}
        assert faults() == []
        counts.append(len(course.calls))
    return counts[0], counts[1]


def orders(stored: Stored, *, is_warm: bool) -> Iterator[Callable[[Sequence[str]], str]]:
    """Either is held at every call, while the other does any number of its own."""
    saves, drops = num_calls(stored, is_warm=is_warm)
    for first, second in itertools.product(range(saves + 1), range(1, drops + 1)):
        yield in_order(("save", first), ("drop", second), ("save", ALL_CALLS))


@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_every_point_of_a_save_meets_every_point_of_retention(stored: Stored, is_warm: bool):
    committed = 0
    for choose in orders(stored, is_warm=is_warm):
        restore(stored, is_warm=is_warm)
        course = Course(choose)
        course.run(save=lambda: save(3), drop=lambda: drop(1, 2))
        assert course.failures == {}, course.calls
        assert faults() == [], course.calls
        committed += 1
    assert committed > 100


def test_of_three(stored: Stored):
    """Two that delete at the same time: one drops the base, the other sweeps what the base referred to."""
    for seed in range(150):
        restore(stored, is_warm=seed % 2 == 0)
        course = Course(random.Random(seed).choice)
        course.run(save=lambda: save(3), drop=lambda: drop(2), sweep=lambda: drop(1))
        assert course.failures == {}, course.calls
        assert faults() == [], (seed, course.calls)


@pytest.mark.parametrize("victim", ["save", "drop"])
def test_killed_anywhere(stored: Stored, victim: str):
    for seed in range(100):
        rng = random.Random(seed)
        restore(stored, is_warm=seed % 2 == 0)
        course = Course(rng.choice)
        left = rng.randrange(30)

        def choose(held: Sequence[str], rng: random.Random = rng, course: Course = course, left: int = left) -> str:
            if len([call for call in course.calls if call.startswith(victim)]) >= left:
                course.dead.add(victim)
            return rng.choice(held)

        course._choose = choose
        course.run(save=lambda: save(3), drop=lambda: drop(1, 2))
        assert all(isinstance(error, KilledError) for error in course.failures.values()), course.failures
        assert faults() == [], (seed, course.calls)
        # Whoever comes next finds a run that is whole, and retention gets to its end.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            save(4)
        drop(1, 2)
        assert faults() == [], (seed, course.calls)


def retain() -> None:
    """As a `Checkpointer` does it after two commits."""
    retention = Retention(resolve(RUN), [KeepLast(1)], orphan_age_s=1e6)
    for _ in range(2):
        removal = retention.run()
        assert not removal.failed
        assert not removal.faults


@pytest.mark.parametrize("victim", [None, "save", "retain"])
def test_the_retention_of_runs(stored: Stored, victim: str | None):
    """The newest committed step is there and whole at the end, whoever was killed where; nothing else is in the way."""
    for seed in range(100):
        rng = random.Random(seed)
        restore(stored, is_warm=seed % 2 == 0)
        course = Course(rng.choice)
        left = rng.randrange(60)

        def choose(held: Sequence[str], rng: random.Random = rng, course: Course = course, left: int = left) -> str:
            if victim and len([call for call in course.calls if call.startswith(victim)]) >= left:
                course.dead.add(victim)
            return rng.choice(held)

        course._choose = choose
        course.run(save=lambda: save(3), retain=retain, retain_too=retain)
        assert all(isinstance(error, KilledError) for error in course.failures.values()), course.failures
        assert faults() == [], (seed, course.calls)
        steps = [saved.step for saved in catalog.find_steps(resolve(RUN)).committed]
        assert steps[0] == 3 or (victim == "save" and steps[0] == 2)
        retain()
        assert [saved.step for saved in catalog.find_steps(resolve(RUN)).committed] == steps[:1]
        assert faults() == [], (seed, course.calls)


def blind(run: Any) -> leases.InUse:
    """Retention that knows of manifests only."""
    used = leases.in_use(run)
    return leases.InUse(used.objects, frozenset(), everything=False)


def manifests_last(run: Any) -> leases.InUse:
    """As if one look at the manifests, after the leases, were enough for two that delete."""
    found = leases.live(run)
    objects: dict[str, set[str]] = {}
    for entry in catalog.list_steps(run):
        for name, keys in leases.referenced(entry.manifest, entry.name).items() if entry.manifest else ():
            objects.setdefault(name, set()).update(keys)
    return leases.InUse(objects, frozenset(n for lease in found for n in lease.step_dirs or ()), everything=False)


def fails_somewhere(
    stored: Stored, chosen: Iterable[Callable[[Sequence[str]], str]], **actors: Callable[[], object]
) -> bool:
    for choose in chosen:
        restore(stored, is_warm=True)
        course = Course(choose)
        course.run(**actors)
        if faults():
            return True
    return False


def test_the_orders_above_find_retention_that_is_blind_to_leases(stored: Stored):
    chosen = orders(stored, is_warm=True)
    assert fails_somewhere(stored, chosen, save=lambda: save(3), drop=lambda: drop(1, 2, census=blind))


def test_the_orders_above_find_saves_that_do_not_look_again(stored: Stored, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reuse, "_stands", lambda *args: True)
    assert fails_somewhere(stored, orders(stored, is_warm=True), save=lambda: save(3), drop=lambda: drop(1, 2))


@pytest.mark.parametrize(("census", "fails"), [(leases.in_use, False), (manifests_last, True)])
def test_manifests_are_read_before_leases_too(stored: Stored, census: Callable[[Any], leases.InUse], fails: bool):
    """For two that delete: the sweep lists leases, a save takes one, its base goes, the sweep reads manifests."""
    chosen = [
        in_order(("sweep", seen), ("save", begun), ("drop", 1), ("sweep", ALL_CALLS), ("save", ALL_CALLS))
        for seen, begun in itertools.product(range(8), range(num_calls(stored, is_warm=True)[0]))
    ]
    actors = {"save": lambda: save(3), "drop": lambda: drop(2, census=census), "sweep": lambda: drop(1, census=census)}
    assert fails_somewhere(stored, chosen, **actors) == fails


def test_a_step_is_never_built_on_an_uncommitted_one(stored: Stored):
    restore(stored, is_warm=False)
    run = resolve(RUN)
    run.delete([f"{step_dir(2)}/{MANIFEST}"])
    save(3)
    manifest = catalog.read_manifest(resolve(f"{RUN}/{step_dir(3)}"))
    assert leases.referenced(manifest, step_dir(3)).keys() == {step_dir(1), step_dir(3)}
