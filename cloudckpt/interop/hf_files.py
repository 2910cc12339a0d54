"""Models in Hugging Face's layout: safetensors files, with or without an index, in any store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from cloudckpt.config import Config
from cloudckpt.errors import FormatError, NoBucketError, NotFoundError
from cloudckpt.format.document import MAX_BYTES, MAX_DIMS
from cloudckpt.interop.foreign import Foreign, ForeignArray, describe
from cloudckpt.interop.hf_index import (
    SUFFIX,
    Choice,
    check_complete,
    choose,
    is_index,
    parse_index,
    stray_note,
    unite,
    unlisted_note,
)
from cloudckpt.interop.safetensors_header import MAX_HEADER_BYTES, Header, StoredTensor, read_header
from cloudckpt.store.base import Store
from cloudckpt.store.paths import parent
from cloudckpt.store.resolve import url_text
from cloudckpt.transfer.pool import run_all

TORCH_DTYPES: Mapping[str, str | None] = MappingProxyType(
    {
        "BOOL": "bool",
        **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
        **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
        "F4": "float4_e2m1fn_x2",  # one of torch's elements is two of the format's
        "F6_E2M3": None,
        "F6_E3M2": None,
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
    }
)
"""torch's names for the data types of the format; None where it has no such type."""

_MAX_INDEX_BYTES = MAX_HEADER_BYTES


def split_url(url: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The folder, and the name of a safetensors file or of an index in it where the URL is of one."""
    text = url_text(url)
    return parent(text) if text.endswith(SUFFIX) or is_index(text) else (text, None)


def open_hf(store: Store, config: Config, name: str | None = None) -> Foreign:
    """The state in the files at the root of ``store``: a flat dict of tensors, in the order in which they lie there.

    ``name``: of the one file, or of the index, that counts. Without it the root is listed, and `choose` has the rules.
    Each file takes one request, or two where its header is very long, and with ``name`` one more for its size.

    Raises NotFoundError where there is no model, FormatError for damaged files and for an index that names what is not
    there, with all of that.
    """
    sizes: dict[str, int] = {}
    if name is None:
        sizes = {found.key: found.nbytes for found in store.list("") if "/" not in found.key}
        choice = choose(sizes, store.url)
    else:
        choice = Choice(name) if is_index(name) else Choice(None, (name,))
    notes = choice.notes
    if choice.index is None:
        files = choice.files
        headers = _read_headers(store, files, sizes, config)
        if absent := [file for file in files if file not in headers]:
            raise NotFoundError(f"no {', '.join(absent)} in {store.url}")
        weight_map = unite(_names(headers), store.url)
    else:
        where = f"{store.url}/{choice.index}"
        weight_map = parse_index(_read_index(store, choice.index, sizes), where)
        files = tuple(sorted(set(weight_map.values())))
        headers = _read_headers(store, files, sizes, config)
        check_complete(weight_map, files, _names(headers), where)
        notes += unlisted_note(weight_map, _names(headers), where)
    notes += stray_note(sizes, files, store.url)
    found = [
        (file, tensor) for file in files for tensor in headers[file].tensors if weight_map.get(tensor.name) == file
    ]
    arrays = _arrays(found, {file: number for number, file in enumerate(files)}, store.url)
    return Foreign(describe([(file, headers[file].file_nbytes) for file in files], arrays), notes=notes)


def _names(headers: Mapping[str, Header]) -> dict[str, list[str]]:
    return {file: [tensor.name for tensor in header.tensors] for file, header in headers.items()}


def _read_index(store: Store, index: str, sizes: Mapping[str, int]) -> bytes:
    nbytes = sizes[index] if index in sizes else store.size(index)
    if nbytes > _MAX_INDEX_BYTES:
        raise FormatError(f"{store.url}/{index}: {nbytes} bytes are too many for an index")
    return store.get(index)


def _read_headers(store: Store, files: Sequence[str], sizes: Mapping[str, int], config: Config) -> dict[str, Header]:
    """Those of all files that are there. ``sizes``: what is known of them."""
    found: dict[str, Header] = {}

    def read(file: str) -> None:
        try:
            nbytes = sizes[file] if file in sizes else store.size(file)
            found[file] = read_header(store, file, nbytes)
        except NoBucketError:
            raise
        except NotFoundError:
            return  # whoever wants it tells which are missing, all at once

    tasks: list[Callable[[], None]] = [partial(read, file) for file in files]
    run_all(tasks, num_threads=config.num_threads)
    return {file: found[file] for file in files if file in found}


def _arrays(found: Sequence[tuple[str, StoredTensor]], numbers: Mapping[str, int], url: str) -> list[ForeignArray]:
    faults = [f"  {tensor.name!r} in {file}: {fault}" for file, tensor in found if (fault := _fault(tensor))]
    if faults:
        raise FormatError("\n".join([f"{url} holds tensors that torch cannot have:", *faults]))
    return [
        ForeignArray(
            name=tensor.name,
            dtype=TORCH_DTYPES[tensor.dtype] or "",
            shape=_shape(tensor),
            object=numbers[file],
            byte_offset=tensor.byte_offset,
        )
        for file, tensor in found
    ]


def _fault(tensor: StoredTensor) -> str | None:
    if TORCH_DTYPES[tensor.dtype] is None:
        return f"it has no data type {tensor.dtype}"
    if tensor.dtype == "F4" and tensor.shape[-1] % 2:
        return f"the last dim of {tensor.dtype} {list(tensor.shape)} must be even"
    if len(tensor.shape) > MAX_DIMS:
        return f"{len(tensor.shape)} dims"
    if any(extent >= MAX_BYTES for extent in tensor.shape):
        return f"shape {list(tensor.shape)}"
    return None


def _shape(tensor: StoredTensor) -> tuple[int, ...]:
    return (*tensor.shape[:-1], tensor.shape[-1] // 2) if tensor.dtype == "F4" else tensor.shape
