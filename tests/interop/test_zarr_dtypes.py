"""The data types that zarr lacks."""

import math

import numpy as np
import pytest
import tensorstore
import zarr

from cloudckpt.format.dtypes import DTYPES, fill_value
from cloudckpt.interop.zarr_dtypes import ALL, BFloat16, Float8E8M0FNU

KINDS = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind._zarr_v3_name)


@KINDS
def test_arrays_of_it_can_be_made_and_read_by_others(tmp_path, kind):
    values = np.array([1.0, 2.0, 0.5, 4.0], dtype=kind._native())
    made = zarr.create_array(tmp_path, shape=(4,), chunks=(3,), dtype=kind(), compressors=None)
    made[:] = values
    again = zarr.open_array(tmp_path, mode="r")
    assert again.dtype == values.dtype
    assert again[...].tobytes() == values.tobytes()
    if kind is Float8E8M0FNU:  # TensorStore has no such type
        return
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path)}}
    assert tensorstore.open(spec).result().read().result().tobytes() == values.tobytes()


@KINDS
def test_zarr_finds_it_by_the_numpy_type(kind):
    assert zarr.dtype.parse_dtype(kind._native(), zarr_format=3) == kind()


@KINDS
def test_fill_values(kind):
    made = kind()
    assert made.default_scalar().tobytes() == bytes(made.item_size)
    ours = fill_value(DTYPES[kind._zarr_v3_name])
    assert made.from_json_scalar(ours, zarr_format=3).tobytes() == bytes(made.item_size)
    for value in (0.5, 1.0, math.nan):
        scalar = made.cast_scalar(value)
        text = made.to_json_scalar(scalar, zarr_format=3)
        assert made.from_json_scalar(text, zarr_format=3).tobytes() == scalar.tobytes()


def test_infinities_and_nans_of_bfloat16():
    kind = BFloat16()
    assert kind.to_json_scalar(kind.cast_scalar(-math.inf), zarr_format=3) == "-Infinity"
    assert kind.from_json_scalar("Infinity", zarr_format=3) == math.inf
    assert math.isnan(kind.from_json_scalar("NaN", zarr_format=3))
    signalling = kind.from_json_scalar("0xffa1", zarr_format=3)
    assert kind.to_json_scalar(signalling, zarr_format=3) == "0xffa1"


def test_what_is_refused():
    kind = BFloat16()
    with pytest.raises(ValueError, match="too long"):
        kind.from_json_scalar("0x10000", zarr_format=3)
    with pytest.raises(TypeError):
        kind.from_json_scalar("one", zarr_format=3)
    with pytest.raises(ValueError, match="version 2"):
        kind.to_json(2)
    with pytest.raises(ValueError, match="big-endian"):
        BFloat16(endianness="big").to_native_dtype()
