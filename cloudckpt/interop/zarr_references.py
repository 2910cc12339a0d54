"""fsspec reference files: which bytes of which object are which key of a zarr group.

The format is version 1 of https://fsspec.github.io/kerchunk/spec.html, in JSON. It is the only one that fits: fsspec's
lazy form in parquet knows zarr 2 alone, and it ignores generators unless jinja2 is allowed to run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, TypeAlias

import msgspec

from cloudckpt.checkpoint import Checkpoint, open_checkpoint
from cloudckpt.config import Config
from cloudckpt.errors import InvalidStateError, NotFoundError
from cloudckpt.format.dtypes import DType, dtype
from cloudckpt.format.keys import chunk_key, key_in_run, split_key
from cloudckpt.format.manifest import Manifest
from cloudckpt.format.zarr_json import array_document, encode_document, group_document
from cloudckpt.store.local import LocalStore
from cloudckpt.store.paths import mask, parent, place, scheme_of
from cloudckpt.store.resolve import shown_url, url_text

Reference: TypeAlias = str | list[Any]
"""A document as text; or ``[url]``, the whole object; or ``[url, byte offset, nbytes]``."""

_METADATA = "zarr.json"
_TEMPLATE = "u"
_BUCKET = re.compile(r"[^/]+://[^/]*")


def references(
    url: str | os.PathLike[str],
    *,
    names: str | Iterable[str] | None = None,
    template: bool = False,
    base: str | os.PathLike[str] | None = None,
    plain_types: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> dict[str, Any]:
    """What fsspec's reference filesystem takes as ``fo``: the checkpoint as one zarr group, with no file but its own.

    ``names``: dotted paths, array names, or patterns of them (``fnmatch``); only these arrays. ``template``: URLs begin
    with ``{{u}}``, which stands for the checkpoint's URL (of one with references to other steps: for its run's), and
    which a reader may set anew by ``template_overrides``. ``base``: the URL by which readers know the checkpoint, if
    not by ``url``. ``plain_types``: bfloat16 and float8, which zarr alone does not know, as uint16 and uint8; torch's
    name is in the attribute ``cloudckpt_dtype``. No credentials are written. Not collective; reads the manifest only.

    Raises NotFoundError where there is no checkpoint or no such array, InvalidStateError for a URL that holds
    credentials or that fsspec's reference filesystem cannot follow.
    """
    with open_checkpoint(url, storage_options=storage_options, config=config) as checkpoint:
        how = ReferenceOptions(names, template, base, plain_types)
        found = ReferenceSet.of(checkpoint, url, how)
        return {**found.head, "refs": dict(found.entries())}


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """Those of `references`."""

    names: str | Iterable[str] | None = None
    template: bool = False
    base: str | os.PathLike[str] | None = None
    plain_types: bool = False


@dataclass(frozen=True, eq=False)
class ReferenceSet:
    """``urls``: of every object of the manifest. ``arrays``: the numbers of those that are wanted."""

    manifest: Manifest
    arrays: Sequence[int]
    urls: Sequence[str]
    templates: Mapping[str, str]
    plain_types: bool

    @staticmethod
    def of(checkpoint: Checkpoint, url: str | os.PathLike[str], options: ReferenceOptions) -> ReferenceSet:
        """``url``: that of the checkpoint, as the caller gave it."""
        manifest = checkpoint.manifest
        arrays = _wanted(manifest, options.names, checkpoint.url)
        root = _root(checkpoint, url, options.base)
        urls, templates = (_templated if options.template else _absolute)(root, [o.key for o in manifest.objects])
        return ReferenceSet(manifest, arrays, urls, templates, options.plain_types)

    @property
    def num_chunks(self) -> int:
        return sum(self.manifest.grids[number].num_chunks for number in self.arrays)

    @property
    def head(self) -> dict[str, Any]:
        return {"version": 1, **({"templates": dict(self.templates)} if self.templates else {})}

    def entries(self) -> Iterator[tuple[str, Reference]]:
        document = self.manifest.document
        about = {"step": document.step, "commit_id": document.commit_id}
        yield _METADATA, _text({**group_document(), "attributes": {"cloudckpt": about}})
        for number in self.arrays:
            yield from self._of_array(number)

    def encode(self) -> Iterator[bytes]:
        """The file, an array at a time, a line for each key."""
        yield msgspec.json.encode(self.head)[:-1] + b',"refs":{'
        before = b"\n"
        for key, reference in self.entries():
            yield before + msgspec.json.encode(key) + b":" + msgspec.json.encode(reference)
            before = b",\n"
        yield b"\n}}\n"

    def _of_array(self, number: int) -> Iterator[tuple[str, Reference]]:
        manifest, entry, grid = self.manifest, self.manifest.arrays[number], self.manifest.grids[number]
        kind = dtype(entry.dtype)
        made = array_document(entry.dtype, grid, entry.compression)
        made["attributes"]["cloudckpt_path"] = manifest.path(number)
        if self.plain_types and needs_extension(kind):
            made |= {"data_type": f"uint{8 * kind.itemsize}", "fill_value": 0}
            made["attributes"]["cloudckpt_dtype"] = kind.name
        # xarray refuses arrays whose dims have no names, two sizes of one name, and dims with the name of an array
        # that is not their own: so all are different, and none can be the name of an array.
        made["dimension_names"] = [f"{entry.name}[{dim}]" for dim in range(len(made["shape"]))]
        yield f"{entry.name}/{_METADATA}", _text(made)
        rows = slice(entry.first_chunk, entry.first_chunk + grid.num_chunks)
        columns = (getattr(manifest.columns, column)[rows].tolist() for column in ("object", "byte_offset", "nbytes"))
        trailing = (0,) * len(kind.trailing)
        indices = product(*(range(count) for count in grid.counts))
        for index, number_of_object, byte_offset, nbytes in zip(indices, *columns, strict=True):
            url = self.urls[number_of_object]
            is_whole = byte_offset == 0 and nbytes == manifest.objects[number_of_object].nbytes
            yield chunk_key(entry.name, index + trailing), [url] if is_whole else [url, byte_offset, nbytes]


def needs_extension(kind: DType) -> bool:
    """Whether zarr knows the type only where somebody has registered it."""
    return kind.zarr_name is not None and kind.numpy is not None and kind.numpy.isbuiltin == 2


def _text(document: dict[str, Any]) -> str:
    return encode_document(document).decode()


def _root(checkpoint: Checkpoint, url: str | os.PathLike[str], base: str | os.PathLike[str] | None) -> str:
    """The URL of the checkpoint as it is to be written, without a slash at its end."""
    if base is not None:
        given = url_text(base)
    elif isinstance(checkpoint.store, LocalStore):
        return f"file://{checkpoint.url}"
    else:
        given = url_text(url)
    if mask(given) != given:
        raise InvalidStateError(
            f"{shown_url(given)}: a reference file must not hold a password; pass another URL as base"
        )
    scheme = scheme_of(given)
    if scheme is None or "::" in given:
        raise InvalidStateError(
            f"{shown_url(given)}: fsspec's references lead to URLs of one scheme, such as s3://...; pass one as base"
        )
    return (scheme + given[len(scheme) :]).rstrip("/")


def _absolute(root: str, keys: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    bucket = _BUCKET.match(root)
    return [place(root, key, top=bucket[0] if bucket else "") for key in keys], {}


def _templated(root: str, keys: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    if any(split_key(key)[0] is not None for key in keys):
        root, step_dir = parent(root)
        keys = [key_in_run(step_dir, key) for key in keys]
    for text, fault in [*((key, r"[{}]") for key in keys), (root, r"\{\{")]:
        if re.search(fault, text):
            raise InvalidStateError(
                f"{text!r:.200} holds braces, which mean something in templates: leave template out"
            )
    return [f"{{{{{_TEMPLATE}}}}}/{key}" for key in keys], {_TEMPLATE: root}


def _wanted(manifest: Manifest, names: str | Iterable[str] | None, where: str) -> list[int]:
    everything = range(len(manifest.arrays))
    if names is None:
        return list(everything)
    patterns = [names] if isinstance(names, str) else list(names)
    texts = [{entry.name, manifest.path(number)} for number, entry in enumerate(manifest.arrays)]
    met = {
        pattern: {i for i in everything if any(_matches(text, pattern) for text in texts[i])} for pattern in patterns
    }
    idle = [pattern for pattern, found in met.items() if not found]
    if idle:
        raise NotFoundError(f"{where} has no array {', '.join(map(repr, idle))}")
    return sorted(set().union(*met.values()))


def _matches(text: str, pattern: str) -> bool:
    return text == pattern or fnmatchcase(text, pattern)
