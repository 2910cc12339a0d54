"""Packs as other readers of ZIP see them."""

from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloudckpt.format import pack
from cloudckpt.format.codec import encode_chunk
from cloudckpt.format.pack import ALIGNMENT, PackBuilder


def build(entries: dict[str, bytes], documents: dict[str, bytes]) -> tuple[bytes, dict[str, int]]:
    builder, out, offsets = PackBuilder(), io.BytesIO(), {}
    for name, data in entries.items():
        chunk = encode_chunk(np.frombuffer(data, dtype=np.uint8), None)
        out.write(builder.begin_stored(name, chunk.nbytes, chunk.crc32))
        offsets[name] = out.tell()
        out.write(chunk.payload)
        out.write(chunk.suffix)
        assert builder.nbytes == out.tell()
    for name, data in documents.items():
        out.write(builder.deflated(name, data))
        assert builder.nbytes == out.tell()
    out.write(builder.finish())
    assert builder.nbytes == out.tell()
    return out.getvalue(), offsets


ENTRIES = {f"w/c/{i}": bytes(range(i)) for i in range(0, 200, 7)}
DOCUMENTS = {"zarr.json": b"{}" * 50, "w/zarr.json": b"x"}


def test_zipfile_reads_every_entry_and_finds_no_fault() -> None:
    data, offsets = build(ENTRIES, DOCUMENTS)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [*ENTRIES, *DOCUMENTS]
        for name, payload in ENTRIES.items():
            assert archive.read(name)[:-4] == payload
            assert archive.getinfo(name).compress_type == zipfile.ZIP_STORED
            assert offsets[name] % ALIGNMENT == 0
            assert data[offsets[name] : offsets[name] + len(payload)] == payload
        assert archive.read("zarr.json") == DOCUMENTS["zarr.json"]
        assert archive.getinfo("w/zarr.json").external_attr >> 16 == 0o100644


def test_equal_content_makes_equal_packs() -> None:
    assert build(ENTRIES, DOCUMENTS) == build(ENTRIES, DOCUMENTS)


def test_more_entries_than_16_bits_count() -> None:
    data, _ = build({f"w/c/{i}": b"" for i in range(66_000)}, {})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert len(archive.namelist()) == 66_000
        assert archive.read("w/c/65999") == bytes(4)


def test_offsets_past_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit lowered: 4 GiB of real data would prove the same."""
    monkeypatch.setattr(pack, "_MAX32", 2_000)
    data, _ = build(ENTRIES, DOCUMENTS)
    # zipfile takes 64-bit fields from the extra field only where the 32-bit ones are all ones.
    patched = bytearray(data)
    start = data.index(b"PK\x01\x02")
    position, seen = start, 0
    while data[position : position + 4] == b"PK\x01\x02":
        if int.from_bytes(data[position + 42 : position + 46], "little") == 2_000:
            patched[position + 42 : position + 46] = b"\xff" * 4
            seen += 1
        name, extra = (int.from_bytes(data[position + o : position + o + 2], "little") for o in (28, 30))
        position += 46 + name + extra
    patched[-6:-2] = patched[-10:-6] = b"\xff" * 4
    assert seen > 5
    with zipfile.ZipFile(io.BytesIO(bytes(patched))) as archive:
        assert archive.testzip() is None
        assert all(archive.read(name)[:-4] == payload for name, payload in ENTRIES.items())


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_accepts_it(tmp_path: Path) -> None:
    file = tmp_path / "pack.zip"
    file.write_bytes(build(ENTRIES, DOCUMENTS)[0])
    done: Any = subprocess.run(["unzip", "-tq", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
