"""The process groups over which the ranks of a load pass chunks on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cloudckpt.errors import InterruptedTransferError, InvalidStateError
from cloudckpt.pytorch.connections import device_types, make_gloo
from cloudckpt.pytorch.ranks import Ranks

RankSet: TypeAlias = tuple[int, ...]
"""Ascending ranks, numbered within the group of the load."""

NamedSet: TypeAlias = tuple[RankSet, str, tuple[str, ...]]
"""...and the name of a group of them, of which there may be several, and the types of devices that it serves."""


def offered_groups(
    meshes: Iterable[DeviceMesh], given: Mapping[RankSet, dist.ProcessGroup] | None, ranks: Sequence[int]
) -> dict[NamedSet, dist.ProcessGroup]:
    """Groups that exist already, the caller's (by global ranks) and those of the targets' meshes, by ranks and name.

    ``ranks``: the global ranks of the load's group. Groups with other ranks, or in another order, are left out.
    """
    groups = [group for members, group in (given or {}).items() if _is_member(members, group)]
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            groups.extend(mesh.get_group(axis) for axis in range(mesh.ndim))
    number = {rank: i for i, rank in enumerate(ranks)}
    offered: dict[NamedSet, dist.ProcessGroup] = {}
    for group in groups:
        members = dist.get_process_group_ranks(group)
        if all(rank in number for rank in members):
            own = tuple(number[rank] for rank in members)
            if len(own) > 1 and list(own) == sorted(own):
                offered[own, group.group_name, tuple(sorted(device_types(group)))] = group
    return offered


def _is_member(members: object, group: object) -> bool:
    """Whether this rank is in a group of the caller's. Raises InvalidStateError for what is none, or another."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return False  # what new_group gives to all others
    if not isinstance(group, dist.ProcessGroup) or not isinstance(members, tuple):
        raise InvalidStateError(f"groups= maps tuples of global ranks to process groups, not {members!r} to {group!r}")
    held = dist.get_process_group_ranks(group)
    if list(members) != held:
        raise InvalidStateError(f"groups= has a group of the ranks {held} under {members}")
    return True


class Link:
    """A process group, or a bare backend, of some of the ranks. Ranks are numbered by their place in ``members``."""

    def __init__(self, ranks: Ranks, members: RankSet, group: Any) -> None:
        self._ranks = ranks
        self._group = group
        self.members = members

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_splits: list[int], splits: list[int]) -> dist.Work:
        """Begin it; ``splits`` count elements, by rank."""
        return self._group.alltoall_base(out, data, out_splits, splits, dist.AllToAllOptions())  # type: ignore[no-any-return]

    def broadcast(self, data: torch.Tensor, root: int) -> dist.Work:
        """Begin it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group.broadcast([data], options)  # type: ignore[no-any-return]

    def finish(self, work: dist.Work) -> None:
        """Wait for it. Raises InterruptedTransferError where the other end is gone: its cause is not known here."""
        try:
            self._ranks.await_work(work, self.members)
        except RuntimeError as error:
            raise InterruptedTransferError(f"lost touch with another rank while passing chunks on: {error}") from error

    def agree(self, is_well: bool) -> bool:
        """Whether all are well. Only for a link of hosts."""
        if not is_well:
            self._ranks.tell_failure()
        ill = torch.tensor([0 if is_well else 1], dtype=torch.int32)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # the stubs take the enum for another type
        self.finish(self._group.allreduce([ill], options))
        return not ill.item()


class Links:
    """Links for sets of ranks, over groups that exist or, for tensors on the host, over ones made for this load.

    On devices none are made: a communicator takes device memory and long to set up. All members of a set must
    ask for its link, and all ranks in one order. ``existing``: serve tensors on ``device_type``.
    """

    def __init__(self, ranks: Ranks, device_type: str, existing: Mapping[RankSet, dist.ProcessGroup]) -> None:
        self.ranks = ranks
        self.device_type = device_type
        self._existing = existing
        self._made: dict[RankSet, Link] = {}

    def link(self, members: RankSet) -> Link:
        """For tensors on ``device_type``. Collective over the members."""
        if members in self._existing:
            return Link(self.ranks, members, self._existing[members])
        assert self.device_type == "cpu", "the plan uses only groups that exist on a device"
        return self.control_link(members)

    def control_link(self, members: RankSet) -> Link:
        """For tensors on the host. Collective over the members."""
        if len(members) == self.ranks.size:
            return Link(self.ranks, members, self.ranks.control_group())
        group = self._existing.get(members)
        if group is not None and "cpu" in device_types(group):
            return Link(self.ranks, members, group)
        if members not in self._made:
            self._made[members] = Link(self.ranks, members, self._make(members))
        return self._made[members]

    def _make(self, members: RankSet) -> Any:
        store = self.ranks.scratch_store(",".join(map(str, members)))
        timeout = timedelta(seconds=self.ranks.timeout_s)
        return make_gloo(store, members.index(self.ranks.rank), len(members), timeout)


def host_buffer(nbytes: int, device_type: str) -> torch.Tensor:
    """uint8 memory from which a device copies fast, where it has such memory."""
    if device_type != "cpu":
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # a device without pinned memory says it only when asked
            pass
    return torch.empty(nbytes, dtype=torch.uint8)
