"""fsspec/filesystem_spec#835: stores, threads, helpers and buffers that were made before a fork work in the child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.field.places import Place

LIMIT_S = 20

SCRIPT = """
import json, os, sys, threading, warnings
import torch
import cloudckpt

url, options, engine, executor, running = json.loads(sys.argv[1])
config = cloudckpt.Config(engine=engine)
state = {"w": torch.arange(1000.0)}
if running != "first":
    cloudckpt.save(state, url + "/parent", storage_options=options, config=config)
pending = cloudckpt.async_save(state, url + "/before", storage_options=options, config=config, executor=executor)
if running == "idle":
    pending.result()
warnings.simplefilter("ignore")  # Python says of every fork in a process with threads that it may lock up
pid = os.fork()
if pid == 0:
    state["w"] += 1
    cloudckpt.save(state, url + "/child", storage_options=options, config=config)
    later = cloudckpt.async_save(state, url + "/later", storage_options=options, config=config, executor=executor)
    state["w"] += 1
    later.result()
    target = {"w": torch.zeros(1000)}
    cloudckpt.load(target, url + "/later", storage_options=options, config=config)
    os._exit(0 if target["w"][1] == 2 else 9)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
pending.result()
cloudckpt.async_save(state, url + "/after", storage_options=options, config=config, executor=executor).result()
"""


ALL = [(executor, running) for executor in ("thread", "process") for running in ("idle", "running", "first")]


def is_long(place: str, executor: str, running: str) -> bool:
    """What a helper does is the same for every store, since it opens its own after the fork."""
    return executor == "process" and (place, running) not in {
        ("local", "idle"),
        ("local", "first"),
        ("juicefs", "running"),
    }


# "first": the save that goes on is what imports the store's client, and more.
@pytest.mark.parametrize(
    ("place", "executor", "running"),
    [
        pytest.param(place, *case, marks=pytest.mark.long if is_long(place, *case) else (), id="-".join([place, *case]))
        for place in ("local", "juicefs", "juicefs-fsspec")
        for case in ALL
    ],
    indirect=["place"],
)
def test_a_forked_child(place: Place, executor: str, running: str):
    import json

    arguments = json.dumps([place.root, dict(place.options or {}), place.engine, executor, running])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], timeout=5 * LIMIT_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, first in (("parent", 0.0), ("before", 0.0), ("child", 1.0), ("later", 1.0), ("after", 0.0)):
        if (name, running) != ("parent", "first"):
            assert place.read(name)["w"][0] == first


IMPORTING = """
import importlib, os, signal, sys, threading
import cloudckpt

sys.path.insert(0, sys.argv[1])
thread = threading.Thread(target=importlib.import_module, args=("slow",))
thread.start()
while "slow" not in sys.modules:
    pass
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    import slow
    os._exit(0 if slow.is_whole else 9)
_, status = os.waitpid(pid, 0)
thread.join()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_waits_for_imports(tmp_path: Path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\nis_whole = True\n")
    done = subprocess.run([sys.executable, "-c", IMPORTING, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 0
