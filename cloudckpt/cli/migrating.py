"""``cloudckpt migrate``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cloudckpt._migrate import migrate
from cloudckpt.cli.bars import progress_bar
from cloudckpt.cli.text import human_bytes, printable
from cloudckpt.errors import InvalidStateError


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line."""

    to: str | None
    modules: Sequence[str]
    rename: Sequence[tuple[str, str]]
    cast: Sequence[tuple[str, str]]
    overwrite: bool


def migrate_checkpoint(
    src: str,
    dst: str,
    src_options: Mapping[str, Any] | None,
    dst_options: Mapping[str, Any] | None,
    wanted: Wanted,
) -> None:
    _import(wanted.modules)
    start = time.monotonic()
    with progress_bar("migrate") as progress:
        commit = migrate(
            src,
            dst,
            model_version=wanted.to,
            rename=list(wanted.rename) or None,
            cast=dict(wanted.cast) or None,
            overwrite=wanted.overwrite,
            src_options=src_options,
            dst_options=dst_options,
            progress=progress,
        )
    written = f"{commit.num_chunks} chunks, {human_bytes(commit.nbytes)}, {time.monotonic() - start:.1f} s"
    print(f"wrote {printable(commit.url)}: {written}")


def _import(modules: Sequence[str]) -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; an installed command does not look here
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise InvalidStateError(f"cannot import --module {name}: {error}") from error
