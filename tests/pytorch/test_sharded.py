"""ShardedTensors of one process: what is stored, what is filled, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt import Piece, ShardedTensor
from cloudckpt.errors import InvalidStateError, MismatchError, NotFoundError
from tests.sharding import noise, same_bits

WHOLE = torch.arange(24.0).reshape(6, 4)
SWAPPED = [Piece((0, 0), (3, 0), (3, 4)), Piece((4, 0), (0, 0), (3, 4))]
"""Rows 3 to 5 first, then a row of padding, then rows 0 to 2."""


def swapped(whole: torch.Tensor = WHOLE, between: float = 99.0) -> torch.Tensor:
    return torch.cat([whole[3:], torch.full((1, 4), between, dtype=whole.dtype), whole[:3]])


def test_pieces_are_stored_in_global_order_and_padding_is_not(tmp_path: Path):
    commit = cloudckpt.save({"w": ShardedTensor(swapped(), (6, 4), SWAPPED)}, tmp_path / "c")
    assert torch.equal(cloudckpt.read(tmp_path / "c")["w"], WHOLE)
    assert commit.nbytes == 24 * 4 + 4 * commit.num_chunks


@pytest.mark.parametrize(("padding", "between"), [(None, 7.0), (-1, -1.0), (0.5, 0.5), (np.float32(2), 2.0)])
def test_a_target_is_filled_where_its_pieces_are_and_else_with_padding(tmp_path: Path, padding: Any, between: float):
    cloudckpt.save({"w": WHOLE}, tmp_path / "c")
    local = torch.full((7, 4), 7.0)
    target = {"w": ShardedTensor(local, (6, 4), SWAPPED, padding=padding)}
    cloudckpt.load(target, tmp_path / "c")
    assert target["w"].local is local
    assert torch.equal(local, swapped(between=between))


def test_padding_along_two_dims_and_around_several_pieces(tmp_path: Path):
    cloudckpt.save({"w": WHOLE}, tmp_path / "c")
    local = torch.full((9, 6), 7.0)
    pieces = [Piece((1, 1), (0, 0), (3, 4)), Piece((5, 2), (3, 0), (3, 4))]
    cloudckpt.load({"w": ShardedTensor(local, (6, 4), pieces, padding=-1)}, tmp_path / "c")
    expected = torch.full((9, 6), -1.0)
    expected[1:4, 1:5], expected[5:8, 2:6] = WHOLE[:3], WHOLE[3:]
    assert torch.equal(local, expected)


def test_a_rank_without_pieces_gets_padding_only(tmp_path: Path):
    cloudckpt.save({"w": WHOLE}, tmp_path / "c")
    local = torch.full((2, 4), 7.0)
    cloudckpt.load({"w": ShardedTensor(local, (6, 4), [], padding=0)}, tmp_path / "c")
    assert not local.any()


def test_whole_and_scalar_and_empty_and_root(tmp_path: Path):
    state = {
        "whole": ShardedTensor(WHOLE, (6, 4)),
        "scalar": ShardedTensor(torch.tensor(3.0), torch.Size([])),
        "empty": ShardedTensor(torch.zeros(0, 3), [0, 3], []),
        "none": ShardedTensor(torch.zeros(0, 3), (0, 3), [Piece((0, 0), (0, 0), (0, 3))]),
    }
    cloudckpt.save(state, tmp_path / "c")
    found = cloudckpt.read(tmp_path / "c")
    assert torch.equal(found["whole"], WHOLE)
    assert found["scalar"] == 3
    assert found["empty"].shape == found["none"].shape == (0, 3)
    target = {name: ShardedTensor(torch.zeros_like(t.local), t.global_shape, t.pieces) for name, t in state.items()}
    cloudckpt.load(target, tmp_path / "c")
    assert torch.equal(target["whole"].local, WHOLE)
    assert target["scalar"].local == 3
    cloudckpt.save(ShardedTensor(swapped(), (6, 4), SWAPPED), tmp_path / "root")
    root = ShardedTensor(torch.zeros(7, 4), (6, 4), SWAPPED)
    cloudckpt.load(root, tmp_path / "root")
    assert torch.equal(root.local, swapped(between=0.0))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "bool", "int16", "uint64", "complex32", "complex128"])
def test_dtypes_and_strides(tmp_path: Path, name: str):
    dtype: torch.dtype = getattr(torch, name)
    whole = noise((6, 4), dtype)
    local = noise((4, 8), dtype, seed=1)[:, ::2].t()
    local[:2].copy_(whole[4:])
    local[2:].copy_(whole[2:4])
    pieces = [Piece((0, 0), (4, 0), (2, 4)), Piece((2, 0), (2, 0), (2, 4))]
    more = ShardedTensor(whole[:2].clone(), (6, 4), [Piece((0, 0), (0, 0), (2, 4))])
    cloudckpt.save({"a": whole}, tmp_path / "c")
    blank = torch.zeros_like(local)
    cloudckpt.load({"a": ShardedTensor(blank, (6, 4), pieces)}, tmp_path / "c")
    assert same_bits(blank.contiguous(), local.contiguous())
    with pytest.raises(InvalidStateError, match=r"no rank holds \[2:6, 0:4\]"):
        cloudckpt.save({"a": more}, tmp_path / "d")


def test_thousands_of_pieces(tmp_path: Path):
    """One element each, in reverse: neither checks nor chunks are compared each with each."""
    count = 4000
    values = torch.arange(float(count))
    pieces = [Piece((count - 1 - i,), (i,), (1,)) for i in range(count)]
    cloudckpt.save({"w": ShardedTensor(values.flip(0).contiguous(), (count,), pieces)}, tmp_path / "c")
    assert torch.equal(cloudckpt.read(tmp_path / "c")["w"], values)


def test_shapes_and_dtypes_that_differ_are_listed_and_nothing_is_changed(tmp_path: Path):
    cloudckpt.save({"w": WHOLE, "v": WHOLE}, tmp_path / "c")
    target = {
        "w": ShardedTensor(torch.zeros(7, 4), (7, 4), padding=1),
        "v": ShardedTensor(torch.zeros(7, 4, dtype=torch.bfloat16), (6, 4), SWAPPED, padding=1),
    }
    with pytest.raises(MismatchError) as caught:
        cloudckpt.load(target, tmp_path / "c")
    assert caught.value.shapes == {"w": ((6, 4), (7, 4))}
    assert caught.value.dtypes == {"v": ("float32", "bfloat16")}
    assert not any(tensor.local.any() for tensor in target.values())


def test_missing_keys_are_listed(tmp_path: Path):
    cloudckpt.save({"w": WHOLE}, tmp_path / "c")
    target = {"w": torch.zeros(6, 4), "x": ShardedTensor(torch.zeros(2), (2,))}
    assert cloudckpt.load(target, tmp_path / "c", strict=False).missing == ["x"]


def piece(local: Any = (0, 0), offset: Any = (0, 0), shape: Any = (6, 4)) -> Piece:
    return Piece(local, offset, shape)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"global_shape": (7, 4)}, r"the local tensor of \(6, 4\) is not the whole of \(7, 4\)"),
    ({"global_shape": (6.0, 4)}, "global_shape: 6.0 is not an int"),
    ({"global_shape": (True, 4)}, "global_shape: True is not an int"),
    ({"global_shape": (-6, 4)}, "global_shape: -6 is negative"),
    ({"global_shape": 24}, "global_shape must be a sequence"),
    ({"global_shape": (2**40, 2**40)}, "too large"),
    ({"global_shape": (2**70, 4)}, "too large"),
    ({"pieces": piece()}, "pieces must be a list"),
    ({"pieces": [((0, 0), (0, 0), (6, 4))]}, r"piece 0 is a tuple; write Piece\("),
    ({"pieces": [piece(local=(0,))]}, r"piece 0: local_offset \(0,\).* 2 dims of the local tensor"),
    ({"pieces": [piece(offset=(0, 0, 0))]}, r"piece 0: global_offset \(0, 0, 0\).* 2 dims of the global tensor"),
    ({"pieces": [piece(shape=(6,))]}, "piece 0: .* 2 dims"),
    ({"pieces": [piece(local=(1, 0))]}, "piece 0: .* outside of the local tensor"),
    ({"pieces": [piece(shape=(3, 4)), piece(offset=(4, 0), shape=(3, 4))]}, "piece 1: .* outside of the global tensor"),
    ({"pieces": [piece(shape=(3, 4)), piece(shape=(3, 4), local=(3, 0), offset=(2, 0))]},
     "pieces 0 and 1 overlap in the global tensor"),
    ({"pieces": [piece(shape=(3, 4)), piece(shape=(3, 4), local=(2, 0), offset=(3, 0))]},
     "pieces 0 and 1 overlap in the local tensor"),
    ({"pieces": [piece(), piece()]}, "pieces 0 and 1 overlap"),
    ({"pieces": [piece(shape=(5, 4))]}, r"no rank holds \[5:6, 0:4\]"),
    ({"pieces": [piece(local=(0.0, 0))]}, "piece 0: local_offset: 0.0 is not an int"),
    ({"pieces": [piece(offset=(False, 0))]}, "piece 0: global_offset: False is not an int"),
    ({"pieces": [piece(offset=(-1, 0))]}, "piece 0: global_offset: -1 is negative"),
    ({"pieces": [piece(shape=(np.float64(6), 4))]}, "piece 0: shape: .*6.0.* is not an int"),
    ({"pieces": [piece(shape="64")]}, "piece 0: shape must be a sequence"),
    ({"replica": -1}, "replica: -1 is negative"),
    ({"replica": 2**31}, "replica: 2147483648 is too large"),
    ({"replica": 1.5}, "replica: 1.5 is not an int"),
    ({"padding": "0"}, "padding='0' is no value of torch.float32"),
    ({"padding": 1j}, "padding=1j"),
    ({"local": torch.zeros(6, 4, dtype=torch.int32), "padding": 0.5}, "padding=0.5 is no value of torch.int32"),
    ({"local": torch.zeros(6, 4, dtype=torch.int8), "padding": 300}, "padding=300"),
    ({"local": torch.zeros(6, 4, device="meta")}, "a meta tensor holds no data"),
    ({"local": torch.zeros(6, 4).to_sparse()}, "layout torch.sparse_coo"),
    ({"local": np.zeros((6, 4))}, "the local part of a ShardedTensor is a ndarray"),
    ({"local": None}, "is a NoneType"),
    ({"local": ShardedTensor(WHOLE, (6, 4))}, "is a ShardedTensor"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "fault"), BAD)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: dict[str, Any], fault: str):
    arguments: dict[str, Any] = {"local": WHOLE.clone(), "global_shape": (6, 4)} | change
    tensor = ShardedTensor(**arguments)
    with pytest.raises(InvalidStateError, match=rf"'model\.w'.*{fault}"):
        cloudckpt.save({"model": {"w": tensor}}, tmp_path / "c")
    with pytest.raises(NotFoundError):
        cloudckpt.read(tmp_path / "c")
    if "no rank holds" not in fault:
        cloudckpt.save({"model": {"w": WHOLE}}, tmp_path / "c")
        with pytest.raises(InvalidStateError, match=rf"'model\.w'.*{fault}"):
            cloudckpt.load({"model": {"w": tensor}}, tmp_path / "c")


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_quantised_tensors_are_refused(tmp_path: Path):
    local = torch.quantize_per_tensor(torch.zeros(6, 4), 1.0, 0, torch.qint8)
    with pytest.raises(InvalidStateError, match=r"'w': .*quantised"):
        cloudckpt.save({"w": ShardedTensor(local, (6, 4))}, tmp_path / "c")


def test_numpy_ints_lists_and_sizes_are_ints(tmp_path: Path):
    pieces = [Piece([0, 0], np.array([0, 0]), torch.Size([6, 4]))]
    tensor = ShardedTensor(WHOLE, np.array([6, 4]), pieces, np.int32(3))  # type: ignore[arg-type]
    cloudckpt.save({"w": tensor}, tmp_path / "c")
    assert torch.equal(cloudckpt.read(tmp_path / "c")["w"], WHOLE)


def test_targets_that_cannot_be_filled(tmp_path: Path):
    cloudckpt.save({"w": WHOLE}, tmp_path / "c")
    with pytest.raises(InvalidStateError, match="'w': elements of the target share memory"):
        cloudckpt.load({"w": ShardedTensor(torch.zeros(1, 4).expand(6, 4), (6, 4))}, tmp_path / "c")


def test_tied_shards_are_stored_once(tmp_path: Path):
    local = swapped()
    state = {name: ShardedTensor(local, (6, 4), SWAPPED) for name in ("a", "b")}
    commit = cloudckpt.save(state, tmp_path / "c")
    assert commit.nbytes < 2 * 24 * 4
    found = cloudckpt.read(tmp_path / "c")
    assert found["a"] is found["b"]
