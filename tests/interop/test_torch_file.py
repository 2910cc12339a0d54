"""Files of ``torch.save``: any layout of tensors, plain values of any type, and those that are refused."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import os
import pathlib
import struct
import sys
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.config import Config
from cloudckpt.errors import FormatError, InvalidStateError, NotFoundError
from cloudckpt.interop.foreign import Foreign, Origin
from cloudckpt.interop.strided import MAX_RUNS, is_c_order, runs
from cloudckpt.interop.torch_archive_writer import frame
from cloudckpt.interop.torch_file import open_torch
from cloudckpt.store.local import LocalStore


def opened(path: Path, **options: Any) -> Foreign:
    return open_torch(Origin(LocalStore(str(path.parent)), path.name, Config(), **options))


def tree_of(value: Any, tmp_path: Path, **options: Any) -> Any:
    torch.save(value, tmp_path / "x.pt")
    return opened(tmp_path / "x.pt", **options).manifest.document.tree


@given(st.data())
def test_strided_tensors_as_runs(data: st.DataObject):
    """The elements of the runs, each at its place in the tensor, are those that torch sees there."""
    memory = torch.arange(data.draw(st.integers(1, 60)))
    dims = data.draw(st.integers(0, 4))
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(dims))
    strides = tuple(data.draw(st.integers(0, 12)) for _ in range(dims))
    first = data.draw(st.integers(0, 20))
    last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if last >= len(memory):
        return
    wanted = memory.as_strided(shape, strides, first)
    found = torch.full(shape, -1)
    pieces = runs(shape, strides, first, len(memory))
    assert pieces is not None
    for run in pieces:
        size = int(np.prod(run.shape, dtype=int))
        assert 0 <= run.first <= run.first + size <= len(memory)
        array = memory[run.first : run.first + size].reshape(run.shape)
        extents = [1 if d is None else run.box.shape[d] for d in run.dims]
        cut = array[tuple(slice(s, s + n) for s, n in zip(run.start, extents, strict=True))]
        kept = [d for d in run.dims if d is not None]
        cut = cut.reshape([run.box.shape[d] for d in kept])
        cut = cut.permute([kept.index(d) for d in sorted(kept)]) if kept else cut
        found[run.box.slices] = cut.reshape(run.box.shape)
    assert found.equal(wanted)
    if is_c_order(shape, strides):
        assert len(pieces) == 1


def test_too_many_runs():
    assert runs((MAX_RUNS + 1, 2), (0, 1), 0, 2) is None


PLAIN: dict[str, Any] = {
    "ints": {1: 2, -3: 2**70},
    "none": None,
    "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
    "sets": ({1, 2}, frozenset(["a"])),
    "ordered": collections.OrderedDict(b=1, a=2),
    "default": collections.defaultdict(list, {1: [2]}),
    "counter": collections.Counter("aab"),
    "deque": collections.deque([1, 2], 3),
    "namespace": argparse.Namespace(a=1, b=[None]),
    "times": [dt.datetime(2020, 1, 2, 3, tzinfo=dt.UTC), dt.date(2020, 1, 2), dt.time(1, 2), dt.timedelta(1, 2, 3)],
    "paths": [Path("a/b"), pathlib.PurePosixPath("x")],
    "numbers": [decimal.Decimal("1.50"), fractions.Fraction(1, 3), 1 + 2j, float("inf"), range(3), slice(1, None, 2)],
    "uuid": uuid.UUID(int=5),
    "torch": [torch.bfloat16, torch.Size([2, 3]), torch.device("cuda:1"), torch.strided],
    "numpy": [np.float32(1.5), np.bool_(True), np.dtype("<f4"), np.int64(-1)],
    "keys": {(1, "a"): 1, None: 2, 1.5: 3, b"k": 4},
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values(tmp_path: Path, name: str):
    from cloudckpt.format import values

    found = values.decode(tree_of(PLAIN, tmp_path))[name]
    assert found == PLAIN[name]
    assert type(found) is type(PLAIN[name])


def test_what_is_no_dict(tmp_path: Path):
    assert tree_of(torch.ones(2), tmp_path)["data"]["$"] == "tensor"
    assert tree_of([1, 2], tmp_path) == {"data": [1, 2]}


class Module(torch.nn.Module):
    pass


class Executes:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Module(), r"all of it: tests\.interop\.test_torch_file\.Module"),
        ({"a": {"b": [1, Module()]}}, r"a\.b\.1: tests\.interop\.test_torch_file\.Module"),
        ({"a": torch.ones(2).to_sparse()}, r"a: no plain tensor but what torch\._utils\._rebuild_sparse_tensor makes"),
        ({"a": torch.empty(2, device="meta")}, r"a: no plain tensor but what torch\._utils\._rebuild_meta_tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64).conj()}, r"a: a tensor with a pending conj"),
        ({"a": np.arange(3)}, r"a: numpy\._?core\.multiarray\._reconstruct"),
        ({"a": torch.nn.functional.relu}, r"a: torch\.nn\.functional\.relu, which is malformed \(a class or function"),
    ],
)
def test_what_only_code_can_make(tmp_path: Path, value: Any, says: str):
    with pytest.raises(FormatError, match=says):
        tree_of(value, tmp_path)


def test_nothing_is_executed(tmp_path: Path):
    target = tmp_path / "made"
    with pytest.raises(FormatError, match=r"x: posix\.mkdir"):
        tree_of({"x": Executes(str(target))}, tmp_path)
    assert not target.exists()
    assert tree_of({"x": Executes(str(target))}, tmp_path, allow_pickle=True)["x"]["$"] != "tensor"
    assert target.exists()


class Loud(torch.Tensor):
    """A subclass with attributes, which torch writes as a call of its own."""


def test_subclasses_and_parameters(tmp_path: Path):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "x"
    assert tree_of({"a": parameter, "b": torch.nn.Buffer(torch.ones(1))}, tmp_path)["a"]["$"] == "tensor"
    with pytest.raises(FormatError, match=r"a: a tensor subclass, tests\.interop\.test_torch_file\.Loud"):
        tree_of({"a": torch.ones(2).as_subclass(Loud)}, tmp_path)


def test_packed_anew_by_another_tool(tmp_path: Path):
    """Such as ``zip -0``, whose local headers have 28 bytes of times and owners, which are of no size torch pads to."""
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(10), "b": torch.arange(7.0)}, buffer)
    fields = struct.pack("<2sHBii", b"UT", 9, 3, 1, 1) + struct.pack("<2sHBBIBI", b"ux", 11, 1, 4, 0, 4, 0)
    for length in range(1, 65):  # of the folder's name, which moves all else
        path = tmp_path / "x.pt"
        places = {}
        with zipfile.ZipFile(buffer) as old, path.open("wb") as file, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                info = zipfile.ZipInfo(f"{'x' * length}/{name.partition('/')[2]}")
                info.extra = fields
                new.writestr(info, old.read(name))
                places[info.filename] = file.tell() - len(old.read(name))
        manifest = opened(path).manifest
        for entry, name in zip(manifest.arrays, ("0", "1"), strict=True):
            assert manifest.columns.byte_offset[entry.first_chunk] == places[f"{'x' * length}/data/{name}"], length


def test_other_files(tmp_path: Path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"in the format of torch before 1\.6; write it anew"):
        opened(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x/data.pkl", "x/constants.pkl", "x/version"):
            archive.writestr(name, b"N.")
    with pytest.raises(FormatError, match=r"a TorchScript program.*save its weights by"):
        opened(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"N.")
        archive.writestr("x/byteorder", b"big")
    with pytest.raises(FormatError, match="written on a big-endian machine"):
        opened(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", b"")
    with pytest.raises(FormatError, match=r"not one of torch\.save: it has 0 data\.pkl"):
        opened(path)
    path.write_bytes(b"\x80\x04N.")
    with pytest.raises(FormatError, match="a pickle, which only code can read"):
        opened(path)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match=r"not a file of torch\.save"):
        opened(path)
    with pytest.raises(NotFoundError):
        opened(tmp_path / "none.pt")
    with pytest.raises(InvalidStateError, match=r"name a file of torch\.save, one that ends in \.pt"):
        open_torch(Origin(LocalStore(str(tmp_path)), None, Config()))


@given(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 4000))
def test_damage(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int):
    """Any error is one of ours."""
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(10), "b": [1, "x"]}, buffer)
    data = bytearray(buffer.getvalue())
    for place, value in changes:
        data[place % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(data[: len(data) - cut] if cut % 3 == 0 else data)
    try:
        opened(path)
    except (FormatError, InvalidStateError):
        assert sys.exc_info()[1] is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)])
def test_archives_that_are_written(dtype: torch.dtype, shape: tuple[int, ...]):
    """What an export writes, torch reads; and so does zipfile, checksums included."""
    import zlib

    tensor = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape).to(dtype)
    made = frame(str(dtype).removeprefix("torch."), shape)
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    data = made.front + raw + made.tail(zlib.crc32(raw))
    assert len(data) == made.total_bytes
    assert len(made.front) % 64 == 0
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert found.view(torch.uint8).equal(tensor.view(torch.uint8)) if shape else found.equal(tensor)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
