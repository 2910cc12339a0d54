import json

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch

from cloudckpt.errors import FormatError
from cloudckpt.format import dtypes

TORCH = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# The plain numpy type whose buffer torch can take over, byte for byte.
CARRIER = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def test_every_torch_dtype_is_known_or_refused_on_purpose():
    assert set(dtypes.DTYPES) | dtypes.QUANTISED == set(TORCH)
    assert not set(dtypes.DTYPES) & dtypes.QUANTISED


@pytest.mark.parametrize("name", sorted(dtypes.DTYPES))
def test_itemsize_is_torchs(name):
    dtype = dtypes.dtype(name)
    assert dtype.name == name
    assert dtype.itemsize == TORCH[name].itemsize
    assert dtype.numpy is None or dtype.numpy.itemsize == dtype.itemsize
    assert (dtype.numpy is None) == (dtype.zarr_name is None)


@pytest.mark.parametrize("name", sorted(n for n, d in dtypes.DTYPES.items() if d.numpy is not None))
def test_numpy_view_means_the_same_as_torch(name):
    values = [1.0, 0.0, 2.0, 1.0, 0.5] if "float" in name or "complex" in name else [1, 0, 1]
    if name == "float8_e8m0fnu":
        values = [1.0, 2.0, 0.5, 1024.0]
    tensor = torch.tensor(values, dtype=torch.float64).to(TORCH[name])
    viewed = np.frombuffer(bytes(tensor.view(torch.uint8).tolist()), dtypes.dtype(name).numpy)
    assert viewed.astype(np.complex128).tolist() == [complex(value) for value in values]


def test_unknown_and_quantised_names_are_format_errors():
    for name in ("float7", "qint8", "", None, []):
        with pytest.raises(FormatError, match="unknown data type"):
            dtypes.dtype(name)


def test_raw_types_are_stored_as_bytes():
    raw = {name: dtype for name, dtype in dtypes.DTYPES.items() if dtype.zarr_name is None}
    assert {dtype.stored_name for dtype in raw.values()} == {"uint8"}
    assert {name: dtype.trailing for name, dtype in raw.items() if dtype.trailing} == {
        "complex32": (4,),
        "bits16": (2,),
    }
    assert dtypes.dtype("float64").trailing == dtypes.dtype("bool").trailing == ()


@pytest.mark.parametrize("name", sorted(dtypes.DTYPES))
def test_tensorstore_opens_every_type_and_its_fill_value_is_all_zero_bits(name, tmp_path):
    dtype = dtypes.dtype(name)
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3, *dtype.trailing],
        "data_type": dtype.stored_name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, *dtype.trailing]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": dtypes.fill_value(dtype),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    array = tensorstore.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/"}, open=True).result()
    read = array.read().result()
    assert read.tobytes() == bytes(3 * dtype.itemsize)
    if dtype.numpy is not None:
        assert read.dtype == dtype.numpy


@pytest.mark.parametrize("name", sorted(n for n, d in dtypes.DTYPES.items() if d.numpy is not None))
def test_from_numpy_finds_its_own(name):
    dtype = dtypes.dtype(name)
    assert dtypes.from_numpy(dtype.numpy) == dtype
    assert dtypes.numpy_dtype(dtypes.numpy_name(dtype.numpy)) == dtype.numpy


def test_from_numpy_knows_a_type_by_what_it_is():
    assert dtypes.from_numpy(np.dtype("longlong")) == dtypes.dtype("int64")
    for dtype in (">f4", "S3", "U2", "M8[s]", "V4", "O", "longdouble", "clongdouble", [("a", "f4")], "T"):
        assert dtypes.from_numpy(np.dtype(dtype)) is None
    # torch's int4 is another type than this one: it has no arithmetic and no numpy view.
    assert dtypes.from_numpy(np.dtype(ml_dtypes.int4)) is None
    assert dtypes.from_numpy(np.dtype(ml_dtypes.float8_e3m4)) is None


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.dtype(">f4"), ">f4"),
        (np.dtype("S3"), "|S3"),
        (np.dtype("U2"), "<U2"),
        (np.dtype("M8[25s]"), "<M8[25s]"),
        (np.dtype("m8"), "<m8"),
        (np.dtype("V4"), "|V4"),
        (np.dtype(ml_dtypes.int4), "int4"),
        (np.dtype(ml_dtypes.float8_e3m4), "float8_e3m4"),
        (np.dtype("O"), None),
        (np.dtype("longdouble"), None),
        (np.dtype("clongdouble"), None),
        (np.dtype([("a", "f4")]), None),
        (np.dtype(("f4", 2)), None),
        (np.dtype("f4", metadata={"a": 1}), None),
        (np.dtype("T"), None),
    ],
    ids=repr,
)
def test_numpy_names_are_exact_or_refused(dtype, name):
    assert dtypes.numpy_name(dtype) == name
    if name is not None:
        assert dtypes.numpy_dtype(name) == dtype


@pytest.mark.parametrize(
    "name",
    [
        "",
        "float32",
        "f4",
        "<f4,<f4",
        "|O",
        "<f16",
        "V",
        "<M8[parsec]",
        "<M8[s",
        "S999999999",
        "finfo",
        "_np",
        "<i3",
        "|V-1",
        "|b2",
        "\0",
        "O8",
    ],
)
def test_unknown_numpy_names_are_format_errors(name):
    with pytest.raises(FormatError, match="unknown numpy data type"):
        dtypes.numpy_dtype(name)
