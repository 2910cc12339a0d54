"""``cloudckpt import``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt._import import import_from
from cloudckpt.cli.bars import progress_bar
from cloudckpt.cli.text import human_bytes, printable
from cloudckpt.pytorch.launched import launched_job


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line."""

    step: int | None
    rename: Sequence[tuple[str, str]]
    cast: Sequence[tuple[str, str]]
    layout: Any
    compression: Any
    allow_pickle: bool
    overwrite: bool


def import_checkpoint(
    kind: Any,
    src: str,
    dst: str,
    src_options: Mapping[str, Any] | None,
    dst_options: Mapping[str, Any] | None,
    wanted: Wanted,
) -> None:
    start = time.monotonic()
    with launched_job() as rank, progress_bar(f"import {kind}") as progress:
        commit = import_from(
            kind,
            src,
            dst,
            step=wanted.step,
            rename=list(wanted.rename) or None,
            cast=dict(wanted.cast) or None,
            layout=wanted.layout,
            compression=wanted.compression,
            allow_pickle=wanted.allow_pickle,
            overwrite=wanted.overwrite,
            src_options=src_options,
            dst_options=dst_options,
            progress=progress if rank == 0 else None,
        )
    if rank == 0:
        written = f"{commit.num_chunks} chunks, {human_bytes(commit.nbytes)}, {time.monotonic() - start:.1f} s"
        print(f"wrote {printable(commit.url)}: {written}")
