"""Runs an example within a process that has more to do."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_here(name: str, *arguments: str) -> str:
    """What it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", [name, *arguments]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def run_in_rank(name: str, *arguments: str) -> str:
    """In a rank of a pool, whose process group is there already, and stays."""
    import torch.distributed as dist

    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        return run_here(name, *arguments)
