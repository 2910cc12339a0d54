"""A tensor subclass as torchao has them for optimizer states: 8-bit codes, and a scale for each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch


class Codes8(torch.Tensor):
    """Stands for ``(codes - 128) * scale``, float32, by blocks."""

    codes: torch.Tensor
    scale: torch.Tensor
    signed: object

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, signed: object, shape: Sequence[int] | None = None
    ) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape if shape is None else tuple(shape), dtype=torch.float32, device=codes.device
        )
        return made

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, signed: object, shape: Sequence[int] | None = None
    ) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"signed": self.signed, "bits": torch.uint8}

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, outer_size: Sequence[int], outer_stride: Any
    ) -> Codes8:
        return Codes8(inner["codes"], inner["scale"], context["signed"], outer_size)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            source = args[0]
            return cls(source.codes, source.scale, source.signed, source.shape)
        raise AssertionError(f"{func} would need the values of a quantised tensor")


class OtherCodes8(Codes8):
    """Another class of the same parts."""
