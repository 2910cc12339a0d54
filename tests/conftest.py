"""Servers shared by all tests of one process; each starts when a test first asks for it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.field.places import Place
from tests.ranks import RankPool
from tests.recipes.kills import Zygote
from tests.servers.juicefs import start_juicefs
from tests.servers.moto import start_moto
from tests.servers.process import S3Server

# The machines that run this are slow at times; a test says what is right, not how fast.
settings.register_profile("cloudckpt", deadline=None)
settings.load_profile("cloudckpt")


@pytest.fixture(scope="session")
def juicefs_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = start_juicefs(tmp_path_factory.mktemp("juicefs"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def moto_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = start_moto(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


@pytest.fixture(params=["local", "juicefs", "juicefs-fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty root on every kind of store; a test may ask for others by ``indirect`` parameters."""
    server, _, engine = request.param.partition("-")
    if server == "local":
        return Place(str(tmp_path / "run"))
    running: S3Server = request.getfixturevalue(f"{server}_s3")
    bucket = running.make_bucket(f"place-{secrets.token_hex(4)}")
    return Place(f"s3://{bucket}/run", running.storage_options, engine or "auto")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real processes for ``ranks.run(n, function, *args)``; they are kept for all tests."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def accelerated_ranks() -> Iterator[RankPool]:
    """Ranks on the pretend accelerator; processes of their own, since a device cannot be taken away again."""
    from torch.utils import backend_registration

    from tests import pretend_group

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of torch takes no device from Python")
    pool = RankPool(pretend_group.BACKEND, pretend_group.install)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """``zygote.run([(function, *args), ...])`` calls functions in new processes, which may be killed."""
    started = Zygote()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests see none of the AWS settings that the machine may have."""
    import os

    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    nothing = tmp_path_factory.getbasetemp() / "no-such-file"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(nothing))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nothing))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
