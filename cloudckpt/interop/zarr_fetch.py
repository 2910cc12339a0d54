"""Reading boxes of zarr arrays, through zarr and its codecs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import zarr

from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError, FormatError
from cloudckpt.format.box import Box
from cloudckpt.format.codec import Bytes1D
from cloudckpt.format.dtypes import DType, dtype
from cloudckpt.format.grid import Grid
from cloudckpt.interop.foreign import Foreign
from cloudckpt.interop.zarr_keys import KeysStore
from cloudckpt.interop.zarr_source import ZarrForeign, open_array
from cloudckpt.interop.zarr_tiles import tiles
from cloudckpt.plan.overlap import group_rows, overlaps
from cloudckpt.pytorch.targets import Targets
from cloudckpt.store.base import Store
from cloudckpt.transfer.pool import ByteBudget, run_all

TIMES_HELD = 3
"""What a tile takes while it is read: its bytes, what they were decoded from, and what a codec holds between."""


def fetch_tiles(store: Store, source: Foreign, config: Config, cancel: threading.Event) -> TileReader:
    """`MakeFetch` of zarr."""
    assert isinstance(source, ZarrForeign)
    return TileReader(store, source, config, cancel)


class TileReader:
    """Fills targets. To be called from one thread: it reads with several itself.

    A tile of which a call wants a part only is kept for the next one, which most often wants the rest.
    """

    def __init__(self, store: Store, source: ZarrForeign, config: Config, cancel: threading.Event) -> None:
        self._store = store
        self._source = source
        self._config = config
        self._cancel = cancel
        self._keys = KeysStore(store, source.documents, source.whole)
        self._arrays: dict[int, tuple[zarr.Array[Any], DType, Grid]] = {}
        self._budget = ByteBudget(config.memory_bytes)
        self._kept: OrderedDict[tuple[int, int], Bytes1D] = OrderedDict()

    def __call__(self, targets: Targets) -> None:
        tasks = (partial(self._read, targets, *job) for job in self._jobs(targets))
        run_all(tasks, num_threads=self._store.num_streams, cancel=self._cancel)
        total = sum(len(data) for data in self._kept.values())
        while len(self._kept) > 1 and total > self._config.memory_bytes:
            total -= len(self._kept.popitem(last=False)[1])

    def _jobs(self, targets: Targets) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Array, tile, and the rows of the targets that want any of it."""
        table = targets.table
        for number in np.unique(table.tensor).tolist():
            grid = self._array(number)[2]
            rows = np.nonzero(table.tensor == number)[0]
            dims = len(grid.shape)
            row, tile = overlaps(grid, table.offset[rows, :dims], table.shape[rows, :dims])
            for one, places in zip(*group_rows(tile), strict=True):
                yield number, int(one), rows[row[places]].tolist()

    def _array(self, number: int) -> tuple[zarr.Array[Any], DType, Grid]:
        if number not in self._arrays:
            array = open_array(self._keys, self._source.arrays[number], self._store.url)
            kind = dtype(self._source.manifest.arrays[number].dtype)
            self._arrays[number] = (array, kind, tiles(array, kind.itemsize, self._config.chunk_bytes))
        return self._arrays[number]

    def _read(self, targets: Targets, number: int, tile: int, rows: Sequence[int]) -> None:
        grid = self._arrays[number][2]
        box = grid.box(tile)
        data = self._kept.pop((number, tile), None)
        if data is None:
            held = self._budget.acquire(TIMES_HELD * box.num_elements * self._arrays[number][1].itemsize)
            try:
                data = self._decode(number, box)
            finally:
                self._budget.release(held)
        payload, used = torch.from_numpy(data), 0
        for row in rows:
            wanted = targets.table.box(row, len(grid.shape))
            part = wanted.intersect(box)
            assert part is not None, "only rows that the tile meets are named"
            in_tile, in_piece = part.relative_to(box.offset).offset, part.relative_to(wanted.offset).offset
            targets.fields[row].fill(payload, box.shape, in_tile, in_piece, part.shape)
            used += part.num_elements
        if used < box.num_elements:
            self._kept[number, tile] = data

    def _decode(self, number: int, box: Box) -> Bytes1D:
        array, kind, _ = self._arrays[number]
        try:
            found = array.get_basic_selection(box.slices)
        except CloudckptError:
            raise
        except Exception as error:  # codecs are third parties': what they raise may be anything
            name = self._source.manifest.path(number)
            raise FormatError(
                f"{self._store.url}: {name!r} cannot be read at {box}: {type(error).__name__}: {error}"
            ) from error
        return np.ascontiguousarray(found, dtype=kind.numpy).reshape(-1).view(np.uint8)
