"""Reading without a template: the saved structure, with whole tensors in CPU memory."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cloudckpt.checkpoint import by_rank, open_checkpoint
from cloudckpt.config import Config
from cloudckpt.errors import FormatError, InvalidStateError, NotFoundError
from cloudckpt.format import values
from cloudckpt.format.dtypes import from_numpy, numpy_dtype
from cloudckpt.format.tree import Node, TreePath, children, is_mapping, key_token, path_text
from cloudckpt.plan.migrations import migrations_between
from cloudckpt.plan.reads import StoredChunks, plan_load
from cloudckpt.plan.rename import Rules
from cloudckpt.plan.view import View, renamed
from cloudckpt.pytorch.per_rank import decode_inline
from cloudckpt.pytorch.shards import ndarray_shard, tensor_shard, torch_dtype
from cloudckpt.pytorch.targets import ChunkPlaces, Targets, Want
from cloudckpt.pytorch.views import stored_wants
from cloudckpt.transfer.download import download, effective_read_bytes


def read(
    url: str | os.PathLike[str],
    names: str | Iterable[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    rename: Rules | None = None,
    model_version: str | None = None,
    config: Config | None = None,
) -> Any:
    """The saved state with full tensors in CPU memory. Not collective: every process that calls it reads everything.

    ``names``: dotted paths, or patterns with ``*``, ``?`` and ``[...]`` (``*`` crosses dots), of the
    parts to read; whatever is below a match comes with it. All else is left out, of lists and tuples too.
    ``rename``, ``model_version``: as for `load`; ``names`` are then those that the rules lead to.

    Tensors that were tied when saved are one tensor again. Numpy arrays have their recorded type, and
    ``PerRank`` values are lists by rank. Every chunk is verified.

    Raises NotFoundError where there is no checkpoint, or a name that matches nothing.
    """
    config = config or Config()
    with open_checkpoint(url, storage_options=storage_options, config=config) as checkpoint:
        manifest = checkpoint.manifest
        migrations = migrations_between(manifest.document.model_version, model_version, checkpoint.url)
        view = renamed(manifest, rename, migrations=migrations)
        made = Made(view, allow_pickle)
        try:
            tree = view.tree if names is None else _select(view.tree, names, checkpoint.url)
            state = values.decode(tree, leaf=made.leaf, allow_pickle=allow_pickle)
        except FormatError as error:
            raise FormatError(f"{checkpoint.url}: {error}") from error
        targets = Targets(made.wants)
        plan = plan_load(StoredChunks.of(manifest), [targets.table], read_bytes=effective_read_bytes(config))
        reads = plan.rank(0)
        download(
            checkpoint.store,
            manifest,
            reads.reads,
            ChunkPlaces(manifest, targets, reads.parts).open_sink,
            config=config,
            cancel=threading.Event(),
            advance=lambda _: None,
        )
        return state


def _select(tree: Node, names: str | Iterable[str], where: str) -> Node:
    patterns = [names] if isinstance(names, str) else list(names)
    selection = _Selection(patterns)
    found, kept = selection.prune(tree, ())
    missing = [pattern for pattern in patterns if pattern not in selection.matched]
    if missing:
        raise NotFoundError(f"nothing in {where} matches {', '.join(map(repr, missing))}")
    return kept if found else _emptied(tree)


class _Selection:
    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        self.matched: set[str] = set()

    def prune(self, node: Node, path: TreePath) -> tuple[bool, Node]:
        """Whether anything is left of a node, and what."""
        if len(path) > values.MAX_DEPTH:
            raise FormatError(f"the tree is nested more than {values.MAX_DEPTH} levels deep")
        text = path_text(path)
        inner = children(node)
        matches = {p for p in self.patterns if text == p or fnmatchcase(text, p)}
        self.matched |= matches
        kept = []
        # Below a match the walk goes on: other patterns may match nothing else.
        for key, child in inner or ():
            found, part = self.prune(child, (*path, key_token(key)))
            if found:
                kept.append((key, part))
        if matches:
            return True, node
        return bool(kept), _with_children(node, kept) if kept else None


def _with_children(node: Node, kept: Sequence[tuple[Node, Node]]) -> Node:
    if isinstance(node, list):
        return [child for _, child in kept]
    assert isinstance(node, dict), "only containers have children"
    if "$" not in node:
        return {str(key): child for key, child in kept}
    items = [[key, child] for key, child in kept] if is_mapping(node) else [child for _, child in kept]
    return {**node, "items": items}


def _emptied(tree: Node) -> Node:
    return _with_children(tree, ()) if children(tree) is not None else None


class Made:
    """Makes the tensors and arrays that a tree refers to, yet to be filled."""

    def __init__(self, view: View, allow_pickle: bool) -> None:
        self.wants: list[Want] = []
        self._view = view
        self._allow_pickle = allow_pickle
        self._tensors: dict[Any, torch.Tensor] = {}
        self._arrays: dict[Any, npt.NDArray[Any]] = {}

    def leaf(self, node: dict[str, Any]) -> Any:
        tag = node["$"]
        if tag == "tensor":
            return self._tensor(node)
        if tag == "ndarray":
            return self._ndarray(node)
        if tag == "per_rank":
            return by_rank(node, lambda value: decode_inline(value, allow_pickle=self._allow_pickle))
        raise FormatError(f"unknown tag {tag!r:.100}; a newer version may know it")

    def _tensor(self, node: Mapping[str, Any]) -> torch.Tensor:
        array, text = self._view.array(node), self._view.text(node)
        key = (node["array"], array.shape)
        if key not in self._tensors:
            kind = torch_dtype(array.dtype, text)
            try:
                tensor = torch.empty(array.shape, dtype=kind)
            except RuntimeError as error:
                raise _too_large(text, math.prod(array.shape) * kind.itemsize) from error
            self._tensors[key] = tensor
            self.wants += stored_wants(array, tensor_shard(tensor, text))
        return self._tensors[key]

    def _ndarray(self, node: Mapping[str, Any]) -> npt.NDArray[Any]:
        entry, text = self._view.array(node), self._view.text(node)
        name, shape = node.get("numpy"), node.get("shape")
        if not isinstance(name, str) or not isinstance(shape, list) or not all(type(s) is int for s in shape):
            raise FormatError(f"{text!r}: malformed array")
        kind = numpy_dtype(name)
        known = from_numpy(kind)
        stored = (known.name, tuple(shape)) if known else ("uint8", (*shape, kind.itemsize))
        if stored != (entry.dtype, entry.shape):
            raise FormatError(f"{text!r}: a numpy array {name} {shape} does not fit its stored {entry.dtype} array")
        key = (node["array"], name)
        if key not in self._arrays:
            try:
                array = np.empty(shape, kind)
            except (MemoryError, ValueError) as error:
                raise _too_large(text, math.prod(shape) * kind.itemsize) from error
            self._arrays[key] = array
            self.wants += stored_wants(entry, ndarray_shard(array, text)[0])
        return self._arrays[key]


def _too_large(text: str, nbytes: int) -> InvalidStateError:
    return InvalidStateError(
        f"{text!r} takes {nbytes} bytes, which this machine does not have: name the parts to read, or load() it sharded"
    )
