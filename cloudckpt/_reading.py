"""What all loads share, from the wants of a rank to its filled targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cloudckpt.config import Config
from cloudckpt.format.manifest import Manifest
from cloudckpt.plan.exchange import ROUND_BYTES
from cloudckpt.plan.reads import RangeRead
from cloudckpt.progress import Progress, start_progress
from cloudckpt.pytorch.exchange import run_exchange
from cloudckpt.pytorch.group import Group
from cloudckpt.pytorch.sharing import Prepared, Shared
from cloudckpt.pytorch.targets import ChunkPlaces
from cloudckpt.pytorch.wishes import pack_bits
from cloudckpt.store.base import Store
from cloudckpt.telemetry import Recorder
from cloudckpt.transfer.download import Admit, OpenSink, download, effective_read_bytes


@dataclass(frozen=True)
class ReadResult:
    """One rank's part of the reading. ``touched``: a bit for every chunk."""

    touched: bytes
    bytes_fetched: int
    bytes_sent: int
    num_requests: int
    seconds: dict[str, float]


@dataclass(frozen=True, eq=False)
class Reading:
    """How a rank fills its tensors. ``shared``: what it passes on and is passed; None where it reads by itself."""

    config: Config
    progress: Progress
    ranks: Group
    store: Store
    manifest: Manifest
    prepared: Prepared
    shared: Shared | None

    def run(self, recorder: Recorder) -> ReadResult:
        before = self.store.counts
        with recorder.stage("read"):
            sent = self._fill()
        counts = self.store.counts
        touched = np.zeros(self.manifest.document.chunks.count, dtype=bool)
        touched[self.prepared.alone.parts.chunk] = True
        fetched = counts.bytes_fetched - before.bytes_fetched
        return ReadResult(pack_bits(touched), fetched, sent, counts.requests, recorder.seconds)

    def _fill(self) -> int:
        """Returns the bytes that were passed on."""
        config, manifest, targets = self.config, self.manifest, self.prepared.targets
        if self.shared is None:
            alone = self.prepared.alone
            places = ChunkPlaces(manifest, targets, alone.parts)
            self._transfer(alone.reads, places.open_sink, config=config, staged_bytes=places.staged_bytes)
            return 0
        # One half of the budget for what is being read, the other for what is being passed on.
        half = replace(config, memory_bytes=max(1, config.memory_bytes // 2))
        return run_exchange(
            manifest,
            targets,
            self.shared,
            lambda it: self._transfer(
                it.reads, it.open_sink, config=half, admit=it.admit, staged_bytes=it.places.staged_bytes
            ),
            # Reads end with their rounds: several a round, so that enough are in flight.
            read_bytes=min(ROUND_BYTES // 2, effective_read_bytes(half)),
        )

    def _transfer(
        self,
        reads: Sequence[RangeRead],
        open_sink: OpenSink,
        *,
        config: Config,
        staged_bytes: Callable[[Sequence[int]], int],
        admit: Admit | None = None,
    ) -> None:
        total = sum(read.nbytes for read in reads)
        with start_progress(self.progress, "load", total, show=self.ranks.rank == 0) as advance:
            download(
                self.store,
                self.manifest,
                reads,
                open_sink,
                config=config,
                cancel=self.ranks.cancel,
                advance=advance,
                admit=admit,
                staged_bytes=staged_bytes,
            )
