"""``cloudckpt references``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from cloudckpt.checkpoint import open_checkpoint
from cloudckpt.cli.text import human_bytes, printable
from cloudckpt.errors import InvalidStateError
from cloudckpt.format.dtypes import dtype
from cloudckpt.format.keys import MANIFEST, PIN
from cloudckpt.interop.zarr_references import ReferenceOptions, ReferenceSet, needs_extension
from cloudckpt.store.paths import parent, scheme_of
from cloudckpt.store.resolve import resolve

PART_BYTES = 1024 * 1024


def write_references(
    url: str, storage_options: Mapping[str, Any] | None, options: ReferenceOptions, output: str | None
) -> None:
    """``output``: a path, or a URL, for which the same storage options count; None: standard output."""
    with open_checkpoint(url, storage_options=storage_options) as checkpoint:
        found = ReferenceSet.of(checkpoint, url, options)
    for line in _limits(found):
        print(f"cloudckpt: {line}", file=sys.stderr)
    if output is None:
        for part in _parts(found):
            sys.stdout.write(part.decode())
        return
    nbytes = _write(output, storage_options, found)
    print(f"wrote {printable(output)}: {len(found.arrays)} arrays, {found.num_chunks} chunks, {human_bytes(nbytes)}")


def _write(output: str, storage_options: Mapping[str, Any] | None, found: ReferenceSet) -> int:
    folder, name = parent(output)
    if name.lower() in ("", MANIFEST, PIN):
        raise InvalidStateError(f"--output: {output} cannot be the name of a reference file")
    is_local = scheme_of(output) in (None, "file", "local")
    with closing(resolve(folder, None if is_local else storage_options)) as store:
        upload = store.open_upload(name)
        try:
            nbytes = 0
            for part in _parts(found):
                upload.write(part)
                nbytes += len(part)
            upload.close()
        except BaseException:
            upload.abort()
            raise
    return nbytes


def _parts(found: ReferenceSet) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for piece in found.encode():
        held.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _limits(found: ReferenceSet) -> Iterator[str]:
    """What its readers need beyond zarr itself."""
    entries = [found.manifest.arrays[number] for number in found.arrays]
    kinds = sorted({entry.dtype for entry in entries if needs_extension(dtype(entry.dtype))})
    if kinds and not found.plain_types:
        yield f"zarr reads {', '.join(kinds)} only where cloudckpt is installed; --plain-types makes integers of them"
    irregular = sum(not found.manifest.grids[number].is_regular for number in found.arrays)
    if irregular:
        yield f"{irregular} arrays have irregular grids: zarr reads them from 3.2 on, with array.rectilinear_chunks set"
