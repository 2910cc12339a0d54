"""Saves and loads on a bad network: which faults one of them meets is a function of its number."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed.tensor import Shard

import cloudckpt
from cloudckpt.config import KIB, MIB, Config
from cloudckpt.errors import CloudckptError, NotFoundError, RankError, StoreError
from cloudckpt.store import probe
from tests.servers.faults import ALWAYS, Fault, FaultyS3
from tests.sharding import error_of, make_mesh, shard

Action = Literal["save", "overwrite", "load", "async", "incremental"]

SYNCHRONOUS: tuple[Action, ...] = ("save", "save", "overwrite", "load", "load")
OTHERS: tuple[Action, ...] = ("async", "async", "incremental")

KINDS = ("reset", "status", "stall", "cut", "reset_body", "duplicate", "twice", "lost_reply")

# The requests that a fault may pick, by method and part of the target; "" is any.
SAVES = (
    ("", ""),
    ("PUT", ""),
    ("PUT", "manifest.json"),
    ("HEAD", "manifest.json"),
    ("GET", "manifest.json"),
    ("PUT", "cloudckpt-probe"),
    ("PUT", "r0000"),
    ("PUT", "/c/"),
    ("POST", "uploads"),
    ("PUT", "partNumber"),
    ("POST", "uploadId="),
    ("DELETE", ""),
)
MEETINGS = (("PUT", ".sync/"), ("GET", ".sync/"), ("GET", "list-type"), ("DELETE", ".sync/"))
BASES = (("GET", "step-00000001/manifest.json"), ("", "lease"), ("GET", "list-type"))
LOADS = (("", ""), ("GET", "manifest.json"), ("GET", "r0000"), ("GET", "/c/"))


@dataclass(frozen=True)
class Trial:
    """``lasting``: one of the faults never ends, so that the call may fail; else it has to succeed."""

    number: int
    action: Action
    engine: Literal["auto", "fsspec"]
    layout: Literal["packed", "zarr"]
    num_ranks: int
    is_large: bool
    lasting: bool
    faults: tuple[Fault, ...]

    @property
    def config(self) -> Config:
        """Patience for a dozen faults in a row, or for a few tries."""
        return Config(
            engine=self.engine,
            chunk_bytes=MIB if self.is_large else 16 * KIB,
            pack_bytes=64 * MIB if self.is_large else 40 * KIB,
            part_bytes=5 * MIB,
            read_bytes=8 * MIB,
            num_threads=4,
            retry_deadline_s=1.0 if self.lasting else 30.0,
            request_timeout_s=0.4,
            rank_timeout_s=15.0 if self.lasting else 60.0,
        )

    def state(self, value: int) -> dict[str, Any]:
        numel = 12 * MIB // 4 if self.is_large else 30_000
        changes = 0 if self.action == "incremental" else value
        return {"w": torch.arange(numel, dtype=torch.int32) * 7 + changes, "b": torch.full((5,), value), "value": value}


def make_trial(number: int, actions: Sequence[Action] = SYNCHRONOUS) -> Trial:
    rng = random.Random(number)
    action = rng.choice(actions)
    lasting = rng.random() < 0.4
    is_large = rng.random() < 0.15
    faults = [_fault(rng, action, is_large) for _ in range(rng.randint(1, 4))]
    if lasting:
        faults[-1].times = ALWAYS
        faults[-1].after = 0
    return Trial(
        number=number,
        action=action,
        engine=rng.choice(("auto", "fsspec")),
        layout="packed" if is_large or action == "incremental" else rng.choice(("packed", "packed", "zarr")),
        num_ranks=2 if rng.random() < 0.15 else 1,
        is_large=is_large,
        lasting=lasting,
        faults=tuple(faults),
    )


def _fault(rng: random.Random, action: Action, is_large: bool) -> Fault:
    targets = {"load": LOADS, "async": SAVES + 2 * MEETINGS, "incremental": SAVES + 3 * BASES}
    method, contains = rng.choice(targets.get(action, SAVES))
    status, code = rng.choice(((500, "InternalError"), (503, "SlowDown")))
    return Fault(
        rng.choice(KINDS),
        method,
        contains,
        times=rng.choice((1, 1, 2, 3)),
        status=status,
        code=code,
        nbytes=rng.choice((0, 1, 100, 10_000, 1_000_000)),
        # Of a second answer: while the first one is read, or when the client has moved on.
        seconds=rng.choice((0.0, 0.02)),
        after=rng.choice((0, 0, 1, 2, 5)),
    )


STALL_S = 60.0


def armed(trial: Trial) -> list[Fault]:
    """Faults of this run of the trial, for the server uses them up."""
    return [Fault(**{**vars(f), "seconds": STALL_S if f.kind == "stall" else f.seconds}) for f in trial.faults]


@dataclass
class Tally:
    """What was injected and how calls ended."""

    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"  {count:5}  {name}" for part in (self.injected, self.outcomes) for name, count in part.most_common()
        ]
        return f"{self.injected.total()} faults in {self.outcomes.total()} calls\n" + "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """Of one rank. ``same``: whether what was loaded has the right bits."""

    error: CloudckptError | None
    commit_id: str | None = None
    same: bool = True


def act(trial: Trial, url: str, options: Mapping[str, Any]) -> Outcome:
    """The call itself, on one rank of the trial."""
    probe._known.clear()  # as in a process that has just started
    mesh = make_mesh((trial.num_ranks,)) if trial.num_ranks > 1 else None

    def sharded(state: dict[str, Any]) -> dict[str, Any]:
        return state if mesh is None else {**state, "w": shard(state["w"], mesh, [Shard(0)])}

    if trial.action == "load":
        target, expected = sharded(trial.state(0)), sharded(trial.state(1))
        error = error_of(lambda: cloudckpt.load(target, url, storage_options=options, config=trial.config))
        return Outcome(error, same=error is not None or _same(target, expected))
    commits: list[cloudckpt.Commit] = []
    state = sharded(trial.state(2 if trial.action == "overwrite" else 1))
    arguments = {"storage_options": options, "layout": trial.layout, "config": trial.config}

    def save() -> cloudckpt.Commit:
        if trial.action == "async":
            return cloudckpt.async_save(state, url, **arguments).result()
        if trial.action == "incremental":
            return cloudckpt.save(state, url, step=2, incremental=True, **arguments)
        return cloudckpt.save(state, url, overwrite=trial.action == "overwrite", **arguments)

    error = error_of(lambda: commits.append(save()))
    return Outcome(error, commits[0].commit_id if commits else None)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    def local(value: Any) -> Any:
        return value.to_local() if hasattr(value, "to_local") else value

    return a["value"] == b["value"] and all(torch.equal(local(a[name]), local(b[name])) for name in ("w", "b"))


def judge(trial: Trial, outcomes: Sequence[Outcome], url: str, options: Mapping[str, Any], secret: str) -> str:
    """Assert all that must hold, with a network that is well again; returns how the call ended, in words."""
    errors = [outcome.error for outcome in outcomes]
    assert len({error is None for error in errors}) == 1, f"some ranks succeeded, others did not: {errors}"
    for error in errors:
        if error is not None:
            _check_error(error, trial, secret)
    failed = errors[0] is not None
    assert trial.lasting or not failed, f"passing faults were not outlived: {errors[0]}"
    assert all(outcome.same for outcome in outcomes), "a load that succeeded gave other bits"
    found = _stored(trial, url, options)
    if trial.action == "load":
        assert found == (1, None) or found[0] == 1
        return "load: one clear error" if failed else "load: success"
    old, new = (1, 2) if trial.action == "overwrite" else (None, 1)
    if not failed:
        assert found == (new, outcomes[0].commit_id), f"committed, but {found} is there"
        assert len({outcome.commit_id for outcome in outcomes}) == 1
        return f"{trial.action}: success"
    assert found[0] in (old, new)
    if found[0] == new:
        assert "not known" in str(errors[0]), f"it is there, and the error does not say that it may be: {errors[0]}"
        return f"{trial.action}: one clear error, and committed"
    return f"{trial.action}: one clear error"


def _check_error(error: CloudckptError, trial: Trial, secret: str) -> None:
    kinds = (StoreError,) if trial.num_ranks == 1 else (StoreError, RankError)
    assert isinstance(error, kinds), f"{type(error).__name__}: {error}"
    assert f"t{trial.number:04}" in str(error), f"the error does not say where: {error}"
    assert secret not in str(error)
    if isinstance(error, StoreError):
        assert error.retryable, f"trying again later would help: {error}"


def _stored(trial: Trial, url: str, options: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """The value and the commit id of what a reader finds: whole, or nothing."""
    config = Config(engine=trial.engine)
    try:
        read = cloudckpt.read(url, storage_options=options, config=config)
    except NotFoundError:
        return None, None
    assert _same(read, trial.state(read["value"])), "what is committed has other bits"
    commit_id = cloudckpt.open_checkpoint(url, storage_options=options).manifest.document.commit_id
    return read["value"], commit_id


def run(trial: Trial, server: FaultyS3, bucket: str, call: Any, tally: Tally) -> None:
    """``call(num_ranks, function, *args)`` runs a function on the ranks of a job and returns what they return."""
    url = f"s3://{bucket}/t{trial.number:04}/step-00000001"
    server.faults, server.injected = [], Counter()
    base = f"s3://{bucket}/t{trial.number:04}/step-00000001"
    if trial.action == "incremental":
        url = base.replace("00000001", "00000002")
    if trial.action in ("overwrite", "load", "incremental"):
        cloudckpt.save(
            trial.state(1),
            base,
            step=1,
            storage_options=server.storage_options,
            layout=trial.layout,
            config=Config(**{**vars(trial.config), "request_timeout_s": 20.0}),
        )
    server.faults = armed(trial)
    outcomes = call(trial.num_ranks, act, trial, url, server.storage_options)
    server.faults = []
    tally.injected += server.injected
    tally.outcomes[judge(trial, outcomes, url, server.storage_options, server.storage_options["secret"])] += 1
    if trial.action == "incremental":
        assert _stored(trial, base, server.storage_options)[0] == 1, "the base of an incremental save is as it was"
    _try_again(trial, url, server)


def _try_again(trial: Trial, url: str, server: FaultyS3) -> None:
    """On a network that is well again the same process can save to the same place, and load."""
    config = Config(engine=trial.engine)
    state = trial.state(3)
    cloudckpt.save(state, url, storage_options=server.storage_options, overwrite=True, config=config)
    target = trial.state(0)
    cloudckpt.load(target, url, storage_options=server.storage_options, config=config)
    assert _same(target, state)
