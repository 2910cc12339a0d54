"""A flipped bit, wherever it is, is found by verify, and by every load that reads the chunk it is in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt.config import Config
from cloudckpt.errors import CorruptChunkError, FormatError, RankError
from cloudckpt.format.box import Box
from cloudckpt.format.keys import step_dir
from cloudckpt.verify import verify
from tests.faults.flips import Flip, flips, manifest_of, regions
from tests.interop import saved
from tests.ranks import RankPool
from tests.sharding import bits, error_of, other_bits

CONFIG = Config(chunk_bytes=64, pack_bytes=200, num_threads=2)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

COUNTS = pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.long)])


def state() -> dict[str, Any]:
    return {**saved.state(), "half": torch.arange(90, dtype=torch.float16).reshape(9, 10)}


def blank(full: dict[str, Any]) -> dict[str, Any]:
    """A target of the same form with no right byte in it."""
    return {key: _blank(value) for key, value in full.items()}


def _blank(value: Any) -> Any:
    if isinstance(value, dict):
        return blank(value)
    if isinstance(value, torch.Tensor):
        return other_bits(value)
    if isinstance(value, np.ndarray):
        return (value + 1).astype(value.dtype)  # of its byte order
    return value + 1


def contents(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What is in a state, by dotted path, in a form that compares bit for bit."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= contents(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = _bits(value)
    return found


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return bits(value)
    return value.tobytes() if isinstance(value, np.ndarray) else value


def without(state: dict[str, Any], path: str) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {k: without(v, rest) if k == head else v for k, v in state.items() if k != head or rest}


@pytest.fixture(scope="module")
def checkpoints(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Where each one lies, and what is in it."""
    root = tmp_path_factory.mktemp("flips")
    for name, arguments in {
        "packed": {},
        "zstd": {"compression": "zstd"},
        "zarr": {"layout": "zarr"},
        "zarr-zstd": {"layout": "zarr", "compression": "zstd"},
    }.items():
        cloudckpt.save(state(), root / name, config=CONFIG, **arguments)
    found = {path.name: (path, state()) for path in sorted(root.iterdir())}
    for step in (1, 2):
        # Of the second step most lies in the first.
        changed = {"half": state()["half"] * step, "step": step}
        url = root / "run" / step_dir(step)
        cloudckpt.save({**state(), **changed}, url, step=step, incremental=True, config=CONFIG)
    found["incremental"] = (url, {**state(), **changed})
    ranks.run(4, saved.save_irregular, str(root / "ranks"), "packed", None)
    irregular = {"w": torch.from_numpy(saved.IRREGULAR), "raw": torch.from_numpy(saved.IRREGULAR_RAW)}
    found["ranks"] = (root / "ranks", {**irregular, "raw": irregular["raw"].view(torch.complex32)})
    return found


@COUNTS
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["packed", "zstd", "zarr", "zarr-zstd", "incremental", "ranks"])
def test_every_flipped_bit_is_found(checkpoints, name: str, count: int):
    url, full = checkpoints[name]
    seen: Counter[str] = Counter()
    for flip in flips(url, count, seed=count):
        flip.turn(url)
        try:
            _check(url, full, flip)
        finally:
            flip.turn(url)
        seen[flip.region.what] += 1
    assert verify(url, config=CONFIG).ok
    assert seen.total() == count
    if count >= len(regions(url)):
        assert seen.keys() == {"manifest", "outside", "payload", "checksum"}


def _check(url: Path, full: dict[str, Any], flip: Flip) -> None:
    target = blank(full)
    if flip.region.what == "manifest":
        for use in (lambda: verify(url), lambda: cloudckpt.load(target, url), lambda: cloudckpt.read(url)):
            assert isinstance(error_of(use), FormatError), flip
        assert contents(target) == contents(blank(full)), flip
        return
    (fault,) = verify(url, config=CONFIG).faults
    assert fault.key == flip.region.key, flip
    if flip.region.chunk is None:  # which no load reads
        assert fault.box is None, flip
        cloudckpt.load(target, url, config=CONFIG)
        assert contents(target) == contents(full), flip
        return
    manifest = manifest_of(url)
    array, number = manifest.locate(flip.region.chunk)
    path, box = manifest.path(array), manifest.grids[array].box(number)
    where = (flip.region.key, int(manifest.columns.byte_offset[flip.region.chunk]), path, box)
    assert (fault.key, fault.byte_offset, fault.path, fault.box) == where, flip
    corner = part_of(full, path, box)
    for use in (
        lambda: cloudckpt.load(target, url, config=CONFIG),
        lambda: cloudckpt.read(url, config=CONFIG),
        lambda: cloudckpt.load(corner, url, config=CONFIG, strict=False),
    ):
        error = error_of(use)
        assert isinstance(error, CorruptChunkError), flip
        assert (error.key, error.byte_offset, error.array, Box(*error.box)) == where, flip
    others = without(blank(full), path)
    cloudckpt.load(others, url, config=CONFIG, strict=False)
    assert contents(others) == contents(without(full, path)), flip


def part_of(full: dict[str, Any], path: str, box: Box) -> dict[str, Any]:
    """A target that wants one element of one chunk."""
    head, _, rest = path.partition(".")
    value = full[head]
    if isinstance(value, dict):
        return {head: part_of(value, rest, box)}
    if isinstance(value, np.ndarray):
        return {head: np.zeros_like(value)}  # of these only all
    local = torch.zeros([1] * value.dim(), dtype=value.dtype)
    piece = cloudckpt.Piece([0] * value.dim(), box.offset[: value.dim()], [1] * value.dim())
    return {head: cloudckpt.ShardedTensor(local, tuple(value.shape), [piece])}


def load_on_ranks(url: str, chosen: list[Flip], exchange: Any) -> list[Any]:
    """For each flip, which rank 0 makes and undoes, what the load of all ranks raises here."""
    found = []
    target = {"w": torch.zeros(saved.IRREGULAR.shape)}
    for flip in chosen:
        for turn in (True, False):
            if dist.get_rank() == 0:
                flip.turn(Path(url))
            dist.barrier()
            if turn:
                found.append(error_of(lambda: cloudckpt.load(target, url, exchange=exchange, strict=False)))
            dist.barrier()
    cloudckpt.load(target, url, exchange=exchange, strict=False)
    assert target["w"].numpy().tobytes() == saved.IRREGULAR.tobytes()
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("exchange", ["none", "auto"])
@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.long)])
def test_ranks_that_share_what_they_read(checkpoints, ranks: RankPool, exchange: str, count: int):
    """Whoever reads a damaged chunk, all ranks hear of it, before a byte of it is passed on as right."""
    url, _ = checkpoints["ranks"]
    manifest = manifest_of(url)
    chosen = [
        flip
        for flip in flips(url, 6 * count, seed=count)
        if flip.region.chunk is not None and manifest.path(manifest.locate(flip.region.chunk)[0]) == "w"
    ][:count]
    assert len(chosen) == count
    for found in ranks.run(2, load_on_ranks, str(url), chosen, exchange):
        for flip, error in zip(chosen, found, strict=True):
            assert isinstance(error, CorruptChunkError | RankError), flip
            assert flip.region.key in str(error), flip
