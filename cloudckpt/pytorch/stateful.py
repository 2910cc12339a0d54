"""Objects whose state stands for them."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard


class Stateful(Protocol):
    """Modules, optimizers, schedulers, data loaders."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def is_stateful(obj: object) -> TypeGuard[Stateful]:
    # Not isinstance() with the protocol: it is asked about every plain value, and takes 30 times as long.
    return (
        callable(getattr(obj, "state_dict", None))
        and callable(getattr(obj, "load_state_dict", None))
        and not isinstance(obj, type)
    )
