"""What is the same for all stores that zarr may only read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype


class ReadOnlyStore(Store):
    """Subclasses say what there is: ``get``, ``exists``, ``list``, and ``list_dir`` where they support listing."""

    def __init__(self) -> None:
        super().__init__(read_only=True)

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return await asyncio.gather(*(self.get(key, prototype, byte_range) for key, byte_range in key_ranges))

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002  # zarr's signature
        self._check_writable()

    async def delete(self, key: str) -> None:  # noqa: ARG002  # zarr's signature
        self._check_writable()

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in self.list():
            if key.startswith(prefix):
                yield key
