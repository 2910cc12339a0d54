"""The bytes of tensors in C order, out of real checkpoints, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.config import MIB, Config
from cloudckpt.errors import InterruptedTransferError
from cloudckpt.format.dtypes import dtype
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.runs import RunSizes, plan_runs
from cloudckpt.plan.virtual import VirtualArray, array_of, permute
from cloudckpt.pytorch.runs import RunMemory, RunReader, RunSource
from cloudckpt.pytorch.targets import ChunkPlaces, Targets
from cloudckpt.transfer.download import download

SIZES = RunSizes(run_bytes=900, window_bytes=4000, largest_bytes=8000)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(57, 43),
        "turned": torch.randn(31, 40).t(),
        "deep": torch.randn(3, 17, 19).to(torch.bfloat16),
        "long": torch.arange(3000),
        "empty": torch.zeros(0, 4),
        **{f"small{i}": torch.randn(i, dtype=torch.float64) for i in range(1, 5)},
        "flags": torch.arange(7) % 2 == 0,
        "scalar": torch.tensor(2.5),
        "float8": torch.randn(50).to(torch.float8_e4m3fn),
    }


@pytest.fixture(params=[None, "zstd"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[cloudckpt.Checkpoint]:
    cloudckpt.save(state(), tmp_path / "c", compression=request.param, config=Config(chunk_bytes=1024))
    with cloudckpt.open_checkpoint(tmp_path / "c") as opened:
        yield opened


def make_reader(
    checkpoint: cloudckpt.Checkpoint, sources: Sequence[RunSource], memory: RunMemory, sizes: RunSizes = SIZES
) -> RunReader:
    manifest = checkpoint.manifest

    def fetch(targets: Targets) -> None:
        plan = plan_load(StoredChunks.of(manifest), [targets.table], read_bytes=MIB).rank(0)
        places = ChunkPlaces(manifest, targets, plan.parts)
        download(
            checkpoint.store,
            manifest,
            plan.reads,
            places.open_sink,
            config=Config(),
            cancel=threading.Event(),
            advance=lambda _: None,
            staged_bytes=places.staged_bytes,
        )

    plan = plan_runs([s.array for s in sources], [s.itemsize for s in sources], manifest.grids, sizes)
    return RunReader(plan, sources, fetch, memory, threading.Event())


def source(checkpoint: cloudckpt.Checkpoint, name: str, kind: str | None = None) -> RunSource:
    array: VirtualArray = array_of(checkpoint.manifest, checkpoint.manifest.document.tree[name])
    return RunSource(name, array, kind or array.dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_all_bytes_in_order(checkpoint: cloudckpt.Checkpoint):
    sources = [source(checkpoint, name) for name in state()]
    expected = b"".join(map(raw, state().values()))
    with make_reader(checkpoint, sources, RunMemory(20_000, 1000)) as reader:
        assert b"".join(bytes(block) for block in reader.blocks()) == expected
    with make_reader(checkpoint, sources, RunMemory(20_000, 1000)) as reader:
        runs = [(run, bytes(data)) for run, data in reader]
    assert b"".join(data for _, data in runs) == expected
    assert all(len(d) == run.box.num_elements * dtype(sources[run.array].dtype).itemsize for run, d in runs)
    assert max(len(data) for _, data in runs) <= SIZES.run_bytes


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float64", "float8_e5m2"])
def test_values_are_converted_as_tensor_to_does(checkpoint: cloudckpt.Checkpoint, kind: str):
    floats = {name: tensor for name, tensor in state().items() if tensor.is_floating_point()}
    sources = [source(checkpoint, name, kind) for name in floats]
    with make_reader(checkpoint, sources, RunMemory(20_000, 1000)) as reader:
        found = b"".join(bytes(block) for block in reader.blocks())
    assert found == b"".join(raw(tensor.to(getattr(torch, kind))) for tensor in floats.values())


def test_arrays_that_rules_have_turned(checkpoint: cloudckpt.Checkpoint):
    plain = source(checkpoint, "deep")
    turned = RunSource("deep", permute(plain.array, (2, 0, 1)), "float32")
    with make_reader(checkpoint, [turned], RunMemory(20_000, 1000)) as reader:
        found = b"".join(bytes(block) for block in reader.blocks())
    assert found == raw(state()["deep"].permute(2, 0, 1).float())


def test_a_window_larger_than_the_memory_is_read_all_the_same(checkpoint: cloudckpt.Checkpoint):
    with make_reader(checkpoint, [source(checkpoint, "matrix")], RunMemory(2000, 9000)) as reader:
        assert b"".join(bytes(block) for block in reader.blocks()) == raw(state()["matrix"])


def test_damage_is_found(checkpoint: cloudckpt.Checkpoint):
    key = checkpoint.manifest.objects[0].key
    path = Path(checkpoint.url) / key
    data = bytearray(path.read_bytes())
    data[int(checkpoint.manifest.columns.byte_offset[0]) + 3] ^= 1
    path.write_bytes(data)
    with (
        make_reader(checkpoint, [source(checkpoint, "matrix")], RunMemory(20_000, 1000)) as reader,
        pytest.raises(cloudckpt.errors.CorruptChunkError, match="matrix"),
    ):
        list(reader.blocks())


def test_memory_is_lent_within_its_bound_and_used_again():
    memory = RunMemory(3 * MIB, 0)
    first = memory.take([MIB, MIB - 1], lambda: False)
    address = {data.ctypes.data for data in first}
    with pytest.raises(InterruptedTransferError):
        memory.take([MIB + 1], lambda: True)
    taken: list[np.ndarray] = []
    waiting = threading.Thread(target=lambda: taken.extend(memory.take([MIB, MIB], lambda: False)))
    waiting.start()
    first.clear()
    waiting.join(timeout=10)
    assert {data.ctypes.data for data in taken} == address
    assert [len(data) for data in taken] == [MIB, MIB]
    taken.clear()
    assert len(memory.take([10 * MIB], lambda: False)[0]) == 10 * MIB


def test_what_refers_to_a_part_keeps_the_whole():
    memory = RunMemory(MIB, 0)
    part = memory.take([MIB], lambda: False)[0][10:20]
    with pytest.raises(InterruptedTransferError):
        memory.take([MIB], lambda: True)
    del part
    assert memory.take([MIB], lambda: True)
