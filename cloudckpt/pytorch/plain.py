"""Torch's own plain values, beside those of format/values.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cloudckpt.format import values


def _size_from(node: Mapping[str, Any]) -> torch.Size:
    dims = node["dims"]
    if type(dims) is not list or not all(type(d) is int for d in dims):
        raise ValueError("field 'dims' must be a list of ints")
    return torch.Size(dims)


def _enum_member(kind: type, prefix: str) -> Any:
    def read(node: Mapping[str, Any]) -> Any:
        value = getattr(torch, str(node["name"]).removeprefix(prefix), None)
        if type(value) is not kind:
            raise ValueError(f"torch has no {kind.__name__} {node['name']!r:.100}")
        return value

    return read


def _device_from(node: Mapping[str, Any]) -> torch.device:
    try:
        return torch.device(node["name"])
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _named(value: Any) -> dict[str, Any]:
    return {"name": str(value).removeprefix("torch.")}


values.register(torch.Size, "torch.Size", lambda size: {"dims": list(size)}, _size_from)
values.register(torch.device, "torch.device", _named, _device_from)
for _kind in (torch.dtype, torch.layout, torch.memory_format):
    values.register(_kind, f"torch.{_kind.__name__}", _named, _enum_member(_kind, "torch."))


def _reduced(tensor: torch.Tensor) -> Any:
    """Views are pickled without the memory around them, of which they would else take all along."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return NotImplemented
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.itemsize:
        return NotImplemented
    own: Any = tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)
    if type(tensor) is torch.nn.Parameter:
        own = torch.nn.Parameter(own, tensor.requires_grad)
    return own.__reduce_ex__(5)


values.register_reducer(torch.Tensor, _reduced)
