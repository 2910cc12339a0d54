"""fsspec/s3fs#838: a delete that fails for some keys is reported as a success."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cloudckpt import Checkpointer, Config
from cloudckpt.cli import main
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3

STATE: dict[str, Any] = {"w": torch.arange(2000.0)}
SMALL = Config(pack_bytes=4000, chunk_bytes=4000)


@pytest.fixture
def s3() -> Iterator[FaultyS3]:
    with faulty_s3() as server:
        yield server


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_a_key_that_cannot_be_deleted_is_named_and_tried_again(s3: FaultyS3, engine: str):
    config = Config(engine=engine, pack_bytes=4000, chunk_bytes=4000, retry_deadline_s=1.0)
    run = Checkpointer("s3://bkt/run", storage_options=s3.storage_options, config=config, keep_last=1)
    run.save(1, STATE)
    run._upkeep.wait()
    packs = sorted(key.removeprefix("run/") for key in s3.objects if key.endswith(".zip"))
    assert len(packs) >= 2
    s3.faults.append(Fault("status", "DELETE", packs[1], times=ALWAYS, status=403, code="AccessDenied"))
    run.save(2, STATE)
    run._upkeep.wait()
    # The manifest went first: it is no step any more, and all the rest of it is gone.
    assert run.steps() == [2]
    assert [key.removeprefix("run/") for key in s3.objects if "step-00000001" in key] == [packs[1]]
    with pytest.warns(UserWarning, match=rf"{packs[1]} could not be deleted.*(AccessDenied|Forbidden|denied)"):
        assert run.prune() == []
    s3.faults.clear()
    run.prune()
    assert not [key for key in s3.objects if "step-00000001" in key]
    run._upkeep.take_complaints()
    run.close()


def test_the_command_line_says_so_too(s3: FaultyS3, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    with Checkpointer("s3://bkt/run", storage_options=s3.storage_options, config=SMALL) as run:
        run.save(1, STATE)
        run.save(2, STATE)
    for name, value in (("ACCESS_KEY_ID", "test-key"), ("SECRET_ACCESS_KEY", "test-secret")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    pack = next(key for key in sorted(s3.objects) if key.endswith(".zip"))
    s3.faults.append(Fault("status", "DELETE", pack, times=ALWAYS, status=403, code="AccessDenied"))
    assert main(["prune", "s3://bkt/run", "--keep-last", "1"]) == 1
    shown = capsys.readouterr()
    assert "removed from s3://bkt/run: steps: 1;" in shown.out
    assert f"{pack.removeprefix('run/')} could not be deleted" in shown.err
