"""``cloudckpt export``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt._export_dcp import DcpReport, export_dcp
from cloudckpt._export_hf import ExportReport, export_hf
from cloudckpt.cli.bars import progress_bar
from cloudckpt.cli.text import human_bytes, printable
from cloudckpt.errors import InvalidStateError
from cloudckpt.pytorch.launched import launched_job


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line."""

    include: Sequence[str]
    rename: Sequence[tuple[str, str]]
    dtype: Sequence[str]
    max_shard_size: str | None
    files: Sequence[str]
    overwrite: bool


def export_checkpoint(
    kind: str,
    src: str,
    dst: str,
    src_options: Mapping[str, Any] | None,
    dst_options: Mapping[str, Any] | None,
    wanted: Wanted,
) -> None:
    start = time.monotonic()
    for option, given in (("--files", wanted.files != []), ("--max-shard-size", wanted.max_shard_size is not None)):
        if kind != "hf" and given:
            raise InvalidStateError(f"{option} is for hf, not for {kind}")
    with launched_job() as rank, progress_bar(f"export {kind}") as progress:
        common: dict[str, Any] = {
            "include": wanted.include or None,
            "rename": list(wanted.rename) or None,
            "overwrite": wanted.overwrite,
            "src_options": src_options,
            "dst_options": dst_options,
            "progress": progress if rank == 0 else None,
        }
        lines: list[str]
        if kind == "dcp":
            dcp = export_dcp(src, dst, cast=_dtypes(wanted.dtype), **common)
            lines = _dcp_lines(dcp, time.monotonic() - start)
        else:
            hf = export_hf(
                src,
                dst,
                dtype=_dtypes(wanted.dtype),
                max_shard_bytes="5GB" if wanted.max_shard_size is None else wanted.max_shard_size,
                files=wanted.files,
                **common,
            )
            lines = _lines(hf, time.monotonic() - start)
    if rank == 0:
        print(*lines, sep="\n")


def _dtypes(texts: Sequence[str]) -> dict[str, str] | None:
    """By pattern; a type alone is for all that no pattern before it matches."""
    return {pattern or "*": kind for pattern, _, kind in (text.rpartition("=") for text in texts)} or None


def _dcp_lines(report: DcpReport, seconds: float) -> list[str]:
    written = f"{len(report.files)} files, {human_bytes(report.nbytes)}, {seconds:.1f} s"
    what = f"{report.num_tensors} tensors and {report.num_values} values"
    removed = [f"removed of an earlier export: {printable(', '.join(report.removed))}"] if report.removed else []
    return [f"exported {what} to {printable(report.url)}: {written}", *removed]


def _lines(report: ExportReport, seconds: float) -> list[str]:
    count = f"{len(report.files)} files" if len(report.files) > 1 else report.files[0]
    written = f"{count}, {human_bytes(report.nbytes)}, {seconds:.1f} s"
    lines = [f"exported {report.num_tensors} tensors to {printable(report.url)}: {written}"]
    if report.tied:
        lines.append(f"tied, and written once: {printable(', '.join(f'{a} = {b}' for a, b in report.tied.items()))}")
    if report.copied:
        lines.append(f"along with it: {printable(', '.join(report.copied))}")
    if report.removed:
        lines.append(f"removed of an earlier export: {printable(', '.join(report.removed))}")
    return lines
