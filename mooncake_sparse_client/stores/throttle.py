"""ThrottledStore: a wrapper that lets a store be asked only so often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncio_throttle.throttler import Throttler

from ..core.results import Health
from .base import Failure, GetItem, PutItem, RemoveOutcome, Store


class ThrottledStore:
    """At most ``requests_per_second`` requests to ``store`` in any second, first come first served.

    A request is one batch, whatever its size. ``health`` and ``aclose`` are not counted.
    """

    def __init__(self, store: Store, requests_per_second: int) -> None:
        self._store = store
        self._throttler = Throttler(rate_limit=requests_per_second)
        # The throttler's waiters poll, and the luckiest goes first. A fair lock in front makes them queue in
        # order, and only the first of them polls.
        self._turn = asyncio.Lock()

    async def _wait(self) -> None:
        async with self._turn:
            await self._throttler.acquire()  # type: ignore[no-untyped-call]

    @property
    def max_value_bytes(self) -> int | None:
        return self._store.max_value_bytes

    @property
    def lease_seconds(self) -> float | None:
        return self._store.lease_seconds

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        await self._wait()
        return await self._store.exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        await self._wait()
        return await self._store.put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        await self._wait()
        return await self._store.get(items)

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        await self._wait()
        return await self._store.remove(keys, force=force)

    async def health(self) -> Health:
        return await self._store.health()

    async def aclose(self) -> None:
        await self._store.aclose()
