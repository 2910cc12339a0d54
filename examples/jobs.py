"""The frame of the demo: start its jobs one after the other, compare what they tell, print a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 1024 * 1024

# On another mesh the sums of a matrix product are added up in another order, so that losses differ in the last bits.
CLOSE = 1e-3


@dataclass(frozen=True)
class JobSpec:
    """One job: on which mesh it trains up to which step, and whether it resumes or saves."""

    name: str
    mesh: tuple[int, int]
    last_step: int
    url: str
    folder: str
    resume: bool = False
    save: bool = False

    @classmethod
    def read(cls, path: Path) -> JobSpec:
        fields = json.loads(path.read_text())
        return cls(**fields | {"mesh": tuple(fields["mesh"])})

    @property
    def answer(self) -> Path:
        return Path(self.folder) / f"{self.name}.answer.json"

    def run(self, script: Path) -> dict[str, Any]:
        """Run ``script`` in as many new processes as the mesh has places; what its rank 0 told."""
        path = Path(self.folder) / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self)))
        dp, tp = self.mesh
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={dp * tp}"]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, str(script), "--job", str(path)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\njob {self.name} failed")
        told: dict[str, Any] = json.loads(self.answer.read_text())
        told["losses"] = {int(step): loss for step, loss in told["losses"].items()}
        return told | {"wall_s": time.perf_counter() - began}


@contextmanager
def storage(folder: Path, *, s3: bool) -> Iterator[str]:
    """The URL of an empty place for checkpoints, in ``folder`` or on an S3 server that keeps its data there."""
    if not s3:
        yield f"{folder}/checkpoints"
        return
    sys.path.insert(0, str(REPOSITORY))  # the servers lie with the tests that need them
    from tests.servers.juicefs import start_juicefs

    server = start_juicefs(folder / "s3-server")
    try:
        server.make_bucket("demo")
        # From here on as with any S3 server: its address and keys are in the environment of the jobs.
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint_url
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = server.key, server.secret
        yield "s3://demo/checkpoints"
    finally:
        server.stop()


def run_demo(script: Path, folder: Path, *, num_steps: int, s3: bool) -> int:
    """Run all jobs and print what came out; 0 if every check holds, else 1."""
    if num_steps < 2:
        raise SystemExit("--steps must be at least 2")
    console = Console()
    folder.mkdir(parents=True, exist_ok=True)
    half = num_steps // 2
    with storage(folder, s3=s3) as root:
        url = f"{root}/step-{half:08d}"
        place: dict[str, Any] = {"url": url, "folder": str(folder)}
        specs = [
            JobSpec("uninterrupted", (2, 2), num_steps, **place),
            JobSpec("first-half", (2, 2), half, **place, save=True),
            JobSpec("resumed-2x2", (2, 2), num_steps, **place, resume=True),
            JobSpec("resumed-1x2", (1, 2), num_steps, **place, resume=True),
            JobSpec("resumed-2x1", (2, 1), num_steps, **place, resume=True),
        ]
        console.print(f"checkpoint: {url}" + (f" on {os.environ['AWS_ENDPOINT_URL']}" if s3 else ""))
        told = {}
        for spec in specs:
            dp, tp = spec.mesh
            doing = f"{spec.name}: FSDP {dp} x TP {tp}, {'from the checkpoint' if spec.resume else 'from step 0'}"
            with console.status(f"{doing} to step {spec.last_step} ..."):
                told[spec.name] = spec.run(script)
            console.print(f"[green]ran[/] {doing} to step {spec.last_step} ({told[spec.name]['wall_s']:.1f} s)")

    console.print(transfers(told), losses(told))
    failed = [text for text, holds in checks(told) if not holds]
    for text, holds in checks(told):
        console.print(f"[green]yes[/]  {text}" if holds else f"[red]NO[/]   {text}")
    return 1 if failed else 0


def transfers(told: dict[str, dict[str, Any]]) -> Table:
    """What went to the store and came back."""
    table = Table("job", "did", "step")
    for column in ("MiB", "s", "MB/s", "chunks", "objects", "requests"):
        table.add_column(column, justify="right")
    for name, answer in told.items():
        if save := answer.get("save"):
            counts = [str(save[count]) for count in ("num_chunks", "num_objects", "num_requests")]
            table.add_row(name, "save", str(save["step"]), *speed(save["nbytes"], save["wall_s"]), *counts)
        if load := answer.get("load"):
            transfer = speed(load["bytes_fetched"], sum(load["seconds"].values()))
            table.add_row(name, "load", str(load["step"]), *transfer, "", "", str(load["num_requests"]))
    return table


def speed(nbytes: int, seconds: float) -> list[str]:
    return [f"{nbytes / MIB:.1f}", f"{seconds:.2f}", f"{nbytes / 1e6 / seconds:.0f}"]


def losses(told: dict[str, dict[str, Any]]) -> Table:
    """The loss after each step, one column for each job."""
    table = Table("step", *told)
    for step in told["uninterrupted"]["losses"]:
        row = [answer["losses"].get(step) for answer in told.values()]
        table.add_row(str(step), *("" if loss is None else f"{loss:.6f}" for loss in row))
    return table


def checks(told: dict[str, dict[str, Any]]) -> list[tuple[str, bool]]:
    """What the demo promises, and whether it holds."""
    reference, saved = told["uninterrupted"]["losses"], told["first-half"]["fingerprints"]
    found = []
    for name, mesh in [("resumed-2x2", "(2, 2)"), ("resumed-1x2", "(1, 2)"), ("resumed-2x1", "(2, 1)")]:
        loaded = told[name]["fingerprints"]
        num_equal = sum(loaded.get(tensor) == digest for tensor, digest in saved.items())
        text = f"resumed on {mesh}: {num_equal} of {len(saved)} tensors bit-equal"
        found.append((text, num_equal == len(saved) == len(loaded)))

    resumed = told["resumed-2x2"]["losses"]
    expected = {step: loss for step, loss in reference.items() if step not in told["first-half"]["losses"]}
    found.append((f"loss curve of {len(expected)} steps equal to the uninterrupted run's", resumed == expected))
    for name in ("resumed-1x2", "resumed-2x1"):
        steps = told[name]["losses"].keys()
        gap = max((abs(told[name]["losses"][step] - reference[step]) for step in steps), default=float("inf"))
        found.append((f"loss curve of {name} within {CLOSE} (largest difference {gap:.1e})", gap < CLOSE))
    return found
