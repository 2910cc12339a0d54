"""Names of a model's tensors without the prefixes of wrappers, in any nesting.

What is a wrapper is decided by its class. A submodule that is only named like a wrapper's attribute keeps its name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.plan.names import GlobalNames
from cloudckpt.pytorch.stateful import Stateful

_WRAPPERS = (
    # module, class, attribute of the wrapped module, whether state_dict() shows the attribute
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", True),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module", True),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module", True),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        False,
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module", False),
)


def wrapped_in(module: torch.nn.Module) -> tuple[str, bool] | None:
    """The attribute that holds what a wrapper wraps, and whether state_dict() shows it; None for other modules."""
    for home, name, attribute, shown in _WRAPPERS:
        # A class whose module was never imported has no instances; importing these costs seconds.
        kind = getattr(sys.modules.get(home), name, None)
        if kind is not None and isinstance(module, kind):
            return attribute, shown
    return None


@dataclass(frozen=True, eq=False)
class ModelPart:
    """One module, and what its keys are called: in ``state_dict()`` (raw), and without wrappers, globally (name)."""

    module: torch.nn.Module
    prefixes: dict[str, str]
    rename: Callable[[str], str]

    @staticmethod
    def of(module: Any, rename: Callable[[str], str]) -> ModelPart:
        if not isinstance(module, torch.nn.Module):
            kind = type(module)
            raise InvalidStateError(
                f"a model must be a torch.nn.Module or a sequence of these, not {kind.__module__}.{kind.__qualname__}"
            )
        return ModelPart(module, {raw: clean for _, raw, clean in _walk(module, "", "")}, rename)

    def state(self) -> dict[str, tuple[str, Any]]:
        """Name to the raw key and the value.

        Raises InvalidStateError where two keys get one name, and where global numbers are given but nothing has any.
        """
        named: dict[str, tuple[str, Any]] = {}
        held = self.module.state_dict()
        if isinstance(self.rename, GlobalNames):
            self.rename.check(map(self.bare, held))
        for raw, value in held.items():
            name = self.name_of(raw)
            if name in named:
                raise InvalidStateError(f"{named[name][0]!r} and {raw!r} of the model are both called {name!r}")
            named[name] = raw, value
        return named

    def name_of(self, raw: str) -> str:
        return self.rename(self.bare(raw))

    def bare(self, raw: str) -> str:
        """Without wrappers, not renamed."""
        prefix = raw
        while prefix not in self.prefixes:
            # The root's prefix is "", so this ends there at the latest.
            prefix = prefix[: prefix.rstrip(".").rfind(".") + 1]
        return self.prefixes[prefix] + raw[len(prefix) :]

    def parameter_names(self) -> Iterator[tuple[torch.nn.Parameter, str]]:
        """Every parameter under every name that it has."""
        for module, _, clean in _walk(self.module, "", ""):
            for name, parameter in module._parameters.items():  # named_parameters() shows wrappers
                if parameter is not None:
                    yield parameter, self.rename(clean + name)


def object_state(obj: Stateful) -> Any:
    """``obj.state_dict()``, that of a wrapped module under the names of the bare one."""
    state = obj.state_dict()
    if not isinstance(obj, torch.nn.Module) or not any(wrapped_in(module) for module in obj.modules()):
        return state
    part = ModelPart.of(obj, lambda name: name)
    return OrderedDict((name, value) for name, (_, value) in part.state().items())


def load_object(obj: Stateful, state: Any) -> None:
    """``obj.load_state_dict()`` of what ``object_state`` returned."""
    if isinstance(obj, torch.nn.Module) and any(wrapped_in(module) for module in obj.modules()):
        part = ModelPart.of(obj, lambda name: name)
        state = {raw: state.get(name, value) for name, (raw, value) in part.state().items()}
    obj.load_state_dict(state)


def _walk(module: torch.nn.Module, raw: str, clean: str) -> Iterator[tuple[torch.nn.Module, str, str]]:
    """Modules with their prefix in ``state_dict()`` and their prefix without wrappers, shared ones repeatedly."""
    yield module, raw, clean
    wrapper = wrapped_in(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        if wrapper is not None and name == wrapper[0]:
            yield from _walk(child, f"{raw}{name}." if wrapper[1] else raw, clean)
        else:
            yield from _walk(child, f"{raw}{name}.", f"{clean}{name}.")
