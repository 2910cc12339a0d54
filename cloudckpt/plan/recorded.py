"""What a checkpoint records of a tensor's layout (see `rules.Layout.encode`), after rename rules rearranged the tensor.

A tensor that was cut by rule along a dim must not be read there with other segments. That holds for what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from cloudckpt.plan.rules import decode_recorded

Recorded: TypeAlias = dict[str, Any] | None


def recorded_of(node: Mapping[str, Any], path: str) -> Recorded:
    """Of a leaf of the tree. FormatError if it is malformed."""
    if node.get("layout") is None:
        return None
    axes, segments = decode_recorded(node["layout"], path)
    return _made({axis: [dim, size] for axis, dim, size in axes}, segments)


def permuted(recorded: Recorded, dims: Sequence[int]) -> Recorded:
    """Dim k of the result was dim ``dims[k]``."""
    return _moved(recorded, [*dims].index)


def unstacked(recorded: Recorded, dim: int) -> Recorded:
    """Of each tensor that stood along ``dim``."""
    return _moved(recorded, lambda d: None if d == dim else d - (d > dim))


def stacked(recorded: Sequence[Recorded], dim: int, shapes: Sequence[tuple[int, ...]]) -> Recorded:  # noqa: ARG001  # as `joined`
    """Of tensors that stand along a new dim: they are alike."""
    return _moved(next((r for r in recorded if r is not None), None), lambda d: d + (d >= dim))


def _moved(recorded: Recorded, place: Callable[[int], int | None]) -> Recorded:
    """``place``: where a dim has gone, None for one that is no more."""
    if recorded is None:
        return None
    axes = {axis: [place(dim), size] for axis, (dim, size) in recorded["axes"].items()}
    segments = {place(int(dim)): sizes for dim, sizes in recorded.get("segments", {}).items()}
    return _made(
        {axis: cut for axis, cut in axes.items() if cut[0] is not None},
        {dim: sizes for dim, sizes in segments.items() if dim is not None},
    )


def parted(recorded: Recorded, dim: int, extents: Sequence[int]) -> list[Recorded]:
    """Of the parts of these extents along a dim, one after another."""
    if recorded is None:
        return [None] * len(extents)
    segments = {int(d): sizes for d, sizes in recorded.get("segments", {}).items()}
    ends = [*accumulate(segments.get(dim, ()))]
    found = []
    for start, stop in zip(accumulate(extents, initial=0), accumulate(extents), strict=False):
        own = [min(b, stop) - max(a, start) for a, b in zip([0, *ends], ends, strict=False)]
        kept = [size for size in own if size > 0]
        found.append(_made(recorded["axes"], {**segments, dim: kept}))
    return found


def joined(recorded: Sequence[Recorded], dim: int, shapes: Sequence[tuple[int, ...]]) -> Recorded:
    """Of tensors that are put one behind the other along ``dim``."""
    told = [r for r in recorded if r is not None]
    axes = {axis: cut for r in told for axis, cut in r["axes"].items()}
    segments = {int(d): sizes for r in told for d, sizes in r.get("segments", {}).items()}
    if any(cut[0] == dim for cut in axes.values()):
        parts = [
            (r or {}).get("segments", {}).get(str(dim)) or [shape[dim]]
            for r, shape in zip(recorded, shapes, strict=True)
        ]
        segments[dim] = [size for sizes in parts for size in sizes if size]
    return _made(axes, segments)


def _made(axes: Mapping[str, Any], segments: Mapping[int, Any]) -> Recorded:
    several = {str(dim): list(sizes) for dim, sizes in segments.items() if len(sizes) > 1}
    if not axes:
        return None
    return {"axes": dict(axes)} | ({"segments": several} if several else {})
