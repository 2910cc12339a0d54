"""zarr-developers/numcodecs#80: a codec rejects or mangles buffers of 2 GiB and more."""

from __future__ import annotations

from typing import Any

import numcodecs.zstd
import numpy as np
import pytest
import torch

from cloudckpt.config import GIB, KIB, MIB, Config
from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.writes import plan_save
from tests.field.places import Place

LIMIT = 1 * KIB


@pytest.mark.parametrize("numel", [2**31 + 8, 2**31 - 1, 2**31, 2**33 + 1])
@pytest.mark.parametrize("chunk_bytes", [Config().chunk_bytes, 1 * GIB, 1 * MIB + 1])
def test_chunks_of_large_tensors_stay_below_the_limit(numel: int, chunk_bytes: int):
    """The plan alone, without data."""
    table = PieceTable.build([(0, Box((0,), (numel,)))])
    plan = plan_save([TensorSpec("w", (numel,), 1)], [table], chunk_bytes=chunk_bytes)
    sizes = plan.grids[0].stored_elements
    assert int(sizes.max()) <= chunk_bytes
    assert int(sizes.sum()) >= numel
    assert int(sizes.max()) + 4 < 2**31


@pytest.mark.parametrize("chunk_bytes", [GIB + 1, 2 * GIB, 2**40])
def test_a_larger_chunk_is_refused_before_anything_is_written(chunk_bytes: int):
    with pytest.raises(InvalidStateError, match="chunk_bytes"):
        Config(chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("numel", [LIMIT, LIMIT + 1, 2 * LIMIT + 8, 100 * LIMIT - 1])
@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_a_codec_with_a_small_limit(place: Place, monkeypatch: pytest.MonkeyPatch, numel: int, layout: str):
    sizes: list[int] = []
    real_compress, real_decompress = numcodecs.zstd.compress, numcodecs.zstd.decompress

    def compress(source: Any, *args: Any) -> Any:
        sizes.append(memoryview(source).nbytes)
        if sizes[-1] > LIMIT:
            raise ValueError("Codec does not support buffers of > 1024 bytes")
        return real_compress(source, *args)

    def decompress(source: Any, *args: Any) -> Any:
        decoded = real_decompress(source, *args)
        assert memoryview(decoded).nbytes <= LIMIT
        return decoded

    monkeypatch.setattr("numcodecs.zstd.compress", compress)
    monkeypatch.setattr("numcodecs.zstd.decompress", decompress)
    generator = np.random.default_rng(numel)
    state = {"w": torch.from_numpy(generator.integers(0, 9, numel, dtype=np.uint8))}
    place.save(state, layout=layout, compression="zstd", config=place.config(chunk_bytes=LIMIT))
    assert sizes
    target = {"w": torch.zeros(numel, dtype=torch.uint8)}
    place.load(target)
    assert torch.equal(target["w"], state["w"])
    assert torch.equal(place.read()["w"], state["w"])
