"""``cloudckpt copy`` and ``cloudckpt migrate``."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.cli import main
from cloudckpt.plan import migrations
from tests.servers.process import S3Server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        state = {"model": {"w": torch.arange(6.0) + step}, "n": step}
        cloudckpt.save(state, tmp_path / f"run/step-{step}", step=step, model_version="1")
    return tmp_path / "run"


def test_copy(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dst = tmp_path / "dst"
    assert main(["copy", str(run), str(dst)]) == 0
    assert capsys.readouterr().out.startswith(f"copied steps 1, 2 to {dst}: 2 objects, ")
    assert main(["copy", str(run), str(dst)]) == 0
    assert capsys.readouterr().out == f"there already: steps 1, 2 at {dst}\n"
    (dst / "step-2/manifest.json").unlink()
    assert main(["copy", str(run), str(dst), "--trust-sizes"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"copied step 2 to {dst}: 0 objects, 0 B sent, ")
    assert first.endswith(" were there")
    assert second == f"there already: step 1 at {dst}"
    (next((dst / "step-1").glob("*/*.zip"))).unlink()
    assert main(["copy", str(run), str(dst)]) == 0
    assert f"there already: steps 1, 2 at {dst}, lacked 1 objects, " in capsys.readouterr().out


def test_copy_of_a_checkpoint_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cloudckpt.save({"x": torch.zeros(1)}, tmp_path / "a")
    assert main(["copy", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith("copied a checkpoint to ")


def test_copy_that_cannot_be(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["copy", str(run / "step-1"), str(run / "step-2")]) == 1
    assert "already holds another checkpoint" in capsys.readouterr().err
    assert main(["copy", str(run / "step-1"), str(run / "step-2"), "--overwrite"]) == 0
    assert cloudckpt.read(run / "step-2")["n"] == 1
    with pytest.raises(SystemExit, match="2"):
        main(["copy", str(run)])
    with pytest.raises(SystemExit, match="2"):
        main(["copy", str(run), "x", "--dst-options", "{"])


def test_copy_to_s3_and_back(run: Path, tmp_path: Path, juicefs_s3: S3Server):
    there = f"s3://{juicefs_s3.make_bucket(f'cli-{secrets.token_hex(4)}')}/run"
    options = json.dumps(juicefs_s3.storage_options)
    assert main(["copy", str(run), there, "--dst-options", options]) == 0
    assert main(["copy", f"{there}/step-2", str(tmp_path / "back"), "--src-options", options]) == 0
    assert cloudckpt.read(tmp_path / "back")["n"] == 2


MODULE = """
import cloudckpt

@cloudckpt.migration("1", "2")
def rules():
    return [("model.{r:*}", "net.{r}")]
"""


def test_migrate_as_a_program(run: Path, tmp_path: Path):
    (tmp_path / "my_migrations.py").write_text(MODULE)
    command = [sys.executable, "-m", "cloudckpt", "migrate", "run/step-2", "new", "--module", "my_migrations"]
    package = str(Path(cloudckpt.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "--to", "2", "--rename", "n=step", "--cast", "*=bfloat16"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {tmp_path / 'new'}: 1 chunks, ")
    found = cloudckpt.read(tmp_path / "new", model_version="2")
    assert found["step"] == 2
    assert found["net"]["w"].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert found["net"]["w"].dtype == torch.bfloat16


def test_migrate_that_cannot_be(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(migrations, "_registered", {})
    src, dst = str(run / "step-1"), str(tmp_path / "dst")
    assert main(["migrate", src, dst, "--to", "2"]) == 1
    assert "holds model version '1', and version '2' is asked for" in capsys.readouterr().err
    assert main(["migrate", src, dst, "--module", "no_such_module"]) == 1
    assert "cannot import --module no_such_module: No module named" in capsys.readouterr().err
    assert main(["migrate", src, dst, "--rename", "x=y"]) == 1
    assert "rename rule ('x', 'y') matches nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["migrate", src, dst, "--rename", "x"])
    assert "'x' is not of the form A=B" in capsys.readouterr().err
    assert not Path(dst).exists()
