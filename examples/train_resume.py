"""Train on one mesh, save, stop; resume on that mesh and on two others; show that nothing was lost.

    python examples/train_resume.py          # into a folder
    python examples/train_resume.py --s3     # into an S3 server that it starts itself

``main`` starts five jobs of several processes each, one after the other, and compares what they
report. ``run_job`` is what each process of a job does: a usual training script, in which
``save`` and ``resume`` are all that has to do with checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import JobSpec, run_demo
from llama import Batches, Llama, build_model, warmup_then_cosine
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import cloudckpt


@dataclass
class Training:
    """Everything that must come back for the training to go on as if it had never stopped."""

    mesh: DeviceMesh
    model: Llama
    optimizer: AdamW
    scheduler: LambdaLR
    batches: Batches
    step: int = 0

    @classmethod
    def start(cls, mesh: DeviceMesh) -> Training:
        model = build_model(mesh)
        optimizer = AdamW(model.parameters(), lr=3e-3)
        return cls(mesh, model, optimizer, LambdaLR(optimizer, warmup_then_cosine), Batches())

    def state(self) -> dict[str, Any]:
        """What is saved: DTensors as they lie on this rank, objects with a ``state_dict``, plain values."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "scheduler": self.scheduler,
            "batches": self.batches,
            "step": self.step,
        }

    def save(self, url: str) -> cloudckpt.Commit:
        return cloudckpt.save(self.state(), url, step=self.step)

    def resume(self, url: str) -> cloudckpt.LoadReport:
        # A new state of this job, on this job's mesh, says what to load and where it goes.
        state = self.state()
        report = cloudckpt.load(state, url)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.step = state["step"]
        return report

    def advance(self) -> float:
        """One optimizer step; the loss over the whole batch, the same on all ranks."""
        dp = self.mesh["dp"]
        loss = self.model(*self.batches.draw(dp.get_local_rank(), dp.size()))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        mean = loss.detach() / dp.size()
        dist.all_reduce(mean, group=dp.get_group())
        return float(mean)

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of every whole tensor of model and optimizer, whatever the mesh."""
        state = self.state()
        tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
        for parameter, moments in state["optimizer"]["state"].items():
            tensors |= {f"optimizer.{parameter}.{name}": tensor for name, tensor in moments.items()}
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        return {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in whole.items()}


def run_job(spec: JobSpec) -> dict[str, Any]:
    """What every process of a job does. Returns what the job has to tell."""
    torch.set_num_threads(1)  # the processes of this demo share few cores
    training = Training.start(init_device_mesh("cpu", spec.mesh, mesh_dim_names=("dp", "tp")))
    told: dict[str, Any] = {}
    if spec.resume:
        report = training.resume(spec.url)
        told["load"] = asdict(report)
        told["fingerprints"] = training.fingerprints()

    losses = told["losses"] = {}
    while training.step < spec.last_step:
        loss = training.advance()
        losses[training.step] = loss

    if spec.save:
        began = time.perf_counter()
        commit = training.save(spec.url)
        told["save"] = asdict(commit) | {"wall_s": time.perf_counter() - began}
        told["fingerprints"] = training.fingerprints()
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s3", action="store_true", help="save to an S3 server, started for this run")
    parser.add_argument("--dir", type=Path, help="where everything goes (default: a new folder in demo-run/)")
    parser.add_argument("--steps", type=int, default=20, help="steps of the uninterrupted run (default: 20)")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # a process of a job: its specification
    args = parser.parse_args()
    if args.job is None:
        folder = args.dir or Path("demo-run") / time.strftime("%Y%m%d-%H%M%S")
        return run_demo(Path(__file__), folder.resolve(), num_steps=args.steps, s3=args.s3)

    spec = JobSpec.read(args.job)
    dist.init_process_group("gloo")
    told = run_job(spec)
    if dist.get_rank() == 0:
        spec.answer.write_text(json.dumps(told))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
