"""Arrays of others, written with zarr, become a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr

import cloudckpt
from cloudckpt.cli import main
from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError, FormatError, NotFoundError
from cloudckpt.interop.zarr_keys import KeysStore
from tests.field.places import Place

SMALL = Config(chunk_bytes=32 * 1024, memory_bytes=512 * 1024)
"""Many windows."""

CUTS: dict[str, dict[str, Any]] = {
    "rows": {"chunks": (13, 300)},
    "columns": {"chunks": (200, 21)},
    "blocks": {"chunks": (64, 64)},
    "small": {"chunks": (25, 30), "compressors": None},
    "whole": {"chunks": (200, 300)},
    "sharded": {"chunks": (20, 30), "shards": (100, 150)},
}


def matrix(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((200, 300), dtype=np.float32)


def write(
    url: str, options: dict[str, Any] | None = None, version: int = 3, cuts: Iterable[str] = CUTS
) -> dict[str, np.ndarray]:
    """A hierarchy of arrays that are cut in every way; what is in it, by path."""
    root = zarr.open_group(url, mode="w", storage_options=options, zarr_format=version, attributes={"epoch": 3})
    held: dict[str, np.ndarray] = {
        "layers/0/b": np.arange(9).astype(ml_dtypes.bfloat16 if version == 3 else np.float16),
        "cube": np.arange(20 * 30 * 40).reshape(20, 30, 40).astype(">i4"),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), dtype=np.int8),
        "flags": np.arange(50) % 3 == 0,
    }
    for path, data in held.items():
        chunks = tuple(max(1, n // 3) for n in data.shape)
        root.create_array(path, shape=data.shape, dtype=data.dtype, chunks=chunks)[...] = data
    for seed, name in enumerate(cuts):
        cut = CUTS[name]
        if version == 3 or "shards" not in cut:
            held[f"m/{name}"] = matrix(seed)
            root.create_array(f"m/{name}", shape=(200, 300), dtype="f4", **cut)[...] = held[f"m/{name}"]
    return held


def check(url: str, held: dict[str, np.ndarray], options: dict[str, Any] | None = None) -> None:
    state = cloudckpt.read(url, storage_options=options)
    for path, data in held.items():
        found = state
        for part in path.split("/"):
            found = found[part]
        assert tuple(found.shape) == data.shape, path
        native = data.astype(data.dtype.newbyteorder("=")) if data.dtype.kind in "iuf" else data
        assert found.contiguous().flatten().view(torch.uint8).numpy().tobytes() == native.tobytes(), path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_every_bit_comes_over(tmp_path, version, layout):
    held = write(str(tmp_path / "src"), version=version)
    commit = cloudckpt.import_from("zarr", tmp_path / "src", tmp_path / "dst", step=5, layout=layout, config=SMALL)
    assert commit.step == 5
    check(str(tmp_path / "dst"), held)
    with cloudckpt.open_checkpoint(tmp_path / "dst") as checkpoint:
        assert checkpoint.metadata == {"epoch": 3}
        assert checkpoint.arrays["m.blocks"].grid.is_regular


@pytest.mark.parametrize("place", ["juicefs", "juicefs-fsspec"], indirect=True)
def test_from_store_to_store(place: Place):
    held = write(f"{place.root}/src", dict(place.options), cuts=("whole", "sharded"))
    config = Config(engine=place.engine, chunk_bytes=64 * 1024)
    cloudckpt.import_from(
        "zarr",
        f"{place.root}/src",
        f"{place.root}/dst",
        src_options=place.options,
        dst_options=place.options,
        config=config,
    )
    check(f"{place.root}/dst", held, place.options)


def import_small(src: str, dst: str) -> int:
    return cloudckpt.import_from("zarr", src, dst, config=SMALL).num_chunks


def test_two_ranks_write_a_part_each(tmp_path, ranks):
    held = write(str(tmp_path / "src"))
    ranks.run(2, import_small, str(tmp_path / "src"), str(tmp_path / "dst"))
    check(str(tmp_path / "dst"), held)
    with cloudckpt.open_checkpoint(tmp_path / "dst") as checkpoint:
        assert {entry.rank for entry in checkpoint.manifest.objects} == {0, 1}


def test_each_chunk_is_read_once(tmp_path, monkeypatch):
    """However it is cut: compressed chunks cost time to decode, and requests."""
    write(str(tmp_path / "src"))
    read = Counter()
    original = KeysStore._read

    def counting(self, key, byte_range):
        read[key] += 1
        return original(self, key, byte_range)

    monkeypatch.setattr(KeysStore, "_read", counting)
    cloudckpt.import_from("zarr", tmp_path / "src", tmp_path / "dst", config=SMALL)
    twice = {key for key, number in read.items() if number > 1 and not key.startswith("m/sharded")}
    assert twice == set()
    # Each chunk of a shard once, and the shard's index now and then.
    assert sum(number for key, number in read.items() if key.startswith("m/sharded")) <= 2 * 100


def test_memory(tmp_path, monkeypatch):
    """What is held of tiles stays within the budget, however large the arrays are."""
    root = zarr.open_group(tmp_path / "src", mode="w")
    data = np.random.default_rng(0).random((2048, 2048), dtype=np.float32)
    root.create_array("w", shape=data.shape, dtype="f4", chunks=(2048, 16))[...] = data
    from cloudckpt.interop.zarr_fetch import TileReader

    held = []
    original = TileReader.__call__

    def measured(self, targets):
        original(self, targets)
        held.append(sum(map(len, self._kept.values())))

    monkeypatch.setattr(TileReader, "__call__", measured)
    config = Config(chunk_bytes=64 * 1024, memory_bytes=2 * 1024 * 1024)
    cloudckpt.import_from("zarr", tmp_path / "src", tmp_path / "dst", config=config)
    assert len(held) > 8
    assert max(held) <= config.memory_bytes // 8
    assert np.array_equal(cloudckpt.read(tmp_path / "dst")["w"].numpy(), data)


def test_names_and_types_may_change(tmp_path):
    write(str(tmp_path / "src"))
    cloudckpt.import_from(
        "zarr",
        tmp_path / "src",
        tmp_path / "dst",
        rename=[("m.{name}", "model.{name}.weight"), ("layers.{i:d}.b", "b{i}")],
        cast={"model.*": "bfloat16"},
        metadata={"from": "elsewhere"},
    )
    state = cloudckpt.read(tmp_path / "dst")
    assert state["b0"].tolist() == [*range(9)]
    assert torch.equal(state["model.rows.weight"], torch.from_numpy(matrix(0)).to(torch.bfloat16))
    with cloudckpt.open_checkpoint(tmp_path / "dst") as checkpoint:
        assert checkpoint.metadata == {"from": "elsewhere"}


def test_absent_chunks_are_fill_values_and_told(tmp_path):
    made = zarr.create_array(tmp_path / "x", shape=(10,), chunks=(3,), dtype="f4", fill_value=7)
    made[:3] = 1
    with pytest.warns(UserWarning, match=r"absent chunks are taken for fill values, as zarr does: .*x \(3 of 4\)"):
        cloudckpt.import_from("zarr", tmp_path / "x", tmp_path / "dst")
    assert cloudckpt.read(tmp_path / "dst")["x"].tolist() == [1] * 3 + [7] * 7


def nothing_written(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if path.is_file()]


def test_a_chunk_that_goes_while_it_is_read(tmp_path, monkeypatch):
    zarr.create_array(tmp_path / "x", shape=(10,), chunks=(3,), dtype="f4")[...] = 1
    original = KeysStore._read

    def removing(self, key, byte_range):
        (tmp_path / "x/c/2").unlink(missing_ok=True)
        return original(self, key, byte_range)

    monkeypatch.setattr(KeysStore, "_read", removing)
    with pytest.raises(NotFoundError, match=r"c/2 of .*x was there when the import began"):
        cloudckpt.import_from("zarr", tmp_path / "x", tmp_path / "dst")
    assert nothing_written(tmp_path / "dst")


@pytest.mark.parametrize("cut", ["blocks", "sharded"])
def test_a_damaged_chunk(tmp_path, cut):
    made = zarr.create_array(tmp_path / "x", shape=(200, 300), dtype="f4", **CUTS[cut])
    made[...] = matrix(0)
    path = tmp_path / "x/c/1/1"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CloudckptError, match=r"x' cannot be read at \[\d+:\d+, \d+:\d+\]"):
        cloudckpt.import_from("zarr", tmp_path / "x", tmp_path / "dst", config=SMALL)
    assert nothing_written(tmp_path / "dst")


def test_nothing_is_written_where_something_is_wrong(tmp_path):
    write(str(tmp_path / "src"))
    (tmp_path / "src/bad").mkdir()
    (tmp_path / "src/bad/zarr.json").write_text("{")
    with pytest.raises(FormatError, match=r"bad/zarr.json of .* is not a JSON object"):
        cloudckpt.import_from("zarr", tmp_path / "src", tmp_path / "dst")
    assert nothing_written(tmp_path / "dst")


def test_our_own_zarr_layout(tmp_path):
    """Is plain zarr."""
    cloudckpt.save({"a": {"w": torch.arange(10.0)}}, tmp_path / "one", layout="zarr")
    cloudckpt.import_from("zarr", next((tmp_path / "one").glob("*.zarr")), tmp_path / "two")
    assert cloudckpt.read(tmp_path / "two")["a.w"].tolist() == [*range(10)]


def test_command(tmp_path, capsys):
    held = write(str(tmp_path / "src"))
    command = ["import", "zarr", str(tmp_path / "src"), str(tmp_path / "dst"), "--step", "4"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path}/dst: ")
    check(str(tmp_path / "dst"), held)
    assert main(command) == 1
    assert "already" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert main(["show", str(tmp_path / "dst"), "--json"]) == 0
    capsys.readouterr()
    assert main(["import", "zarr", str(tmp_path / "nothing"), str(tmp_path / "x")]) == 1
    assert "nothing is there" in capsys.readouterr().err
