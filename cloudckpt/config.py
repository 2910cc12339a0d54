"""The settings that a caller may tune; every default was measured or follows from a limit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from cloudckpt.errors import InvalidStateError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes are bytes per rank, times are seconds.

    ``engine``: "auto" takes the native client for s3://, gs:// and az://; "fsspec" forces fsspec.
    ``chunk_bytes``: upper bound of one chunk, before compression.
    ``pack_bytes``: a pack is closed and the next begun once it has grown to this.
    ``memory_bytes``: host memory that a save or load may hold beyond the tensors themselves.
    ``num_threads``: requests in flight per rank.
    ``part_bytes``: the part size of a multipart upload (raised where 10,000 parts would not do).
    ``read_bytes``: upper bound of one ranged read.
    ``retry_deadline_s``: how long one request may be retried before it counts as failed.
    ``request_timeout_s``: how long one attempt at a request may stall.
    ``rank_timeout_s``: how long a rank waits for the others at one point before it names the late.
    ``check_replicas``: whose replicas must be proved equal by digest: "plain" tensors without a
    placement, "all", or "none".
    ``max_pending_saves``: background saves that may run at a time, each with a copy of the rank's bytes.
    ``when_busy``: what one more does: "wait" for one to end, or "raise" BusyError.
    ``staging_bytes``: upper bound of all these copies together; None: as many as they need.
    """

    engine: Literal["auto", "fsspec"] = "auto"
    chunk_bytes: int = 4 * MIB
    pack_bytes: int = 4 * GIB
    memory_bytes: int = 512 * MIB
    num_threads: int = 8
    part_bytes: int = 8 * MIB
    read_bytes: int = 16 * MIB
    retry_deadline_s: float = 120.0
    request_timeout_s: float = 30.0
    rank_timeout_s: float = 600.0
    check_replicas: Literal["plain", "all", "none"] = "plain"
    max_pending_saves: int = 1
    when_busy: Literal["wait", "raise"] = "wait"
    staging_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise InvalidStateError(f"Config.{field.name} must be positive, not {value!r}")
        choices = {
            "engine": ("auto", "fsspec"),
            "check_replicas": ("plain", "all", "none"),
            "when_busy": ("wait", "raise"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidStateError(f"Config.{name} must be one of {allowed}, not {getattr(self, name)!r}")
        if self.chunk_bytes > GIB:
            # Codecs and stores break at 2 GiB buffers (zarr-developers/numcodecs#80).
            raise InvalidStateError(f"Config.chunk_bytes must be at most {GIB}, not {self.chunk_bytes}")
        if self.part_bytes < 5 * MIB:
            raise InvalidStateError(
                f"Config.part_bytes must be at least {5 * MIB} (S3's minimum), not {self.part_bytes}"
            )
