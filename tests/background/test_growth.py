"""Two hundred background saves take no more memory, descriptors or threads than fifty."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
NOISE_BYTES = 12 * MIB

SCRIPT = """
import gc, json, os, sys, threading
import torch
import cloudckpt
from cloudckpt import _async

url, executor = sys.argv[1:]
state = {f"w{i}": torch.full((1 << 14,), float(i)) for i in range(32)}
state |= {f"b{i}": torch.zeros(8) for i in range(300)}

def status(pid):
    fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return [int(fields["VmRSS"].split()[0]) * 1024, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"])]

found = []
for number in range(200):
    pending = cloudckpt.async_save(state | {"step": number}, url, executor=executor, overwrite=True)
    pending.result()
    if number in (49, 199):
        gc.collect()
        pids = [os.getpid()]
        if executor == "process":
            pids.append(_async._LANES["process"].executor._helper._process.pid)
        found.append([status(pid) for pid in pids])
print(json.dumps(found))
"""


@pytest.mark.timeout(600)  # 12 s of CPU time, on machines that may have much else to do
@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.long)])
def test_nothing_grows(tmp_path: Path, executor: str):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a"), executor]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    after_50, after_200 = json.loads(done.stdout)
    for early, late in zip(after_50, after_200, strict=True):
        assert late[0] - early[0] < NOISE_BYTES
        assert late[1] <= early[1] + 4
        assert late[2] <= early[2] + 4
