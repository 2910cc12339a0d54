"""Exporting: tensors as bytes in C order, streamed into files of another format, which the ranks share out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cloudckpt._rewrite import fetch_chunks
from cloudckpt.config import MIB, Config
from cloudckpt.errors import InterruptedTransferError
from cloudckpt.interop.foreign import Foreign
from cloudckpt.plan.runs import RunSizes, plan_runs
from cloudckpt.progress import Advance
from cloudckpt.pytorch.runs import BLOCK_BYTES, RunMemory, RunReader, RunSource
from cloudckpt.store.base import Buffer, Store, UploadBrokenError
from cloudckpt.store.parts import part_size
from cloudckpt.store.retry import Backoff
from cloudckpt.transfer.pool import run_all

FILES_AT_A_TIME = 2
"""So that reads and uploads of one go on while the other is begun or completed."""


@dataclass(frozen=True, eq=False)
class ExportFile:
    """A file to write. ``render``: from the runs of ``sources``, in that order, to its bytes; called again where an
    upload has to begin anew. ``finish``: called before the file becomes visible. ``nbytes``: its size, about.
    """

    key: str
    nbytes: int
    sources: tuple[RunSource, ...]
    render: Callable[[RunReader], Iterator[Buffer]]
    finish: Callable[[], None] | None = None


@dataclass(frozen=True)
class Widths:
    """How half of ``Config.memory_bytes`` is spent: on runs that are read or being sent, on reads, on parts.

    ``held_bytes``: see `RunMemory`.
    """

    num_files: int
    memory_bytes: int
    held_bytes: int
    sizes: RunSizes
    reading: Config

    @staticmethod
    def of(files: Sequence[ExportFile], config: Config) -> Widths:
        memory_bytes = config.memory_bytes // 4
        run_bytes = max(1, min(4 * MIB, memory_bytes // 16))
        # What an upload holds until it gets more: a part that is not full, with the blocks at its two ends, and the
        # block that was written last.
        largest_part = part_size(max((file.nbytes for file in files), default=0), config.part_bytes)
        held_by_each = largest_part + 3 * max(run_bytes, BLOCK_BYTES)
        num_files = max(1, min(FILES_AT_A_TIME, len(files), memory_bytes // (2 * held_by_each)))
        held_bytes = num_files * held_by_each
        window_bytes = max(run_bytes, memory_bytes // 8)
        sizes = RunSizes(run_bytes, window_bytes, max(memory_bytes // 2, memory_bytes - held_bytes))
        reading = replace(config, memory_bytes=max(1, config.memory_bytes // 8 // num_files))
        return Widths(num_files, memory_bytes, held_bytes, sizes, reading)


def sending_config(config: Config) -> Config:
    """The settings for the store that is written to."""
    return replace(config, memory_bytes=max(1, config.memory_bytes // 8))


def share_out(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Whole files for each rank, by number: the largest first, each to the rank with the fewest bytes so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += sizes[number]
    return [sorted(share) for share in shares]


def write_files(
    files: Sequence[ExportFile],
    source: Store,
    foreign: Foreign,
    target: Store,
    *,
    config: Config,
    cancel: threading.Event,
    advance: Advance,
    written: list[str],
) -> None:
    """Stream the files to the target, a few at a time, durable on return. ``written`` grows with the keys.

    ``advance`` gets the bytes that were handed to the store. What is held is about half of ``Config.memory_bytes``,
    whatever the size of tensors and files. Raises as a load does, and InterruptedTransferError once ``cancel`` is set.
    """
    widths = Widths.of(files, config)
    stop = threading.Event()
    memory = RunMemory(widths.memory_bytes, widths.held_bytes)
    fetch = fetch_chunks(source, foreign, widths.reading, stop)

    def write(file: ExportFile) -> None:
        arrays, itemsizes = [s.array for s in file.sources], [s.itemsize for s in file.sources]
        plan = plan_runs(arrays, itemsizes, foreign.manifest.grids, widths.sizes)
        backoff: Backoff | None = None
        while True:
            reader = RunReader(plan, file.sources, fetch, memory, stop)
            broken = _stream(file, reader, target, stop, advance)
            if broken is None:
                written.append(file.key)
                return
            backoff = backoff or Backoff(config.retry_deadline_s)
            backoff.pause(broken)

    try:
        run_all((partial(write, file) for file in files), num_threads=widths.num_files, cancel=cancel, stop=stop)
    finally:
        stop.set()  # also where somebody has pressed Ctrl-C


def _stream(
    file: ExportFile, reader: RunReader, target: Store, stop: threading.Event, advance: Advance
) -> UploadBrokenError | None:
    """Write one file; gives back the error after which it has to be begun anew."""
    sent = 0
    with reader:
        upload = target.open_upload(file.key, file.nbytes)
        try:
            for data in file.render(reader):
                if stop.is_set():
                    raise InterruptedTransferError("stopped, since another part of the export failed")
                upload.write(data)
                sent += len(data)
                advance(len(data))
            if file.finish is not None:
                file.finish()
            upload.close()
        except UploadBrokenError as error:
            advance(-sent)
            return error
        finally:
            upload.abort()
    return None
