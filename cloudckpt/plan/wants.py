"""What every rank wants of the stored arrays, told in few bytes: equal tables are told once."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloudckpt.format.grid import Ints
from cloudckpt.plan.shard import PieceTable


@dataclass(frozen=True, eq=False)
class Wants:
    """``tables``: distinct ones; rank r wants ``tables[table[r]]``."""

    tables: Sequence[PieceTable]
    table: Ints

    @staticmethod
    def of(ranks: Sequence[PieceTable]) -> Wants:
        """From one table a rank."""
        numbers: dict[bytes, int] = {}
        distinct: list[PieceTable] = []
        table = np.zeros(len(ranks), dtype=np.int64)
        for rank, wanted in enumerate(ranks):
            number = numbers.setdefault(table_digest(wanted), len(distinct))
            if number == len(distinct):
                distinct.append(wanted)
            table[rank] = number
        return Wants(distinct, table)

    def among(self, ranks: Sequence[int]) -> Wants:
        """The same for some of the ranks, numbered anew in the order given."""
        used, table = np.unique(self.table[list(ranks)], return_inverse=True)
        return Wants([self.tables[i] for i in used.tolist()], table.reshape(-1))


def table_digest(table: PieceTable) -> bytes:
    """Equal for equal tables, on every rank and machine."""
    columns = _columns(table)
    digest = hashlib.blake2b(np.array(columns.shape, dtype="<i8").tobytes(), digest_size=16)
    digest.update(columns.tobytes())
    return digest.digest()


def encode_table(table: PieceTable) -> bytes:
    """Neighbouring rows differ little: the differences compress to a few bytes a row."""
    differences = np.diff(_columns(table), axis=1, prepend=0)
    itemsize = 4 if int(np.abs(differences).max(initial=0)) < 2**31 else 8
    header = np.array([len(table), table.offset.shape[1], itemsize], dtype="<i8").tobytes()
    return header + zlib.compress(differences.astype(f"<i{itemsize}").tobytes(), 1)


def decode_table(data: bytes) -> PieceTable:
    """The inverse of `encode_table`."""
    count, dims, itemsize = np.frombuffer(data[:24], dtype="<i8").tolist()
    differences = np.frombuffer(zlib.decompress(data[24:]), dtype=f"<i{itemsize}").reshape(1 + 2 * dims, count)
    columns = np.cumsum(differences, axis=1, dtype=np.int64)
    return PieceTable(columns[0], columns[1 : 1 + dims].T, columns[1 + dims :].T)


def _columns(table: PieceTable) -> Ints:
    """``int64[1 + 2 * dims, rows]``."""
    return np.concatenate([table.tensor[None, :], table.offset.T, table.shape.T]).astype("<i8")
