"""One set of checkpoints, read by zarr, TensorStore, xarray and dask on every Python that is here.

zarr 3.1 is the newest for Python 3.11. `make test-zarr` makes environments with the newest of all for newer ones.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interop import stock_reader
from tests.interop.shared_set import write_shared_set
from tests.ranks import RankPool
from tests.servers.process import S3Server

NEWER = "CLOUDCKPT_ZARR_PYTHONS"
"""Interpreters with zarr to read with, beside those that `make test-zarr` has made; separated as in PATH."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool, juicefs_s3: S3Server) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    bucket = juicefs_s3.make_bucket(f"shared-{secrets.token_hex(4)}")
    write_shared_set(folder, ranks, f"s3://{bucket}/run", juicefs_s3.storage_options)
    return folder


def newer_pythons() -> list[str]:
    named = os.environ.get(NEWER, "").split(os.pathsep)
    made = sorted(Path(sys.prefix).glob("zarr/*/bin/python"))
    return [*filter(None, named), *map(str, made)]


def read_set(python: str, folder: Path, *flags: str) -> dict[str, Any]:
    command = [python, stock_reader.__file__, str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["faults"] == []
    return found


def num_arrays(folder: Path, **chosen: bool) -> int:
    told = json.loads((folder / "set.json").read_text())
    return sum(len(stock_reader.wanted(checkpoint, **chosen)) for checkpoint in told)


def test_zarr_of_this_python(shared):
    found = read_set(sys.executable, shared)
    assert found["read"]["zarr plain references"] == num_arrays(shared, irregular=False)
    assert found["read"]["zarr references"] == num_arrays(shared, irregular=False, extended=False)
    assert {how for how, number in found["read"].items() if number > 20} == {
        "tensorstore",
        "zarr folder",
        "zarr pack",
        "zarr references",
        "zarr plain references",
        "xarray",
        "dask",
    }


def test_zarr_where_cloudckpt_is_installed(shared):
    """With its data types, which nothing imports there."""
    found = read_set(sys.executable, shared, "--installed")
    assert found["read"]["zarr references"] == num_arrays(shared, irregular=False)


@pytest.mark.parametrize("flags", [(), ("--installed",)], ids=["alone", "with-our-types"])
@pytest.mark.parametrize(
    "python", newer_pythons() or [pytest.param("", marks=pytest.mark.skip(reason="none made: `make test-zarr` does"))]
)
def test_newest_zarr_on_newer_pythons(shared, python, flags):
    """Irregular grids too."""
    found = read_set(python, shared, *flags)
    assert found["zarr"] > "3.2"
    assert found["read"].get("xarray", 0) == (0 if flags else num_arrays(shared, irregular=True))
    assert found["read"]["zarr references"] == num_arrays(shared, irregular=True, extended=bool(flags))
