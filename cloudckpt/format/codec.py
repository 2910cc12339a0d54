"""From the bytes of a chunk to what is stored, and back: [zstd,] crc32c, as zarr's codecs of these names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c
from isal import isal_zlib

from cloudckpt.errors import FormatError

CHECKSUM_BYTES = 4
ZSTD_LEVEL = 3

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


def encode_chunk(data: Bytes1D, compression: str | None) -> EncodedChunk:
    """``data`` is kept by reference when it is not compressed."""
    if compression is not None:
        data = np.frombuffer(_zstd().compress(data, ZSTD_LEVEL), dtype=np.uint8)
    value = checksum(data)
    suffix = value.to_bytes(CHECKSUM_BYTES, "little")
    return EncodedChunk(data, suffix, value, isal_zlib.crc32(suffix, isal_zlib.crc32(data)))


def decompress(data: Bytes1D, nbytes: int, what: str) -> Bytes1D:
    """Undo zstd; a frame that claims another size than ``nbytes`` is refused before it is unpacked."""
    out = np.empty(nbytes, dtype=np.uint8)
    try:
        _zstd().decompress(data, out)
    except (RuntimeError, ValueError) as error:
        raise FormatError(f"{what}: not a zstd frame of {nbytes} bytes ({error})") from error
    return out


def _zstd() -> Any:
    # numcodecs takes 0.1 s to import, and most checkpoints are not compressed.
    from numcodecs import zstd

    return zstd
