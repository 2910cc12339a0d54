"""What the coordinator tells the other ranks where DCP's plans do not travel.

A planner that keeps its plans (``enable_plan_caching``) sends none where they are as before, and takes the last save's
with all that storage had put into them. Then keys of torch's rendezvous store tell what is new. DCP has all ranks
meet at the coordinator between its planning and their writing: what it sets in the one is there in the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import blake2b

from torch.distributed.distributed_c10d import PrefixStore

from cloudckpt.errors import CloudckptError, InvalidStateError
from cloudckpt.pytorch.connections import own_client, rendezvous_store
from cloudckpt.pytorch.rounds import packed, unpacked


def tell_attempt(url: str, attempt: str) -> None:
    """On the coordinator, while it plans."""
    _store().set(_name(url), attempt)


def ask_attempt(url: str) -> str | None:
    """On the others, once they write. None where nothing was ever told."""
    store = _store()
    return store.get(_name(url)).decode() if store.check([_name(url)]) else None


def tell_shares(attempt: str, told: Mapping[int, object]) -> None:
    """What the others are to write, by rank, or an error: why there is nothing to write. On the coordinator."""
    if not told:
        return
    store = _store()
    for rank, share in told.items():
        store.set(_share_name(attempt, rank), packed(share))  # type: ignore[arg-type]  # the stubs forget bytes


def ask_share(attempt: str, rank: int, timeout_s: float) -> object:
    """Waits for it. Raises what the coordinator failed with, or InvalidStateError if it tells nothing."""
    store, name = _store(), _share_name(attempt, rank)
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not store.check([name]):
        if time.monotonic() > deadline:
            raise InvalidStateError(f"the coordinator has not told rank {rank} what to write within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.1)
    told = unpacked(store.get(name))
    store.delete_key(name)
    if isinstance(told, CloudckptError):
        raise told
    return told


def _store() -> PrefixStore:
    # A connection of its own: an asynchronous save must not keep the training from the store.
    return PrefixStore("cloudckpt/dcp", own_client(rendezvous_store()))


def _name(url: str) -> str:
    return blake2b(url.encode(), digest_size=16).hexdigest()


def _share_name(attempt: str, rank: int) -> str:
    return f"{attempt}/{rank}"
