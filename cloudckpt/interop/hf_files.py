"""Models in Hugging Face's layout: safetensors files, with or without an index, in any store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from cloudckpt.errors import FormatError, NoBucketError, NotFoundError
from cloudckpt.format.document import MAX_BYTES, MAX_DIMS
from cloudckpt.interop.foreign import Foreign, ForeignArray, Origin, describe
from cloudckpt.interop.hf_index import (
    SUFFIX,
    Choice,
    check_complete,
    choose,
    parse_index,
    stray_note,
    unite,
    unlisted_note,
)
from cloudckpt.interop.safetensors_header import MAX_HEADER_BYTES, Header, StoredTensor, read_header
from cloudckpt.store.base import Store
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


def open_hf(origin: Origin) -> Foreign:
    """The state in the files there: a flat dict of tensors, in the order in which they lie in the files.

    Where the origin is one file, that is the safetensors file or the index that counts. Else the store is listed, and
    `choose` has the rules. Each file takes one request, or two where its header is very long, and one more for its size
    where nothing was listed.

    Raises NotFoundError where there is no model, FormatError for damaged files and for an index that names what is not
    there, with all of that.
    """
    store, url = origin.store, origin.store.url
    sizes: dict[str, int] = {}
    if origin.name is None:
        sizes = {found.key: found.nbytes for found in store.list("") if "/" not in found.key}
        choice = choose(sizes, url)
    else:
        choice = Choice(None, (origin.name,)) if origin.name.endswith(SUFFIX) else Choice(origin.name)
    notes = choice.notes
    if choice.index is None:
        files = choice.files
        headers = _read_headers(origin, files, sizes)
        if absent := [file for file in files if file not in headers]:
            raise NotFoundError(f"no {', '.join(absent)} in {url}")
        weight_map = unite(_names(headers), url)
    else:
        where = f"{url}/{choice.index}"
        weight_map = parse_index(_read_index(store, choice.index, sizes), where)
        files = tuple(sorted(set(weight_map.values())))
        headers = _read_headers(origin, files, sizes)
        check_complete(weight_map, files, _names(headers), where)
        notes += unlisted_note(weight_map, _names(headers), where)
    notes += stray_note(sizes, files, url)
    objects = [(file, headers[file].file_nbytes) for file in files]
    found = [
        (number, tensor)
        for number, file in enumerate(files)
        for tensor in headers[file].tensors
        if weight_map.get(tensor.name) == file
    ]
    return Foreign(describe(objects, _arrays(found, files, url), metadata=_metadata(headers)), notes=notes)


def _names(headers: Mapping[str, Header]) -> dict[str, list[str]]:
    return {file: [tensor.name for tensor in header.tensors] for file, header in headers.items()}


def _read_index(store: Store, index: str, sizes: Mapping[str, int]) -> bytes:
    nbytes = sizes[index] if index in sizes else store.size(index)
    if nbytes > _MAX_INDEX_BYTES:
        raise FormatError(f"{store.url}/{index}: {nbytes} bytes are too many for an index")
    return store.get(index)


def _read_headers(origin: Origin, files: Sequence[str], sizes: Mapping[str, int]) -> dict[str, Header]:
    """Those of all files that are there. ``sizes``: what is known of them."""
    store = origin.store
    found: dict[str, Header] = {}

    def read(file: str) -> None:
        try:
            nbytes = sizes[file] if file in sizes else store.size(file)
            found[file] = read_header(store, file, nbytes)
        except NoBucketError:
            raise
        except NotFoundError:
            return  # the caller tells which are missing, all at once

    tasks: list[Callable[[], None]] = [partial(read, file) for file in files]
    run_all(tasks, num_threads=origin.config.num_threads)
    return {file: found[file] for file in files if file in found}


def _metadata(headers: Mapping[str, Header]) -> dict[str, dict[str, str]]:
    """What all files have in ``__metadata__``."""
    shared = [set(header.metadata.items()) for header in headers.values()]
    return {"safetensors": dict(sorted(set.intersection(*shared)))} if shared else {}


def _arrays(found: Sequence[tuple[int, StoredTensor]], files: Sequence[str], url: str) -> list[ForeignArray]:
    faults = [f"  {tensor.name!r} in {files[number]}: {fault}" for number, tensor in found if (fault := _fault(tensor))]
    if faults:
        raise FormatError("\n".join([f"{url} holds tensors that torch cannot have:", *faults]))
    return [
        ForeignArray(
            name=tensor.name,
            dtype=TORCH_DTYPES[tensor.dtype] or "",
            shape=_shape(tensor),
            object=number,
            byte_offset=tensor.byte_offset,
        )
        for number, tensor in found
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
