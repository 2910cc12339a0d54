"""Objects from one store to another: read ahead in ranges, checked while they flow, several at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from cloudckpt.config import MIB, Config
from cloudckpt.errors import InterruptedTransferError, NotFoundError, StoreError
from cloudckpt.format.codec import checksum
from cloudckpt.progress import Advance
from cloudckpt.store.base import Store, byte_view
from cloudckpt.store.parts import part_size
from cloudckpt.transfer.pool import run_all


@dataclass(frozen=True, slots=True)
class ObjectCopy:
    """One object to copy, and what a manifest says of it. ``number``: its place in the manifest."""

    number: int
    source: str
    target: str
    nbytes: int
    crc32c: int


class DamagedObjectError(StoreError):
    """Internal: an object is absent, short, or not what its manifest says. ``number`` is that of its `ObjectCopy`."""

    def __init__(self, copy: ObjectCopy, what: str) -> None:
        super().__init__(f"object {copy.source}: {what}", key=copy.source)
        self.number = copy.number


@dataclass(frozen=True)
class Widths:
    """How much is under way at a time, so that all of it stays within ``Config.memory_bytes``.

    One half of the budget is for what is read, the other for what the client library is sending.
    ``num_ranges``: ranges of ``range_bytes`` of each object that are read and not yet handed on. ``sending``: the
    settings for the store that is written to.
    """

    num_objects: int
    num_ranges: int
    range_bytes: int
    sending: Config

    @staticmethod
    def of(sizes: Collection[int], buffered_bytes: Callable[[int], int], config: Config) -> Widths:
        """``sizes``: of the objects. ``buffered_bytes``: what a stream of the source holds, see `Store`."""
        half = config.memory_bytes // 2
        # For each thread a range that it reads, what the stream buffers meanwhile, and a range that waits.
        share = half // config.num_threads
        range_bytes = max(MIB, min(config.read_bytes, (share - buffered_bytes(share // 2)) // 2))
        buffered = buffered_bytes(range_bytes)
        num_ranges = max(1, half // (range_bytes + buffered))
        if num_ranges > config.num_threads:
            num_ranges = (half - config.num_threads * buffered) // range_bytes
        largest = max(sizes, default=1)
        # Two parts beside the one under way: see `parts_in_flight`.
        least_sent = 3 * max(1, min(largest, part_size(largest, config.part_bytes)))
        at_a_time = max(1, min(config.num_threads, len(sizes), num_ranges, half // least_sent))
        ahead = max(1, min(config.num_threads, num_ranges // at_a_time))
        sending = replace(config, memory_bytes=max(1, half // at_a_time))
        return Widths(at_a_time, ahead, range_bytes, sending)


def copy_objects(
    source: Store,
    target: Store,
    copies: Sequence[ObjectCopy],
    *,
    there: Mapping[str, int],
    trust_sizes: bool,
    widths: Widths,
    config: Config,
    advance: Advance,
) -> list[ObjectCopy]:
    """Make every object exist at the target, durable on return; gives back those that were sent.

    ``there``: sizes of the objects that the target holds, by key. One of the right size is kept, if its bytes have
    the right checksum, too; with ``trust_sizes`` without reading it. Raises DamagedObjectError and StoreError.
    """
    stop = threading.Event()
    sent: list[ObjectCopy] = []
    readers = ThreadPoolExecutor(max_workers=config.num_threads, thread_name_prefix="cloudckpt-read")
    flow = _Flow(readers, widths, stop)

    def copy_one(copy: ObjectCopy) -> None:
        if there.get(copy.target) == copy.nbytes and (trust_sizes or flow.holds(target, copy)):
            advance(copy.nbytes)
            return
        flow.send(source, target, copy, config.part_bytes, advance)
        sent.append(copy)

    try:
        run_all((partial(copy_one, copy) for copy in copies), num_threads=widths.num_objects, stop=stop)
    finally:
        stop.set()
        readers.shutdown(wait=False, cancel_futures=True)
    return sent


class _Flow:
    """The bytes of objects, on their way."""

    def __init__(self, readers: ThreadPoolExecutor, widths: Widths, stop: threading.Event) -> None:
        self._readers = readers
        self._widths = widths
        self._stop = stop

    def holds(self, store: Store, copy: ObjectCopy) -> bool:
        """Whether the target's object is the one that is to be there."""
        found = 0
        try:
            for data in self._ranges(store, copy.target, copy.nbytes):
                found = checksum(data, found)
        except NotFoundError:
            return False  # it was removed since it was listed
        return found == copy.crc32c

    def send(self, source: Store, target: Store, copy: ObjectCopy, part_bytes: int, advance: Advance) -> None:
        ranges = self._checked(source, copy)
        if copy.nbytes <= min(part_bytes, self._widths.range_bytes):
            # In hand as a whole, it can be sent again where the network fails.
            data = b"".join(ranges)
            target.put(copy.target, data)
            advance(len(data))
            return
        upload = target.open_upload(copy.target, copy.nbytes)
        try:
            for part in ranges:
                upload.write(part)
                advance(len(part))
            upload.close()
        finally:
            upload.abort()

    def _checked(self, source: Store, copy: ObjectCopy) -> Iterator[bytearray]:
        """The parts of an object; at their end DamagedObjectError if they were not those of the manifest."""
        found = 0
        try:
            for part in self._ranges(source, copy.source, copy.nbytes):
                found = checksum(part, found)
                yield part
        except NotFoundError as error:
            raise DamagedObjectError(copy, f"it is missing ({error})") from error
        except StoreError as error:
            if error.retryable or source.size(copy.source) >= copy.nbytes:
                raise
            raise DamagedObjectError(copy, f"it is cut off ({error})") from error
        if found != copy.crc32c:
            raise DamagedObjectError(copy, f"its CRC-32C is {found:08x}, not {copy.crc32c:08x}")

    def _ranges(self, store: Store, key: str, nbytes: int) -> Iterator[bytearray]:
        """All bytes in order, some ranges ahead of who asks for them."""
        size = self._widths.range_bytes
        # An empty object is asked for as well: it must be there.
        starts = iter(range(0, max(1, nbytes), size))
        pending: deque[Future[bytearray]] = deque()
        try:
            while True:
                for start in islice(starts, self._widths.num_ranges - len(pending)):
                    pending.append(self._readers.submit(self._range, store, key, start, min(size, nbytes - start)))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def _range(self, store: Store, key: str, start: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        for part in store.stream(key, start, nbytes):
            if self._stop.is_set():
                raise InterruptedTransferError("stopped, since another part of the copy failed")
            piece = byte_view(part)
            view[done : done + len(piece)] = piece
            done += len(piece)
        return data
