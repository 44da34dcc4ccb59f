"""The paged memory that a client has made known to its store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..block_memory import PagedMemory
from ..errors import ClientClosedError, InvalidBufferError
from ..identity import Identity
from ..paged import PagedKVCache
from ..stores.regions import StoreMemory
from ..waiting import settled


@dataclass(frozen=True, slots=True)
class Registered:
    """Paged memory that the store was told of."""

    #: Whether values move to and from it without a copy. Else they are staged: the store cannot reach it, or would
    #: take longer for their pieces than one copy takes.
    direct: bool
    #: The most pieces that a value has there, its header counted.
    pieces: int
    spans: tuple[tuple[int, int], ...]


class Registry:
    """Registers each memory once, and lets go of all when the client is closed."""

    def __init__(self, memory: StoreMemory, identity: Identity) -> None:
        self._memory = memory
        self._identity = identity
        #: What is registered; holds the owners alive.
        self._known: dict[PagedMemory, Registered] = {}
        self._closed = False

    async def register(self, cache: PagedKVCache) -> Registered:
        """Tell the store of the memory, once."""
        self._check_fit(cache)
        known = self._known.get(cache.memory)
        if known is not None:
            return known
        if cache.on_device and not self._memory.reaches_devices:
            raise InvalidBufferError(
                "this store cannot reach an accelerator's memory: its native library is not a CUDA build, or the "
                "mode is 'shared'; use another build (mooncake-transfer-engine), or memory that the CPU can read"
            )
        spans: list[tuple[int, int]] = []
        direct = True
        try:
            for address, nbytes in cache.spans():
                if await self._memory.register(address, nbytes):
                    spans.append((address, nbytes))
                else:
                    direct = False
            if not direct and cache.on_device:
                raise InvalidBufferError(
                    "this store cannot reach the device's memory, and the CPU cannot copy it; use another mode"
                )
        except BaseException:
            await self._let_go(spans)
            raise
        known = self._known.get(cache.memory)
        if self._closed or known is not None:
            await self._let_go(spans)  # somebody else was quicker, and holds it already
        if self._closed:
            raise ClientClosedError.during_a_call()
        if known is None:
            headers = bool(self._identity.value_format.header_size)
            pieces = [len(cache.piece_sizes(group)) + headers for group in range(len(cache.page_sizes))]
            gathers = max(pieces) > 1 and sum(cache.page_sizes) < self._memory.gather_bytes * sum(pieces)
            direct = direct and (cache.on_device or not gathers)
            known = self._known[cache.memory] = Registered(direct, max(pieces), tuple(spans))
        return known

    async def unregister(self, cache: PagedKVCache) -> None:
        """Let go of the memory; nothing if it is not registered. All of it, also when cancelled meanwhile."""
        if isinstance(cache, PagedKVCache) and (known := self._known.get(cache.memory)):
            del self._known[cache.memory]  # no call may begin with it; ``cache`` keeps it alive
            await self._let_go(known.spans)

    def close(self) -> None:
        """Take nothing more."""
        self._closed = True

    async def release(self) -> None:
        """Let go of everything."""
        await self._let_go([span for known in self._known.values() for span in known.spans])
        self._known.clear()  # not before: it keeps the memory alive

    def __getitem__(self, cache: PagedKVCache) -> Registered:
        """What a call needs to know of a cache that it is given.

        Raises ``InvalidBufferError`` for memory that was not registered or does not fit the layout.
        """
        known = self._known.get(cache.memory)
        if known is None:
            self._check_fit(cache)
            raise InvalidBufferError(
                "this PagedKVCache's memory is not registered with the store; "
                "call `await client.register(cache)` once, before its first use"
            )
        if cache.block_tables is None:
            raise InvalidBufferError("this PagedKVCache has no block tables; pass cache.at(block_tables)")
        return known

    def _check_fit(self, cache: PagedKVCache) -> None:
        if not isinstance(cache, PagedKVCache):
            raise InvalidBufferError(f"only a PagedKVCache can be registered, not {type(cache).__name__}")
        if cache.page_sizes != self._identity.page_sizes:
            raise InvalidBufferError(
                f"the paged memory has chunks of {cache.page_sizes} bytes in its groups; "
                f"the layout's page_size_bytes are {self._identity.page_sizes}"
            )
        if cache.on_device and self._identity.value_format.header_size:
            raise InvalidBufferError(
                "framed values carry a checksum, which the CPU cannot take of a device's memory; "
                "use value_format='raw', or memory that the CPU can read"
            )

    async def _let_go(self, spans: Sequence[tuple[int, int]]) -> None:
        async def unregister() -> None:
            for address, nbytes in spans:
                with contextlib.suppress(ClientClosedError):  # the store is closed, and has let go by itself
                    await self._memory.unregister(address, nbytes)

        await settled(asyncio.create_task(unregister()))
