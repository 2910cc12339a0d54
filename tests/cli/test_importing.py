"""``cloudckpt import hf``; other formats have the same options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cloudckpt
from cloudckpt.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"model.w": torch.arange(6.0), "n": torch.tensor(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_import(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dst = tmp_path / "run/step-00000007"
    options = ["--step", "7", "--rename", "model.{n}={n}", "--cast", "w=bfloat16", "--layout", "zarr"]
    assert main(["import", "hf", str(model), str(dst), *options]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {dst}: 2 chunks, ")
    state = cloudckpt.read(dst)
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in state.items()} == {
        "w": (torch.bfloat16, [0, 1, 2, 3, 4, 5]),
        "n": (torch.int64, 3),
    }
    with cloudckpt.open_checkpoint(dst) as checkpoint:
        assert checkpoint.step == 7
        assert checkpoint.manifest.document.metadata == {"safetensors": {"format": "pt"}}
        assert checkpoint.manifest.document.layout == "zarr"
    assert main(["import", "hf", str(model / "model.safetensors"), str(dst)]) == 1
    assert "already holds a committed checkpoint" in capsys.readouterr().err
    assert main(["import", "hf", str(model / "model.safetensors"), str(dst), "--overwrite"]) == 0
    assert cloudckpt.read(dst).keys() == {"model.w", "n"}


def test_what_cannot_be_imported(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["import", "hf", str(tmp_path / "none"), str(tmp_path / "c")]) == 1
    assert "none holds no safetensors files" in capsys.readouterr().err
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    assert main(["import", "hf", str(model), str(tmp_path / "c")]) == 1
    assert "not a safetensors file: its header would be" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["import", "gguf", str(model), str(tmp_path / "c")])
    assert not (tmp_path / "c").exists()


@pytest.mark.long
def test_under_torchrun(tmp_path: Path):
    """Every process writes a part, one speaks."""
    tensors = {name: torch.rand(2 * 1024, 1024) for name in "abc"}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model/model.safetensors")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launcher, "-m", "cloudckpt", "import", "hf", str(tmp_path / "model"), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    with cloudckpt.open_checkpoint(tmp_path / "c") as checkpoint:
        assert {entry.rank for entry in checkpoint.manifest.objects} == {0, 1}
    state = cloudckpt.read(tmp_path / "c")
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
