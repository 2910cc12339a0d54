"""How an export cuts tensors into the items of a DCP checkpoint, and shares those out among files. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloudckpt.format.box import Box
from cloudckpt.format.tree import Node, children, is_array, is_dict, key_token, tree_keys
from cloudckpt.plan.virtual import VirtualArray, split

ITEM_BYTES = 256 * 1024 * 1024
"""Who loads a part of an item, loads it whole."""
FILE_BYTES = 4 * 1024 * 1024 * 1024
FILES_PER_RANK = 4
"""At least, as far as there are enough bytes, so that ranks end at about the same time."""
SMALL_FILE_BYTES = 64 * 1024 * 1024

DcpPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class FlatLeaf:
    """One key of DCP's: a tensor, or all that is pickled as one value. ``path``: of it in the state dict."""

    path: DcpPath
    node: Node

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


def flat_leaves(node: Node, path: DcpPath = ()) -> Iterator[FlatLeaf]:
    """As DCP flattens a state dict: dicts, and lists that hold tensors or dicts, nothing else. Keys become strings."""
    if is_dict(node) and not is_array(node):
        for key, child in children(node) or ():
            (plain,) = tree_keys((key_token(key),))
            yield from flat_leaves(child, (*path, str(plain)))
    elif isinstance(node, list) and _is_walked(node):
        for index, child in enumerate(node):
            yield from flat_leaves(child, (*path, index))
    else:
        yield FlatLeaf(path, node)


def _is_walked(nodes: Sequence[Node]) -> bool:
    return any(
        is_dict(node) or (is_array(node) and node["$"] == "tensor") or (isinstance(node, list) and _is_walked(node))
        for node in nodes
    )


def item_boxes(shape: tuple[int, ...], itemsize: int, most_bytes: int = ITEM_BYTES) -> list[Box]:
    """Boxes of whole rows of at most so many bytes each, that tile a tensor; of an empty one itself."""
    most = max(1, most_bytes // itemsize)
    if math.prod(shape) <= most:
        return [Box((0,) * len(shape), shape)]
    rows = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    dim = next(d for d, row in enumerate(rows) if row <= most)
    count = -(-shape[dim] // (most // rows[dim]))
    cuts = [shape[dim] * i // count for i in range(count + 1)]
    return [
        Box((*index, a, *(0,) * (len(shape) - dim - 1)), (*(1,) * dim, b - a, *shape[dim + 1 :]))
        for index in itertools.product(*map(range, shape[:dim]))
        for a, b in itertools.pairwise(cuts)
    ]


def within(array: VirtualArray, box: Box) -> VirtualArray:
    """The part of an array that a box is."""
    for dim, (offset, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        if extent != array.shape[dim]:
            array = split(array, dim, [offset, extent, array.shape[dim] - offset - extent])[1]
    return array


def groups(sizes: Sequence[int], num_ranks: int) -> list[range]:
    """Neighbouring items for each file."""
    share = sum(sizes) // (num_ranks * FILES_PER_RANK)
    most = min(FILE_BYTES, max(SMALL_FILE_BYTES, share))
    found: list[range] = []
    start = filled = 0
    for number, size in enumerate(sizes):
        if number > start and filled + size > most:
            found.append(range(start, number))
            start, filled = number, 0
        filled += size
    return [*found, range(start, len(sizes))] if sizes else found
