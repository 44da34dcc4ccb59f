"""The lane: every put and get request on its way to the store, a bounded number at once, in order.

While as many are under way as may be, later ones gather, and those that fit together travel as one request:
many small calls side by side cost the store little more than a large one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from ..config import Limits
from ..errors import ClientClosedError, StoreAnswerError
from ..stores.base import Failure, PlacedGets, PlacedPuts, Store
from ..waiting import copied

Batch: TypeAlias = PlacedPuts | PlacedGets
Answers: TypeAlias = list[Failure | None]


@dataclass(slots=True, eq=False)
class Ride:
    """One batch's way through the lane, to be awaited at ``answer`` by one alone."""

    batch: Batch
    answer: asyncio.Future[Answers]
    #: The request that it travels in; None while it waits.
    request: _Request | None = None
    left: bool = False

    @property
    def under_way(self) -> asyncio.Task[Answers] | None:
        """The task that ends once the store no longer touches the batch's memory; None if it does not."""
        return None if self.request is None or self.request.task.done() else self.request.task


@dataclass(slots=True, eq=False)
class _Request:
    rides: list[Ride]
    task: asyncio.Task[Answers]

    def arrive(self) -> None:
        """Give everyone who still waits their answer."""
        error = None if self.task.cancelled() else self.task.exception()
        first = 0
        for ride in self.rides:
            last = first + len(ride.batch)
            if ride.answer.done():
                pass  # whoever waited was cancelled
            elif self.task.cancelled():
                ride.answer.cancel()
            elif error is not None:
                ride.answer.set_exception(error if len(self.rides) == 1 else copied(error))
            else:
                ride.answer.set_result(self.task.result()[first:last])
            first = last


class Lane:
    """The way of one client's batches to ``store``. Belongs to one event loop."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._free = limits.concurrency
        self._waiting: deque[Ride] = deque()
        self._requests: set[_Request] = set()
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._requests

    @property
    def full(self) -> bool:
        """Whether as many requests are under way as may be."""
        return not self._free

    def enter(self, batch: Batch) -> Ride:
        """Send the batch, or let it wait for its turn. Raises ``ClientClosedError`` once the lane is closed."""
        if self._closed:
            raise ClientClosedError.during_a_call()
        ride = Ride(batch, asyncio.get_running_loop().create_future())
        self._waiting.append(ride)
        self._start()
        return ride

    async def carry(self, batch: Batch) -> Answers:
        """Send a batch whose memory is the caller's: when this returns or raises, it is no longer touched."""
        ride = self.enter(batch)
        try:
            return await ride.answer
        except asyncio.CancelledError:
            self.leave(ride)
            while task := ride.under_way:
                with contextlib.suppress(asyncio.CancelledError):  # one more does not change what is raised
                    await asyncio.wait([task])
            raise

    def leave(self, ride: Ride) -> None:
        """Nobody wants this answer any more. What waits is dropped at once; what is under way goes on until
        the store lets go of its memory."""
        ride.left = True
        if ride.request is None:
            ride.answer.cancel()  # and is skipped when its turn comes
        elif all(each.left for each in ride.request.rides):
            ride.request.task.cancel()  # ends at once where the store has not begun, behind a throttle

    async def settle(self, timeout: float) -> None:
        """Refuse what waits and whatever comes, and wait at most ``timeout`` seconds for what is under way."""
        self._closed = True
        for ride in self._waiting:
            if not ride.answer.done():
                ride.answer.set_exception(ClientClosedError.during_a_call())
        self._waiting.clear()
        if self._requests:
            await asyncio.wait([request.task for request in self._requests], timeout=timeout)

    def _start(self) -> None:
        while self._free and (rides := self._gather()):
            batch = _joined([ride.batch for ride in rides])
            request = _Request(rides, asyncio.get_running_loop().create_task(self._ask(batch)))
            for ride in rides:
                ride.request = request
            self._free -= 1
            self._requests.add(request)
            request.task.add_done_callback(functools.partial(self._arrived, request))

    def _arrived(self, request: _Request, _: asyncio.Task[Answers]) -> None:
        self._free += 1
        self._requests.discard(request)
        try:
            request.arrive()
        finally:
            self._start()

    async def _ask(self, batch: Batch) -> Answers:
        answers = await (self._store.put(batch) if isinstance(batch, PlacedPuts) else self._store.get(batch))
        if len(answers) != len(batch):
            raise StoreAnswerError(f"{len(answers)} answers came back for {len(batch)} keys")
        return answers

    def _gather(self) -> list[Ride]:
        """The next rides that fit into one request: of one kind, within the limits, each key once."""
        rides: list[Ride] = []
        keys: set[str] = set()
        nbytes = chunks = pieces = 0
        while self._waiting:
            ride = self._waiting[0]
            batch = ride.batch
            if not ride.answer.done():
                nbytes, chunks, pieces = nbytes + batch.nbytes, chunks + len(batch), pieces + len(batch.sizes)
                if rides and not (
                    type(batch) is type(rides[0].batch)
                    and nbytes <= self._limits.max_batch_bytes
                    and chunks <= self._limits.max_batch_chunks
                    and pieces <= self._limits.max_batch_pieces
                    and keys.isdisjoint(batch.keys)
                ):
                    break
                rides.append(ride)
                if len(self._waiting) > 1:
                    keys.update(batch.keys)
            self._waiting.popleft()
        return rides


def _joined(batches: list[Batch]) -> Batch:
    """Batches of one kind as one."""
    first = batches[0]
    if len(batches) == 1:
        return first
    keys = [key for batch in batches for key in batch.keys]
    addresses = [address for batch in batches for address in batch.addresses]
    sizes = [size for batch in batches for size in batch.sizes]
    nbytes = sum(batch.nbytes for batch in batches)
    counts = None
    if any(batch.counts is not None for batch in batches):
        counts = [count for batch in batches for count in batch.counts or [1] * len(batch)]
    if isinstance(first, PlacedGets):
        return PlacedGets(keys, addresses, sizes, nbytes, counts)
    replace = frozenset[str]().union(*(batch.replace for batch in batches if isinstance(batch, PlacedPuts)))
    return PlacedPuts(keys, addresses, sizes, nbytes, counts, replace)
