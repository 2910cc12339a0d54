"""Every example runs, and proves what it says. `make demo` runs the one that is not here.

As processes of their own, as a reader runs them, in the long tests; else in processes that have imported torch already,
which takes a tenth of the time. tests/integrations has those that need no ranks.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.within import EXAMPLES, run_in_rank
from tests.ranks import RankPool

pytestmark = pytest.mark.timeout(600)  # many interpreters are started one after the other

ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(EXAMPLES.parent)}


def skip_without(module: str | None) -> None:
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


def run(name: str, *arguments: str, ranks: int | None = None, needs: str | None = None) -> str:
    """What an example prints, in one process, or under torchrun in ``ranks`` of them."""
    skip_without(needs)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    process = subprocess.Popen(
        [sys.executable, *torchrun, str(EXAMPLES / name), *arguments],
        env=os.environ | ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that nothing of it outlives a test that is cut off
    )
    try:
        out, err = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, out + err
    return out


@pytest.mark.parametrize(("name", "needs"), [("ddp", None), ("fsdp2", None), ("titan", "torchtitan")], ids=str)
def test_in_ranks(ranks: RankPool, tmp_path: Path, name: str, needs: str | None):
    skip_without(needs)
    told, _ = ranks.run(2, run_in_rank, f"{name}.py", str(tmp_path))
    assert "resumed at step 11; losses" in told


def test_elastic(tmp_path: Path):
    assert "every sample in its turn" in run("elastic.py", str(tmp_path), "--workers", "2", "1")


@pytest.mark.long
def test_elastic_with_4_workers(tmp_path: Path):
    assert "4 -> 2 workers" in run("elastic.py", str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "needs", "told"),
    [
        ("ddp.py", 2, None, "losses equal"),
        ("titan.py", 2, "torchtitan", "losses equal"),
        ("lightning_trainer.py", None, "lightning", "weights equal"),
        ("lightning_sharded.py", 2, "lightning", "shards equal"),
        ("transformers_trainer.py", None, "transformers", "weights equal"),
        ("transformers_trainer.py", 2, "transformers", "weights equal"),
        ("accelerate_loop.py", None, "accelerate", "losses equal"),
        ("accelerate_loop.py", 2, "accelerate", "losses equal"),
    ],
    ids=str,
)
def test_as_processes(tmp_path: Path, name: str, ranks: int | None, needs: str | None, told: str):
    assert told in run(name, str(tmp_path), ranks=ranks, needs=needs)


@pytest.mark.long
def test_fsdp2_goes_on_with_another_number_of_ranks(tmp_path: Path):
    assert "resumed at step 11" in run("fsdp2.py", str(tmp_path), ranks=2)
    assert "resumed at step 21" in run("fsdp2.py", str(tmp_path), "--last-step", "30", ranks=1)
