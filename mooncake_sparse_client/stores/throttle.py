"""ThrottledStore: a wrapper that lets a store be asked only so often, and for so many bytes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from asyncio_throttle.throttler import Throttler

from ..checks import whole_number
from ..errors import ConfigError
from .base import Failure, GetItem, PutItem, RemoveOutcome, Store
from .wrapping import WrappedStore

#: How much of the byte rate may be saved up while nothing moves. A loop that is late to wake loses none of it.
_BURST_SECONDS: Final = 0.1


class ThrottledStore(WrappedStore):
    """At most so many requests to ``store``, and bytes of values, a second; first come first served.

    ``requests_per_second``: in any second. A request is one batch, whatever its size. ``bytes_per_second``: of
    values put and asked for. It is kept on average: over any time, what goes beyond it is at most a tenth of a
    second's worth and one batch. A batch is never cut; a large one makes those after it wait for what it took.
    None: without that limit, and one of the two must be given. ``health`` and ``aclose`` are not counted. What moves
    no values waits for no bytes, and so may pass by what does.

    Raises ``ConfigError``.
    """

    def __init__(
        self, store: Store, requests_per_second: int | None = None, bytes_per_second: int | None = None
    ) -> None:
        if requests_per_second is None and bytes_per_second is None:
            raise ConfigError("a throttle without a rate: give requests_per_second, bytes_per_second or both")
        super().__init__(store)
        self._requests = None if requests_per_second is None else _RequestRate(requests_per_second)
        self._bytes = None if bytes_per_second is None else _ByteRate(bytes_per_second)

    async def _wait(self) -> None:
        if self._requests is not None:
            await self._requests.wait()

    async def _wait_to_move(self, items: Sequence[PutItem] | Sequence[GetItem]) -> None:
        if self._bytes is None:
            await self._wait()
            return
        async with self._bytes.turn(nbytes_of(items)):
            await self._wait()

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        await self._wait()
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        await self._wait_to_move(items)
        return await super().put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        await self._wait_to_move(items)
        return await super().get(items)

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        await self._wait()
        return await super().remove(keys, force=force)

    async def remove_prefix(self, prefix: str, *, force: bool = False) -> int:
        await self._wait()
        return await super().remove_prefix(prefix, force=force)


class _RequestRate:
    """A place for each request, at most so many in any second."""

    def __init__(self, requests_per_second: int) -> None:
        rate = whole_number(requests_per_second, "requests_per_second", ConfigError, least=1)
        self._throttler = Throttler(rate_limit=rate)
        # The throttler's waiters poll, and the luckiest goes first. A fair lock in front makes them queue in
        # order, and only the first of them polls.
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        async with self._turn:
            await self._throttler.acquire()  # type: ignore[no-untyped-call]


class _ByteRate:
    """A token bucket, written down as the time at which it is out of debt."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = whole_number(bytes_per_second, "bytes_per_second", ConfigError, least=1)
        self._free_at = -math.inf
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until ``nbytes`` may move. They count from when the block ends; nothing does if it raises."""
        clock = asyncio.get_running_loop()
        async with self._turn:
            debt = self._free_at - clock.time()
            if debt > 0:
                await asyncio.sleep(debt)
            yield
            self._free_at = max(self._free_at, clock.time() - _BURST_SECONDS) + nbytes / self._rate


def nbytes_of(items: Sequence[PutItem] | Sequence[GetItem]) -> int:
    """The bytes of a batch. What is no buffer counts nothing here: the store says what is wrong with it."""
    total: int | None = getattr(items, "nbytes", None)
    if total is not None:
        return total
    return sum(getattr(buffer, "nbytes", 0) for item in items for buffer in item.buffers)
