"""Places to save to, for all field tests."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.field.places import Place
from tests.servers.process import S3Server


@pytest.fixture(params=["local", "juicefs", "juicefs-fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty root on every kind of store; a test may ask for others by ``indirect`` parameters."""
    server, _, engine = request.param.partition("-")
    if server == "local":
        return Place(str(tmp_path / "run"))
    running: S3Server = request.getfixturevalue(f"{server}_s3")
    bucket = running.make_bucket(f"field-{secrets.token_hex(4)}")
    return Place(f"s3://{bucket}/run", running.storage_options, engine or "auto")
