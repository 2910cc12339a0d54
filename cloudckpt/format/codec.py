"""From the bytes of a chunk to what is stored, and back: [zstd,] crc32c, as zarr's codecs of these names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from crc32c import crc32c
from isal import isal_zlib

from cloudckpt.errors import FormatError

CHECKSUM_BYTES = 4
DIGEST_BYTES = 16
ZSTD_LEVEL = 3
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

Bytes1D = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class EncodedChunk:
    """``payload`` followed by ``suffix`` (its CRC-32C, little endian) is what is stored."""

    payload: Bytes1D
    suffix: bytes
    crc32c: int
    crc32: int
    """CRC-32 of payload and suffix, as ZIP entries want it."""

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes + CHECKSUM_BYTES


def checksum(data: Any, start: int = 0) -> int:
    """CRC-32C of any buffer, going on from ``start``."""
    return crc32c(data, start)  # numpy's stubs only declare the buffer protocol from Python 3.12 on


def chunk_digest(data: Bytes1D) -> bytes:
    """Equal for two chunks if and only if their unencoded bytes are, as far as anyone knows: BLAKE3, cut off."""
    return blake3(data.data).digest(DIGEST_BYTES)


def encode_chunk(data: Bytes1D, compression: str | None) -> EncodedChunk:
    """``data`` is kept by reference when it is not compressed."""
    if compression is not None:
        data = np.frombuffer(_zstd().compress(data, ZSTD_LEVEL), dtype=np.uint8)
    value = checksum(data)
    suffix = value.to_bytes(CHECKSUM_BYTES, "little")
    return EncodedChunk(data, suffix, value, isal_zlib.crc32(suffix, isal_zlib.crc32(data)))


def decompress(data: Bytes1D, nbytes: int, what: str) -> Bytes1D:
    """Undo zstd; a frame that claims another size than ``nbytes`` is refused before it is unpacked."""
    claimed = _frame_size(bytes(data[:18]))
    if claimed != nbytes:  # numcodecs takes smaller ones too, and leaves the rest of `out` as it is
        raise FormatError(f"{what}: not a zstd frame of {nbytes} bytes (it has {claimed})")
    out = np.empty(nbytes, dtype=np.uint8)
    try:
        _zstd().decompress(data, out)
    except (RuntimeError, ValueError) as error:
        raise FormatError(f"{what}: not a zstd frame of {nbytes} bytes ({error})") from error
    return out


def _frame_size(head: bytes) -> int | None:
    """What the header of a zstd frame says that it unpacks to, if it does (RFC 8878, section 3.1.1.1)."""
    if len(head) < 6 or head[:4] != _ZSTD_MAGIC:
        return None
    flags = head[4]
    single_segment = flags >> 5 & 1
    width = (single_segment, 2, 4, 8)[flags >> 6]
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[flags & 3]
    if width == 0 or len(head) < start + width:
        return None
    return int.from_bytes(head[start : start + width], "little") + (256 if width == 2 else 0)


def _zstd() -> Any:
    # numcodecs takes 0.1 s to import, and most checkpoints are not compressed.
    from numcodecs import zstd

    return zstd
