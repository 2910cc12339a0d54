"""Where the field tests save to: local folders and S3 servers, by both engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudckpt
from cloudckpt.config import Config
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve


@dataclass(frozen=True)
class Place:
    """An empty root, the options to reach it and the engine to use."""

    root: str
    options: Mapping[str, Any] | None = None
    engine: str = "auto"

    def url(self, name: str = "step-1") -> str:
        return f"{self.root}/{name}"

    def config(self, **settings: Any) -> Config:
        return Config(**{"engine": self.engine, "retry_deadline_s": 20.0, "request_timeout_s": 10.0, **settings})

    def save(self, state: Any, name: str = "step-1", *, config: Config | None = None, **arguments: Any) -> Any:
        return cloudckpt.save(
            state, self.url(name), storage_options=self.options, config=config or self.config(), **arguments
        )

    def async_save(self, state: Any, name: str = "step-1", **arguments: Any) -> cloudckpt.PendingSave:
        arguments.setdefault("config", self.config())
        return cloudckpt.async_save(state, self.url(name), storage_options=self.options, **arguments)

    def load(self, state: Any, name: str = "step-1", *, config: Config | None = None) -> Any:
        return cloudckpt.load(state, self.url(name), storage_options=self.options, config=config or self.config())

    def read(self, name: str = "step-1") -> Any:
        return cloudckpt.read(self.url(name), storage_options=self.options, config=self.config())

    def store(self, name: str = "step-1") -> Store:
        return resolve(self.url(name), self.options, self.config())

    def keys(self, name: str = "step-1") -> list[str]:
        store = self.store(name)
        try:
            return sorted(found.key for found in store.list(""))
        finally:
            store.close()
