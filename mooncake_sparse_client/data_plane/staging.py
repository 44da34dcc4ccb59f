"""Waiting for room, strictly first come first served: slots of registered memory, and bytes in flight.

Both belong to the event loop that they are used on, one at a time, and know no threads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..checks import whole_number
from ..errors import ClientClosedError, ConfigError, InvalidRequestError
from ..stores.regions import Region, SpaceAllocator


class _Queue:
    """Grants amounts in the order in which they were asked for; nobody overtakes one who must wait for more.

    ``grant`` takes an amount and answers what was granted, a number, or None while there is not enough.
    ``release`` undoes it.
    """

    def __init__(self, grant: Callable[[int], int | None], release: Callable[[int], None]) -> None:
        self._grant = grant
        self._release = release
        #: What each waits for, the first one first. Who was granted it stays until it goes on: whoever comes in
        #: between would else go on before it.
        self._waiting: OrderedDict[asyncio.Future[int], int] = OrderedDict()

    async def take(self, amount: int) -> int:
        granted = None if self._waiting else self._grant(amount)
        if granted is not None:
            return granted
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = amount
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())  # its turn had come, but it did not live to see it
            raise
        finally:
            del self._waiting[turn]
            self._serve()

    def give_back(self, granted: int) -> None:
        self._release(granted)
        self._serve()

    def _serve(self) -> None:
        if not self._waiting:
            return
        turn, amount = next(iter(self._waiting.items()))
        if turn.done():
            return  # it is about to go on, or to leave, and then serves the next one
        granted = self._grant(amount)
        if granted is not None:
            turn.set_result(granted)


@dataclass(frozen=True, slots=True, eq=False)
class Slot(Region):
    """A part of a ``StagingPool``, for one batch."""


class StagingPool:
    """Slots of registered memory, each as large as a batch needs it."""

    def __init__(self, region: Region) -> None:
        self._region: Region | None = region
        self._address, self._nbytes = region.address, region.nbytes
        self._space = SpaceAllocator(region.nbytes)
        self._queue = _Queue(self._space.take, self._space.give_back)
        self._out: set[Slot] = set()

    @property
    def free_bytes(self) -> int:
        return self._space.free_bytes

    @property
    def idle(self) -> bool:
        """Whether every slot is back."""
        return self._space.free_bytes == self._nbytes

    async def take(self, nbytes: int) -> Slot:
        """A slot of ``nbytes``, once there is room and all who asked before have theirs.

        Raises ``InvalidRequestError`` for more than the pool has.
        """
        nbytes = whole_number(nbytes, "nbytes", InvalidRequestError, least=1)
        if nbytes > self._nbytes:
            raise InvalidRequestError(
                f"a slot of {nbytes} bytes cannot come from {self._nbytes} bytes of staging memory; "
                "make the batch smaller, or staging_bytes larger"
            )
        offset = await self._queue.take(nbytes)
        if self._region is None:
            self._queue.give_back(offset)
            raise ClientClosedError("the staging memory was let go of; the client is closed")
        slot = Slot(self._address + offset, nbytes, self._region.view[offset : offset + nbytes])
        self._out.add(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Let others have the slot's memory. Raises ``InvalidRequestError`` for a slot that is not out."""
        if slot not in self._out:
            raise InvalidRequestError(
                f"the slot of {slot.nbytes} bytes at {slot.address:#x} was given back before, or is not of this pool"
            )
        self._out.remove(slot)
        self._queue.give_back(slot.address - self._address)

    def enter_loop(self) -> None:
        """Forget who waited on an event loop that is gone. Slots that are out stay out: the store may use them."""
        self._queue = _Queue(self._space.take, self._space.give_back)

    def close(self) -> None:
        """Let go of the memory, which is free once the last slot is back."""
        self._region = None

    @asynccontextmanager
    async def slot(self, nbytes: int) -> AsyncIterator[Slot]:
        """A slot for as long as the block runs."""
        slot = await self.take(nbytes)
        try:
            yield slot
        finally:
            self.give_back(slot)


class Budget:
    """At most ``total`` bytes in flight. What is larger than that goes alone."""

    def __init__(self, total: int) -> None:
        self._total = whole_number(total, "total", ConfigError, least=1)
        self._in_flight = 0
        self._queue = _Queue(self._grant, self._release)

    @property
    def in_flight(self) -> int:
        """Bytes that were taken and are not back."""
        return self._in_flight

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be in flight, and all who asked before are."""
        await self._queue.take(whole_number(nbytes, "nbytes", InvalidRequestError))

    def give_back(self, nbytes: int) -> None:
        """Let others have what was taken. Raises ``InvalidRequestError`` for more than is in flight."""
        if not 0 <= nbytes <= self._in_flight:
            raise InvalidRequestError(
                f"{nbytes} bytes cannot come back, {self._in_flight} are in flight; give back what was taken, once"
            )
        self._queue.give_back(nbytes)

    @asynccontextmanager
    async def held(self, nbytes: int) -> AsyncIterator[None]:
        """``nbytes`` in flight for as long as the block runs."""
        await self.take(nbytes)
        try:
            yield
        finally:
            self.give_back(nbytes)

    def _grant(self, nbytes: int) -> int | None:
        if self._in_flight and self._in_flight + nbytes > self._total:
            return None
        self._in_flight += nbytes
        return nbytes

    def _release(self, nbytes: int) -> None:
        self._in_flight -= nbytes
