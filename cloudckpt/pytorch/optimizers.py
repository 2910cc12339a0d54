"""Optimizers that have not stepped yet have no state to fill: it is made after what is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cloudckpt.format import values
from cloudckpt.format.dtypes import DTYPES
from cloudckpt.format.tree import Node, children, is_array
from cloudckpt.plan.rename import View

LocalShape = Callable[[values.Path, Sequence[int]], tuple[int, ...]]
"""From the keys below the optimizer's state and a global shape to the shape that this rank has of it by rule."""


def complete_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], node: Node, view: View, local_shape: LocalShape
) -> None:
    """Add to ``state`` (a fresh ``optimizer.state_dict()``) what only the checkpoint has, for parameters that exist.

    A stored tensor of which this rank holds its parameter's shape is laid out like the parameter; of
    others the rank holds what its rule says, or the whole.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stored = dict(_children(node)).get("state")
    for index, entries in _children(stored):
        if type(index) is int and 0 <= index < len(params) and index not in state["state"]:
            state["state"][index] = {
                name: _blank(params[index], entry, view, ("state", index, name), local_shape)
                for name, entry in _children(entries)
            }


def group_differences(state: dict[str, Any], node: Node, text: str) -> dict[str, tuple[str, str]]:
    """What ``load_state_dict`` would refuse once everything else is loaded: other parameter groups."""
    stored = [len(children(dict(_children(group)).get("params")) or ()) for group in _items(node, "param_groups")]
    own = [len(group["params"]) for group in state.get("param_groups", [])]
    if stored == own:
        return {}
    return {f"{text}.param_groups": (f"groups of {stored} parameters", f"groups of {own} parameters")}


def _items(node: Node, name: str) -> list[Node]:
    return [child for _, child in children(dict(_children(node)).get(name)) or ()]


def _children(node: Node) -> list[tuple[Any, Node]]:
    return [(key, child) for key, child in children(node) or () if isinstance(key, (str, int))]


def _blank(param: torch.Tensor, node: Node, view: View, keys: values.Path, local_shape: LocalShape) -> Any:
    """A target of the right kind; its values do not matter."""
    if not is_array(node) or node["$"] != "tensor":
        return None
    entry = view.array(node)
    dtype = getattr(torch, entry.dtype) if entry.dtype in DTYPES else param.dtype
    shape = view.shape_for(node, tuple(param.shape))
    if not isinstance(param, DTensor):
        shape = local_shape(keys, shape)
    if tuple(param.shape) == shape:
        return torch.zeros_like(param, dtype=dtype).detach()
    # Step counters stay on the host, where torch's optimizers make them.
    local = param.to_local() if isinstance(param, DTensor) else param
    return torch.zeros(shape, dtype=dtype, device="cpu" if not shape else local.device)
