"""ByteDance-Seed/VeOmni#1162: the error of a last async save that nobody awaits is not lost with the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cloudckpt
from cloudckpt.errors import NotFoundError

SCRIPT = """
import sys
import torch
import cloudckpt

url, executor, fails = sys.argv[1:]
if fails == "yes":
    url = "/dev/null/run"  # no folder, and never one
cloudckpt.async_save({"w": torch.ones(1000)}, url, executor=executor)
"""


# That a healthy save is finished is asserted by background/test_exit.py, too.
@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("fails", [pytest.param("no", marks=pytest.mark.long), "yes"])
def test_a_single_save_and_the_end_of_the_process(tmp_path: Path, executor: str, fails: str):
    url = str(tmp_path / "a")
    command = [sys.executable, "-c", SCRIPT, url, executor, fails]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if fails == "yes":
        assert done.returncode == 1
        assert "the background save to /dev/null/run failed: " in done.stderr
        assert "StoreError" in done.stderr
        with pytest.raises(NotFoundError):
            cloudckpt.read(url)
    else:
        assert done.returncode == 0, done.stderr
        assert cloudckpt.read(url)["w"].tolist() == [1.0] * 1000
