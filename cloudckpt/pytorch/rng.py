"""The random number generators of one rank: torch's on CPU and device, numpy's legacy global one, ``random``'s."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import values
from cloudckpt.format.tree import key_token
from cloudckpt.pytorch.per_rank import encode_inline


def rng_state() -> dict[str, Any]:
    """``device``: None, or the accelerator's kind and the state of the current device's generator."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002  # the global generator is what training code draws from
        "python": _python_state(random.getstate()),
        "device": _device_state(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on where ``rng_state()`` was taken. Raises InvalidStateError if it is none."""
    try:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        _set_device_state(state)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidStateError(
            f"not the state of random number generators: {type(error).__name__}: {error}"
        ) from error


def derived_rng_state(states: Sequence[Any], rank: int, world_size: int) -> dict[str, Any]:
    """The rule for another number of ranks: new streams, seeded by a hash over all saved states, rank and world size.

    So every rank has a stream of its own, the same one whenever this checkpoint is loaded on as many ranks. No rank
    goes on with a saved stream: which of them would be left out, or used twice?
    """
    if rank == 0:
        warnings.warn(
            f"the states of the random number generators were saved by {len(states)} ranks and are loaded by "
            f"{world_size}: every rank starts a new stream, derived from all of them and from its rank",
            stacklevel=2,
        )
    saved = key_token(values.encode([*states], leaf=encode_inline))
    base = hashlib.sha256(f"{rank} {world_size} {saved}".encode()).digest()
    seed = int.from_bytes(base[:8], "little")
    return {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "numpy": np.random.RandomState(np.frombuffer(base, dtype="<u4")).get_state(),
        "python": _python_state(random.Random(seed).getstate()),
        "device": {"seed": seed},
    }


def _python_state(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The 625 words as an array, which takes half the room in the manifest."""
    version, words, gauss = state
    return version, np.array(words, dtype=np.uint32), gauss


def _device_module() -> tuple[str, Any] | None:
    """The accelerator's kind and its module, such as ``torch.cuda``; None without one or without a generator."""
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(device)
    return (device.type, module) if hasattr(module, "get_rng_state") else None


def _device_state() -> dict[str, Any] | None:
    found = _device_module()
    return None if found is None else {"kind": found[0], "state": found[1].get_rng_state()}


def _set_device_state(state: dict[str, Any]) -> None:
    found, saved = _device_module(), state["device"]
    if found is None:
        return
    kind, module = found
    if saved is not None and saved.get("kind") == kind:
        module.set_rng_state(saved["state"])
        return
    if saved is None or "seed" not in saved:
        # Another kind of device, or none: its state means nothing here. torch's CPU stream differs per rank.
        was = "no device" if saved is None else f"a device of kind {saved['kind']!r}"
        warnings.warn(
            f"the state of random number generators was saved with {was}: the generator of {kind!r} is seeded anew "
            "from the state of torch's CPU generator",
            stacklevel=2,
        )
        seed = int.from_bytes(hashlib.sha256(state["torch"].numpy().tobytes()).digest()[:8], "little")
    else:
        seed = saved["seed"]
    module.manual_seed(seed % 2**63)
