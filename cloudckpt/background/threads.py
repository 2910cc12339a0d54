"""Saves in threads of the training process."""

from __future__ import annotations

import threading

from cloudckpt.background.job import Job, run_job
from cloudckpt.background.pending import Running
from cloudckpt.pytorch.arena import Arena
from cloudckpt.pytorch.group import Group


class ThreadExecutor:
    """One thread for each save. With ``ranks``, saves are in turn: they are rounds over one and the same group.

    ``submit`` raises RuntimeError where the system has no more threads, or the interpreter is ending.
    """

    def __init__(self) -> None:
        self._turn: threading.Thread | None = None

    def submit(self, job: Job, running: Running, *, arena: Arena | None = None, ranks: Group | None = None) -> None:  # noqa: ARG002  # memory is memory here
        before = self._turn if ranks is not None else None
        thread = threading.Thread(
            target=_run, args=(job, running, ranks, before), name=f"cloudckpt-save-{job.url}", daemon=False
        )
        thread.start()
        if ranks is not None:
            self._turn = thread


def _run(job: Job, running: Running, ranks: Group | None, before: threading.Thread | None) -> None:
    try:
        if before is not None:
            before.join()
        commit = run_job(job, ranks, running.note)
    except BaseException as error:  # noqa: BLE001  # handed to whoever waits for the result
        running.fail(error)
    else:
        running.succeed(commit)
