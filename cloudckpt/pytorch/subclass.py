"""Tensor subclasses that are made of other tensors: stored as those, never as the values that they stand for."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.containers import TensorParts
from cloudckpt.format.tree import Node, children, key_token

_OWN = frozenset({"DTensor", "AsyncCollectiveTensor"})
"""Torch's wrappers that are tensors of a state in their own right."""


def is_made_of_tensors(obj: object) -> bool:
    """Whether it has ``__tensor_flatten__``, as quantised tensors do."""
    return type(obj).__name__ not in _OWN and is_traceable_wrapper_subclass(obj)


def tensor_parts(tensor: torch.Tensor, text: str) -> TensorParts:
    """The inner tensors themselves, not copies. Raises InvalidStateError for what a file could not rebuild."""
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    fault = f"{text!r}: unsupported tensor subclass {kind}"
    if tensor.layout is not torch.strided or not all(type(n) is int for n in tensor.shape):
        raise InvalidStateError(
            f"{fault}: layout {tensor.layout}, shape {tuple(tensor.shape)}; store its inner tensors"
        )
    try:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}
    except Exception as error:  # anybody's class may raise anything
        raise InvalidStateError(f"{fault}: its __tensor_flatten__ failed: {error}") from error
    try:
        node = values.encode(context)
    except InvalidStateError as error:
        raise InvalidStateError(f"{fault}: its context cannot be stored: {error}") from error
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorParts(inner, kind=kind, dtype=dtype, shape=tensor.shape, context=node)


def check_uncut(node: Node, parts: TensorParts, text: str) -> None:
    """Raises InvalidStateError if rules cut an inner tensor: what the whole would then be only the class can tell."""
    cut = [str(key) for key, child in children(node) or () if "layout" in child]
    if cut:
        raise InvalidStateError(
            f"{text!r}: unsupported tensor subclass {parts.kind}: rules cut its inner tensors {', '.join(cut)}; "
            "store these instead, as ShardedTensors"
        )


def stored_parts(node: Node) -> TensorParts | None:
    """What a node says of a subclass, without its tensors; None for any other node, FormatError if malformed."""
    if not isinstance(node, dict) or node.get("$") != TensorParts.__name__:
        return None
    parts: TensorParts = values.decode(node, leaf=lambda _: None)
    return parts


def kind_text(parts: TensorParts) -> str:
    """All that must be equal, but for dtype and shape, before a subclass is filled: class, attributes, context."""
    return f"{parts.kind}({', '.join(sorted(parts))}) with context {key_token(parts.context_node)}"
