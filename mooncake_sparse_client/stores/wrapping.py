"""WrappedStore: what every wrapper around a store is made from."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.results import Health
from .base import Failure, GetItem, PutItem, RemoveOutcome, Store
from .regions import StoreMemory


class WrappedStore:
    """Passes every call on to ``inner``. A wrapper overrides those that it has something to do with."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def max_value_bytes(self) -> int | None:
        return self.inner.max_value_bytes

    @property
    def lease_seconds(self) -> float | None:
        return self.inner.lease_seconds

    @property
    def memory(self) -> StoreMemory:
        return self.inner.memory

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        return await self.inner.exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        return await self.inner.put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        return await self.inner.get(items)

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        return await self.inner.remove(keys, force=force)

    async def remove_prefix(self, prefix: str, *, force: bool = False) -> int:
        return await self.inner.remove_prefix(prefix, force=force)

    async def health(self) -> Health:
        return await self.inner.health()

    async def aclose(self) -> None:
        await self.inner.aclose()
