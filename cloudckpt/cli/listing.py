"""``cloudckpt ls``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cloudckpt.catalog import StepEntry, list_steps
from cloudckpt.cli.text import age, human_bytes, table
from cloudckpt.errors import NotFoundError
from cloudckpt.format.keys import MANIFEST
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve

_HEAD = ("step", "state", "created", "age", "bytes", "referenced", "tensors", "chunks", "ranks")


def list_run(run: str, storage_options: Mapping[str, Any] | None) -> None:
    store = resolve(run, storage_options)
    try:
        now = datetime.now(UTC)
        rows = [_row(entry, now) for entry in list_steps(store)]
        if not rows:
            raise NotFoundError(f"no steps in {store.url}{_hint(store)}")
    finally:
        store.close()
    print(*table(_HEAD, rows, right="0345678"), sep="\n")


def _row(entry: StepEntry, now: datetime) -> list[str]:
    step = str(entry.step)
    if entry.manifest is None:
        state = "not committed" if entry.fault is None else "unreadable"
        return [step, state, "", "", human_bytes(entry.nbytes), "", "", "", ""]
    document = entry.manifest.document
    return [
        step,
        "committed",
        document.created,
        age(document.created, now),
        human_bytes(entry.nbytes),
        human_bytes(entry.nbytes_referenced),
        str(len(document.arrays)),
        str(document.chunks.count),
        str(document.world_size),
    ]


def _hint(store: Store) -> str:
    try:
        store.size(MANIFEST)
    except NotFoundError:
        return ""
    return ": it is a checkpoint itself; use `cloudckpt show`"
