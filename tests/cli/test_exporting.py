"""``cloudckpt export``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cloudckpt
from cloudckpt.cli import main
from tests.safetensors_reader import INDEX, exported

WEIGHTS = {"embed": torch.arange(64.0), "head": torch.ones(50)}


@pytest.fixture
def url(tmp_path: Path) -> str:
    tied = {"embed": WEIGHTS["embed"], "head": WEIGHTS["head"], "tied": WEIGHTS["embed"]}
    cloudckpt.save({"model": tied, "step": 3}, tmp_path / "c")
    return str(tmp_path / "c")


ONLY_MODEL = ["--include", "model", "--rename", "model.{x}={x}"]


def test_export(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dst = tmp_path / "dst"
    (tmp_path / "config.json").write_text("{}")
    arguments = [*ONLY_MODEL, "--dtype", "head=fp16", "--dtype", "bf16", "--files", str(tmp_path / "config.json")]
    assert main(["export", "hf", url, str(dst), *arguments]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"exported 2 tensors to {dst}: model.safetensors, 228 B, ")
    assert out[1:] == ["tied, and written once: tied = embed", "along with it: config.json"]
    found = exported(dst)
    assert found is not None
    assert (found["embed"].dtype, found["head"].dtype) == (torch.bfloat16, torch.float16)

    assert main(["export", "hf", url, str(dst), *ONLY_MODEL]) == 1
    assert "holds another export: model.safetensors; overwrite=True (--overwrite)" in capsys.readouterr().err
    assert main(["export", "hf", url, str(dst), *ONLY_MODEL, "--overwrite", "--max-shard-size", "0.3KB"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"exported 2 tensors to {dst}: 2 files, 456 B, ")
    assert out[-1] == "removed of an earlier export: model.safetensors"
    assert (dst / INDEX).exists()


def test_what_cannot_be_exported_is_told(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", "hf", url, str(tmp_path / "dst")]) == 1
    assert capsys.readouterr().err.endswith(":\n'step': int\n")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("arguments", [["export"], ["export", "onnx", "a", "b"], ["export", "hf", "a"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: cloudckpt export" in capsys.readouterr().err


@pytest.mark.long
def test_processes_of_torchrun_share_the_files(url: str, tmp_path: Path):
    dst = str(tmp_path / "dst")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "cloudckpt", "export", "hf", url, dst, *ONLY_MODEL, "--max-shard-size", "0.3KB"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(cloudckpt.__file__).parents[1])},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("exported 2 tensors") == 1
    found = exported(dst)
    assert found is not None
    assert all(found[key].equal(WEIGHTS[key]) for key in WEIGHTS)
