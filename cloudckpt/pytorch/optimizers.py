"""Optimizers that have not stepped yet have no state to fill: it is made after what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from cloudckpt.format import values
from cloudckpt.format.dtypes import DTYPES
from cloudckpt.format.tree import Node, children, holds_arrays, is_array, is_mapping
from cloudckpt.plan.view import View

BY_NAME = "keyed by parameter name (TrainingState)"
BY_NAME_IN_LISTS = "keyed by name, with param_groups as a list (get_optimizer_state_dict())"
BY_NUMBER = "keyed by number (optimizer.state_dict())"

LocalShape = Callable[[values.Path, Sequence[int]], tuple[int, ...]]
"""From the keys below the optimizer's state and a global shape to the shape that this rank has of it by rule."""

Cut = Callable[[tuple[int, ...]], tuple[int, ...]]
"""From a global shape to that of this rank's part, for plain tensors."""


def complete_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], node: Node, view: View, local_shape: LocalShape
) -> None:
    """Add to ``state`` (a fresh ``optimizer.state_dict()``) what only the checkpoint has, for parameters that exist.

    A stored tensor of which this rank holds its parameter's shape is laid out like the parameter; of
    others the rank holds what its rule says, or the whole. Where the parameter is another one by its shape,
    what is added has the parameter's, which does not fit what is stored.
    """
    params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    stored = dict(keyed(node)).get("state")
    for index, entries in keyed(stored):
        if type(index) is int and 0 <= index < len(params) and index not in state["state"]:
            param, group = params[index]
            cuts = {name: partial(local_shape, ("state", index, name)) for name, _ in keyed(entries)}
            misshapen = _misshapen(keyed(entries), view, param, cuts)
            state["state"][index] = {
                name: torch.zeros_like(param, dtype=getattr(torch, view.array(entry).dtype)).detach()
                if name in misshapen
                else blank(name, entry, view, param, group, cuts[name])
                for name, entry in keyed(entries)
            }


def _misshapen(
    entries: Sequence[tuple[Any, Node]], view: View, param: torch.Tensor, cuts: Mapping[Any, Cut]
) -> set[Any]:
    """Names of what was laid out like a parameter of another shape: the parameter at this position is another one.

    Told from state of a shape of its own: that has other dims (or an extent of 1 for a whole dim, as Adafactor's),
    or several shapes, as the two sides of Shampoo, or stands beside state of the parameter's shape.
    """
    own = tuple(param.shape)
    shapes: dict[Any, tuple[int, ...]] = {}
    for name, node in entries:
        if is_array(node) and node["$"] == "tensor" and view.array(node).dtype in DTYPES:
            shape = view.shape_for(node, own)
            shapes[name] = shape if isinstance(param, DTensor) else cuts[name](shape)
    alike = {name: shape for name, shape in shapes.items() if shape and len(shape) == len(own)}
    distinct = {*alike.values()}
    if len(distinct) != 1 or own in distinct or not param.numel():
        return set()
    (shape,) = distinct
    return set() if any(a == 1 < b for a, b in zip(shape, own, strict=True)) else {*alike}


def group_differences(state: dict[str, Any], node: Node, text: str) -> dict[str, tuple[str, str]]:
    """What ``load_state_dict`` would refuse once everything else is loaded: other parameter groups."""
    differences = convention_differences(state, node, text)
    if differences:
        return differences
    stored = [len(children(dict(keyed(group)).get("params")) or ()) for group in _items(node, "param_groups")]
    own = [len(group["params"]) for group in state.get("param_groups", [])]
    if stored == own:
        return {}
    return {f"{text}.param_groups": (f"groups of {stored} parameters", f"groups of {own} parameters")}


def convention_differences(state: Mapping[Any, Any], node: Node, text: str) -> dict[str, tuple[str, str]]:
    """Where the state of an optimizer is keyed otherwise than what is stored: its path, and the two conventions."""
    if "state" not in state or "param_groups" not in state:
        return {}
    stored, own = convention(node), _convention_of(state["state"], state["param_groups"])
    return {text: (stored, own)} if stored and own and stored != own else {}


def convention(node: Node) -> str | None:
    """How a stored optimizer's state is keyed; None for what is no optimizer's state, or says nothing."""
    parts = dict(keyed(node))
    if "state" not in parts or "param_groups" not in parts:
        return None
    groups: Any = {} if is_mapping(parts["param_groups"]) else [dict(keyed(g)) for g in _items(node, "param_groups")]
    for group in groups:
        group["params"] = [param for _, param in children(group.get("params")) or ()]
    return _convention_of(dict(keyed(parts["state"])), groups)


def _convention_of(state: Any, groups: Any) -> str | None:
    if isinstance(groups, Mapping):
        return BY_NAME
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        return None
    named = [params for g in groups if isinstance(g, Mapping) and isinstance(params := g.get("params"), (list, tuple))]
    kinds = {type(key) for key in state} or {type(key) for params in named for key in params}
    return {frozenset({int}): BY_NUMBER, frozenset({str}): BY_NAME_IN_LISTS}.get(frozenset(kinds))


def _items(node: Node, name: str) -> list[Node]:
    return [child for _, child in children(dict(keyed(node)).get(name)) or ()]


def keyed(node: Node) -> list[tuple[Any, Node]]:
    """The children of a mapping or list whose keys are strings or ints."""
    return [(key, child) for key, child in children(node) or () if isinstance(key, (str, int))]


def blank(name: str, node: Node, view: View, param: torch.Tensor, group: Mapping[str, Any], cut: Cut) -> Any:
    """A target for what is stored as ``name`` of a parameter; its values do not matter."""
    if not is_array(node):
        return _blank_container(name, node, view, param, group, cut) if holds_arrays(node) else None
    if node["$"] != "tensor":
        return None
    entry = view.array(node)
    dtype = getattr(torch, entry.dtype) if entry.dtype in DTYPES else param.dtype
    device = param.to_local().device if isinstance(param, DTensor) else param.device
    if name == "step" and not entry.shape:
        # torch's optimizers count on the host, unless the whole step runs on the device.
        return torch.zeros((), dtype=dtype, device=device if group.get("capturable") or group.get("fused") else "cpu")
    shape = view.shape_for(node, tuple(param.shape))
    if not isinstance(param, DTensor):
        shape = cut(shape)
    if tuple(param.shape) == shape:
        return torch.zeros_like(param, dtype=dtype).detach()
    whole = torch.zeros(shape, dtype=dtype, device=device if shape else "cpu")
    if isinstance(param, DTensor) and shape:
        # As torch's own operations make it (Adafactor): plain tensors and DTensors do not mix.
        mesh = param.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole


def _blank_container(name: str, node: Node, view: View, param: torch.Tensor, group: Mapping[str, Any], cut: Cut) -> Any:
    """Lists and dicts of tensors, as optimizers with a history keep them."""
    if is_mapping(node):
        inner = {values.decode(key): child for key, child in children(node) or ()}
        return {key: blank(str(key), child, view, param, group, cut) for key, child in inner.items()}
    return [blank(name, child, view, param, group, cut) for _, child in children(node) or ()]
