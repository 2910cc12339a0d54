"""What ranks are connected by: torch's rendezvous store, and gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # a name of torch.distributed, which its stubs do not know
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

GLOO_TIMEOUT = timedelta(minutes=30)
"""For one transfer, between ranks that are known to be there. That of torch's own groups."""


def device_types(group: dist.ProcessGroup) -> frozenset[str]:
    """The types of devices for whose tensors a group has a backend."""
    return frozenset(device.type for device in group._device_types)


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta = GLOO_TIMEOUT) -> Any:
    """A bare gloo backend, which ends with its last reference. Collective; ``store`` must have no keys of another.

    Not ``new_group``: where not all ranks of the job take part, it names a group after its ranks and the number of
    groups that the process has, on which ranks may differ; and one that is made again after it was destroyed finds the
    addresses of the old one and waits for ever (torch 2.13).
    """
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def rendezvous_store() -> Store:
    """That of the default group, which torch gives out in no other way."""
    return _get_default_store()


def own_client(store: Store) -> Store:
    """Another connection to the same server, so that what one thread waits for does not keep the other.

    Without the prefixes of ``store``. (``Store.clone`` is newer than the oldest torch that this works with.)
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store  # files, and memory of this process: nobody's wait keeps another
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
