"""Doing what plan/exchange.py planned: ranks pass on what they read, while they read what comes next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from cloudckpt.errors import InterruptedTransferError
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.place import Placement, PlacementSink
from cloudckpt.plan.exchange import NUM_BUFFERS
from cloudckpt.plan.exchange_part import Broadcast, ExchangePart, part_of_rank
from cloudckpt.plan.reads import RangeRead
from cloudckpt.pytorch.links import Link, host_buffer
from cloudckpt.pytorch.sharing import Shared
from cloudckpt.pytorch.targets import ChunkPlaces, StagedSink, Targets


def run_exchange(
    manifest: Manifest, targets: Targets, shared: Shared, transfer: Callable[[Exchange], None], *, read_bytes: int
) -> int:
    """Fill the targets. ``transfer`` fetches the reads of an exchange. Collective over the members of ``shared``.

    Returns the bytes that this rank passed on.
    """
    control = shared.links.control_link(shared.members)
    me = shared.members.index(shared.links.ranks.rank)
    try:
        part = part_of_rank(shared.plan, me, read_bytes=read_bytes)
    except BaseException:
        control.agree(is_well=False)  # or the others wait for this rank
        raise
    # Before links are made, since the making of one waits for all who share it.
    if not control.agree(is_well=True):
        raise InterruptedTransferError("stopped, since another rank failed")
    try:
        exchange = Exchange(manifest, targets, shared, part)
    except BaseException:
        control.agree(is_well=False)
        raise
    exchange.run(partial(transfer, exchange))
    return exchange.bytes_sent


class Exchange:
    """One rank's part of one load.

    A few buffers hold what is passed on: one under way, the others being filled. Reads for the round
    after these wait until the first has been sent.
    """

    def __init__(self, manifest: Manifest, targets: Targets, shared: Shared, part: ExchangePart) -> None:
        plan, members, links = shared.plan, shared.members, shared.links
        self._plan, self._part = plan, part
        self._ranks = links.ranks
        self._me = members.index(links.ranks.rank)
        self._control = links.control_link(members)
        # All ranks make the links that they share in the order of the plan, so none waits for another in a circle.
        self._has_parts = plan.has_parts.tolist()
        self._link = links.link(members) if any(self._has_parts) else self._control
        self._groups = {
            number: links.link(tuple(members[i] for i in ranks))
            for number, ranks in enumerate(plan.groups)
            if self._me in ranks
        }
        self._places = ChunkPlaces(manifest, targets, part.own)
        self._outgoing = _Outgoing(manifest, part, self._me, links.device_type)
        self._incoming = _Incoming(manifest, targets, part, self._me, links.device_type)
        self._round_of = {int(chunk): read.round for read in part.reads for chunk in read.chunks}
        unread = np.bincount(list(self._round_of.values()), minlength=plan.num_rounds)
        self._unread: list[int] = unread.tolist()
        self._num_sent = 0
        self._changed = threading.Condition()

    @property
    def places(self) -> ChunkPlaces:
        return self._places

    @property
    def reads(self) -> Sequence[RangeRead]:
        return self._part.reads

    @property
    def bytes_sent(self) -> int:
        """By this rank, in all."""
        copies = [len(ranks) - 1 for ranks in self._plan.groups]
        own = sum(b.payload_bytes * copies[b.group] for b in self._part.broadcasts if b.root == self._me)
        return int(self._part.sends.nbytes.sum()) + own

    def admit(self, read: RangeRead, stop: threading.Event) -> None:
        """Wait for a buffer for what the read brings. Raises InterruptedTransferError once ``stop`` is set."""
        with self._changed:
            while self._num_sent + NUM_BUFFERS <= read.round < self._plan.num_rounds:
                if stop.is_set():
                    raise InterruptedTransferError("stopped, since another part of the load failed")
                self._changed.wait(0.1)

    def open_sink(self, chunk: int) -> _CountedSink:
        """Where a chunk goes: into this rank's targets, and into the buffers for the others."""
        number = self._round_of[chunk]
        sink = self._places.open_sink(chunk, self._outgoing.placements(chunk, number))

        def whole() -> None:
            with self._changed:
                self._unread[number] -= 1
                self._changed.notify_all()

        return _CountedSink(sink, whole)

    def run(self, read: Callable[[], None]) -> None:
        """``read`` fetches everything through ``admit`` and ``open_sink``. Collective over the scope.

        Where a rank fails, all stop before the same round; what the others raise is InterruptedTransferError.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="cloudckpt-read") as executor:
            reading = executor.submit(read)
            try:
                self._go_through(reading)
            except BaseException:
                self._ranks.cancel.set()
                wait([reading])
                if reading.exception() is not None and not isinstance(reading.exception(), InterruptedTransferError):
                    reading.result()
                raise
            reading.result()

    def _go_through(self, reading: Future[None]) -> None:
        failure: Exception | None = None
        for number in range(self._plan.num_rounds):
            ready: _Ready | None = None
            try:
                if failure is None and self._await_reads(number, reading):
                    ready = self._ready(number)
            except Exception as error:  # noqa: BLE001  # all must hear of it before they begin the round
                failure = error
            try:
                all_well = self._control.agree(ready is not None)
            except InterruptedTransferError as error:
                raise failure or error from None
            if not all_well:
                raise failure or InterruptedTransferError("stopped, since another rank failed")
            assert ready is not None
            try:
                self._pass_on(ready)
            except Exception as error:  # noqa: BLE001  # the others must not wait for this rank in vain
                failure = error
                self._ranks.tell_failure()
            with self._changed:
                self._num_sent = number + 1
                self._changed.notify_all()
        if failure is not None:
            raise failure

    def _await_reads(self, number: int, reading: Future[None]) -> bool:
        """Whether all chunks of a round are here; False where that will not happen."""
        with self._changed:
            while self._unread[number]:
                if self._ranks.cancel.is_set() or (reading.done() and reading.exception() is not None):
                    return False
                self._changed.wait(0.05)
        return True

    def _ready(self, number: int) -> _Ready:
        """Everything that may fail on one rank alone, before the collectives that all must enter."""
        sends, receipts = self._part.sends.splits[number].tolist(), self._part.receipts.splits[number].tolist()
        broadcasts = [b for b in self._part.broadcasts if b.round == number]
        return _Ready(number, sends, receipts, broadcasts, self._outgoing.on_device(number))

    def _pass_on(self, ready: _Ready) -> None:
        incoming = self._incoming.buffer
        works: list[tuple[Link, dist.Work]] = []
        if self._has_parts[ready.round]:
            out, data = incoming[: sum(ready.receipts)], ready.outgoing[: sum(ready.sends)]
            works.append((self._link, self._link.all_to_all(out, data, ready.receipts, ready.sends)))
        for item in ready.broadcasts:
            buffer = ready.outgoing if item.root == self._me else incoming
            link, root = self._groups[item.group], self._plan.groups[item.group].index(item.root)
            works.append((link, link.broadcast(buffer[item.base : item.base + item.nbytes], root)))
        for link, work in works:
            link.finish(work)
        self._incoming.place(ready.round, ready.broadcasts)


@dataclass(frozen=True, eq=False)
class _Ready:
    """What a rank brings to a round. ``sends``, ``receipts``: bytes by rank."""

    round: int
    sends: list[int]
    receipts: list[int]
    broadcasts: list[Broadcast]
    outgoing: torch.Tensor


class _CountedSink:
    """Tells when the chunk is whole, besides putting it in place."""

    def __init__(self, sink: PlacementSink | StagedSink, whole: Callable[[], None]) -> None:
        self._sink = sink
        self._whole = whole
        self.put = sink.put

    def done(self) -> None:
        self._sink.done()
        self._whole()


class _Outgoing:
    """Buffers in turn for what a rank passes on; chunks are put there as they arrive."""

    def __init__(self, manifest: Manifest, part: ExchangePart, me: int, device_type: str) -> None:
        self._manifest = manifest
        self._device_type = device_type
        self._slots = [host_buffer(part.outgoing_bytes, device_type) for _ in range(NUM_BUFFERS)]
        self._bytes = [slot.numpy() for slot in self._slots]
        self._rows: dict[int, list[tuple[int, int, list[int], list[int]]]] = {}
        sends = part.sends
        columns = (sends.parts.chunk, sends.byte_offset, sends.nbytes, sends.parts.in_chunk, sends.parts.shape)
        for chunk, offset, nbytes, in_chunk, shape in zip(*(c.tolist() for c in columns), strict=True):
            self._rows.setdefault(chunk, []).append((offset, nbytes, in_chunk, shape))
        for item in part.broadcasts:
            if item.root == me:
                for chunk, offset in zip(item.chunk.tolist(), item.byte_offset.tolist(), strict=True):
                    shape = _chunk_shape(manifest, chunk)
                    nbytes = int(np.prod(shape, dtype=np.int64)) * _itemsize(manifest, chunk)
                    self._rows.setdefault(chunk, []).append((item.base + offset, nbytes, [0] * len(shape), shape))

    def placements(self, chunk: int, number: int) -> list[Placement]:
        rows = self._rows.get(chunk)
        if not rows:
            return []
        array, position = self._manifest.locate(chunk)
        stored_shape = self._manifest.grids[array].stored_shape(position)
        n, itemsize = len(stored_shape), self._manifest.itemsize(array)
        buffer = self._bytes[number % NUM_BUFFERS]
        return [
            Placement.of_box(buffer[offset : offset + nbytes].reshape(*shape[:n], itemsize), stored_shape, in_chunk[:n])
            for offset, nbytes, in_chunk, shape in rows
        ]

    def on_device(self, number: int) -> torch.Tensor:
        slot = self._slots[number % NUM_BUFFERS]
        return slot if self._device_type == "cpu" else slot.to(self._device_type)


class _Incoming:
    """One buffer for what a rank gets in a round, and where that goes."""

    def __init__(self, manifest: Manifest, targets: Targets, part: ExchangePart, me: int, device_type: str) -> None:
        self._manifest, self._part, self._me = manifest, part, me
        self._fields = targets.fields
        self.buffer = torch.empty(part.incoming_bytes, dtype=torch.uint8, device=device_type)
        receipts = part.receipts
        self._ranges = np.searchsorted(receipts.round, np.arange(len(receipts.splits) + 1)).tolist()
        self._broadcast_rows: dict[int, list[int]] = {}
        for row, chunk in enumerate(part.from_broadcasts.chunk.tolist()):
            self._broadcast_rows.setdefault(chunk, []).append(row)

    def place(self, number: int, broadcasts: Sequence[Broadcast]) -> None:
        receipts, parts = self._part.receipts, self._part.receipts.parts
        for row in range(self._ranges[number], self._ranges[number + 1]):
            start = int(receipts.byte_offset[row])
            payload = self.buffer[start : start + int(receipts.nbytes[row])]
            n = len(_chunk_shape(self._manifest, int(parts.chunk[row])))
            shape = parts.shape[row, :n].tolist()
            field = self._fields[int(parts.piece[row])]
            field.fill(payload, shape, [0] * n, parts.in_piece[row, :n].tolist(), shape)
        parts = self._part.from_broadcasts
        for item in broadcasts:
            if item.root == self._me:
                continue
            for chunk, offset in zip(item.chunk.tolist(), item.byte_offset.tolist(), strict=True):
                whole = _chunk_shape(self._manifest, chunk)
                n, start = len(whole), item.base + offset
                nbytes = int(np.prod(whole, dtype=np.int64)) * _itemsize(self._manifest, chunk)
                payload = self.buffer[start : start + nbytes]
                for row in self._broadcast_rows.get(chunk, ()):
                    in_chunk, in_piece, shape = (
                        column[row, :n].tolist() for column in (parts.in_chunk, parts.in_piece, parts.shape)
                    )
                    self._fields[int(parts.piece[row])].fill(payload, whole, in_chunk, in_piece, shape)


def _chunk_shape(manifest: Manifest, chunk: int) -> list[int]:
    """Without padding."""
    array, number = manifest.locate(chunk)
    return list(manifest.grids[array].box(number).shape)


def _itemsize(manifest: Manifest, chunk: int) -> int:
    return manifest.itemsize(manifest.locate(chunk)[0])
