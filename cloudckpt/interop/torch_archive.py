"""The ZIP archives that ``torch.save`` writes, a file or an item of one, read by small ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import FormatError
from cloudckpt.format.dtypes import dtype
from cloudckpt.interop.pickle_reader import read_pickle
from cloudckpt.interop.ranges import Part
from cloudckpt.interop.torch_tensors import SavedTensor
from cloudckpt.interop.zip_records import TAIL_BYTES, Record, payload_offset, read_directory

HEAD_BYTES = 1024
"""What is read of an archive's start at first: the pickle of a single tensor is in it, and what follows that."""
MAX_PICKLE_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True, eq=False)
class TorchArchive:
    """``value``: what its pickle says, see `pickle_reader`; ``pickle_bytes``: the size of that."""

    value: Any
    names: frozenset[str]
    pickle_bytes: int
    part: Part
    where: str
    _folder: str
    _records: dict[str, Record]

    def storage_offset(self, tensor: SavedTensor) -> int:
        """Where the first byte of its storage is in the object. FormatError if it is not all there."""
        record = self._records.get(f"{self._folder}data/{tensor.key}")
        nbytes = tensor.numel * dtype(tensor.dtype).itemsize
        if record is None or record.nbytes < nbytes:
            raise FormatError(
                f"{self.where}: storage {tensor.key!r:.50} of {nbytes} bytes is"
                f" {'missing' if record is None else f'only {record.nbytes} bytes long'}"
            )
        return self.part.byte_offset + payload_offset(self.part, record, self.where)


def first_reads(byte_offset: int, nbytes: int) -> list[tuple[int, int]]:
    """What to have at hand before `open_archive` is called for an archive there."""
    end = byte_offset + nbytes
    return [(byte_offset, min(byte_offset + HEAD_BYTES, end)), (max(byte_offset, end - TAIL_BYTES), end)]


def open_archive(part: Part, where: str) -> TorchArchive:
    """FormatError for what is no such archive, telling what it is instead."""
    magic = part.read(0, 4)
    if magic != b"PK\x03\x04":
        raise FormatError(f"{where}: {_other_kind(part.read(0, 16))}")
    records = read_directory(part, where)
    pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise FormatError(f"{where}: a ZIP archive, but not one of torch.save: it has {len(pickles)} data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in records:
        raise FormatError(
            f"{where}: a TorchScript program, whose tensors are read by running it; save its weights by"
            " torch.save(torch.jit.load(path).state_dict(), ...) and import that"
        )
    if _payload(part, records.get(f"{folder}byteorder"), where) not in (b"", b"little"):
        raise FormatError(f"{where}: written on a big-endian machine; load it there and save it as safetensors")
    record = records[pickles[0]]
    if record.nbytes > MAX_PICKLE_BYTES:
        raise FormatError(f"{where}: a pickle of {record.nbytes} bytes")
    value, names, _ = read_pickle(_payload(part, record, where), where)
    return TorchArchive(value, frozenset(names), record.nbytes, part, where, folder, records)


def _payload(part: Part, record: Record | None, where: str) -> bytes:
    if record is None:
        return b""
    start = payload_offset(part, record, where)
    return part.read(start, start + record.nbytes)


def _other_kind(start: bytes) -> str:
    if start[:2] == b"\x80\x02" and start[2:4] == b"\x8a\x0a":
        return (
            "in the format of torch before 1.6; write it anew by torch.save(torch.load(path, weights_only=True),"
            " path) and import that"
        )
    if start[:1] == b"\x80":
        return "a pickle, which only code can read; nothing of it is executed here"
    return "not a file of torch.save, which is a ZIP archive"
