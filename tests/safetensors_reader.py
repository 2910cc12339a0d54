"""What a reader like transformers sees of an export: one file if there is one, else what the index leads to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from cloudckpt.errors import NotFoundError
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def exported(url: str | Path, options: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor] | None:
    """All tensors; None where there is nothing that can be loaded."""
    store = resolve(url, options)
    try:
        return _resolved(store)
    except NotFoundError:
        return None
    finally:
        store.close()


def _resolved(store: Store) -> dict[str, torch.Tensor]:
    try:
        return load(store.get(SINGLE))
    except NotFoundError:
        index = json.loads(store.get(INDEX))
    files = {name: load(store.get(name)) for name in sorted({*index["weight_map"].values()})}
    found = {key: files[name][key] for key, name in index["weight_map"].items()}
    assert {key for tensors in files.values() for key in tensors} == {*found}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def keys(url: str | Path, options: Mapping[str, Any] | None = None) -> list[str]:
    store = resolve(url, options)
    try:
        return sorted(found.key for found in store.list(""))
    finally:
        store.close()
