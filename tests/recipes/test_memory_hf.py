"""Host memory of import and load_hf stays within Config.memory_bytes, whatever the size of the files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

import cloudckpt
from cloudckpt import Piece, ShardedTensor
from tests.interop.safetensors_files import entry
from tests.ranks import RankPool
from tests.recipes.test_memory import MIB, bound, extra_memory

ROWS = 2048
"""Of each tensor; a row is 8 KiB, in bfloat16."""
COLUMNS = 4096
HELD = COLUMNS // 16
"""The columns of one rank: every run of bytes in the file is needed, and little of each."""
TENSOR_BYTES = ROWS * COLUMNS * 2


@pytest.fixture
def fresh() -> Iterator[RankPool]:
    """Processes in which nothing has grown the heap before."""
    pool = RankPool()
    yield pool
    pool.stop()


def write_file(path: Path, num_tensors: int) -> None:
    """A file with holes: some elements of each tensor are not zero, and nearly none of it takes room on the disk."""
    shape = (ROWS, COLUMNS)
    offsets = [(i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES) for i in range(num_tensors)]
    header = json.dumps({f"t{i}": entry("BF16", shape, at) for i, at in enumerate(offsets)}).encode()
    chosen = random.Random(0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start, _ in offsets:
            for _ in range(8):
                file.seek(8 + len(header) + start + 2 * chosen.randrange(ROWS * COLUMNS - 8))
                file.write(chosen.randbytes(16))
        file.truncate(8 + len(header) + num_tensors * TENSOR_BYTES)


def held(num_tensors: int) -> dict[str, ShardedTensor]:
    first = HELD * dist.get_rank()
    local = torch.full((num_tensors, ROWS, HELD), -1.0, dtype=torch.bfloat16)
    piece = Piece((0, 0), (0, first), (ROWS, HELD))
    return {f"t{i}": ShardedTensor(local[i], (ROWS, COLUMNS), [piece]) for i in range(num_tensors)}


def measure(folder: str, num_tensors: int, config: cloudckpt.Config | None) -> tuple[int, int]:
    source, small, target = (Path(folder, name) for name in ("m.safetensors", "s.safetensors", "c"))
    warm = {"w": torch.zeros(1000)}
    cloudckpt.import_from("hf", small, Path(folder, "small"), config=config)
    cloudckpt.load_hf(warm, small, config=config)
    state = held(num_tensors)
    loading = extra_memory(lambda: cloudckpt.load_hf(state, source, config=config))
    importing = extra_memory(lambda: cloudckpt.import_from("hf", source, target, config=config))
    again = held(num_tensors)
    cloudckpt.load(again, target, config=config)
    with safe_open(source, "pt") as file:
        for name, tensor in state.items():
            first = HELD * dist.get_rank()
            expected = file.get_slice(name)[:, first : first + HELD].view(torch.int16)
            assert torch.equal(tensor.local.view(torch.int16), expected)
            assert torch.equal(again[name].local.view(torch.int16), expected)
    return loading, importing


def test_small_budget(fresh: RankPool, tmp_path: Path):
    """192 MiB, of which 24 may be held."""
    write_file(tmp_path / "m.safetensors", 12)
    save_file({"w": torch.ones(1000)}, tmp_path / "s.safetensors")
    ((loading, importing),) = fresh.run(1, measure, str(tmp_path), 12, cloudckpt.Config(memory_bytes=24 * MIB))
    assert loading <= bound(24 * MIB)
    assert importing <= bound(24 * MIB)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_large_model(fresh: RankPool, tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch):
    """4 GiB, with the settings that everybody has."""
    monkeypatch.setattr("tests.ranks.TIMEOUT_S", 600.0)
    write_file(tmp_path / "m.safetensors", 256)
    save_file({"w": torch.ones(1000)}, tmp_path / "s.safetensors")
    try:
        for loading, importing in fresh.run(num_ranks, measure, str(tmp_path), 256, None):
            assert loading <= 256 * MIB
            assert importing <= 256 * MIB
    finally:
        for path in (tmp_path / "c").rglob("*"):
            if path.is_file():
                path.unlink()
