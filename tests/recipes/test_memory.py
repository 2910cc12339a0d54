"""Host memory beyond the tensors stays within ``Config.memory_bytes``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers.process import S3Server

MIB = 1024 * 1024
BUDGET = 48 * MIB
ALLOWANCE = 40 * MIB
"""Threads, connections, the allocator's slack: all that does not grow with the state, which is 192 MiB."""


@pytest.mark.parametrize(
    ("place", "engine", "layout", "compression"),
    [
        ("s3", "auto", "packed", None),
        ("s3", "auto", "zarr", None),
        ("s3", "auto", "packed", "zstd"),
        ("s3", "fsspec", "packed", None),
        ("local", "auto", "packed", None),
    ],
)
def test_extra_memory_is_bounded(
    place: str, engine: str, layout: str, compression: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url, options = str(tmp_path), None
    if place == "s3":
        server: S3Server = request.getfixturevalue("juicefs_s3")
        bucket = server.make_bucket(f"memory-{engine}-{layout}-{compression}".lower())
        url, options = f"s3://{bucket}/{engine}-{layout}-{compression}", server.storage_options
    order = {
        "url": url,
        "storage_options": options,
        "engine": engine,
        "layout": layout,
        "compression": compression,
        "memory_bytes": BUDGET,
    }
    command = [sys.executable, "-m", "tests.recipes.memory_job", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    extra: dict[str, Any] = json.loads(done.stdout)
    assert extra["right"]
    assert extra["save"] <= BUDGET + ALLOWANCE, extra
    assert extra["load"] <= BUDGET + ALLOWANCE, extra
