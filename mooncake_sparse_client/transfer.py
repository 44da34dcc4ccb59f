"""What reading and writing share: a chunk with its key, what is known to be wrong, and the ways to the store."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from .config import Limits
from .core.plans import cut_batches
from .errors import ClientClosedError
from .identity import Identity
from .stores.base import Store
from .stores.throttle import ThrottledStore
from .waiting import held, run_all

T = TypeVar("T")
_LEDGER_SIZE = 65536


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """One chunk to move."""

    group: int
    chunk: int
    name: str
    key: str


class Ledger:
    """Keys that a read found wrong, the latest ``65536`` of each kind.

    A *damaged* key counts as absent until it is written again. A *lost* key was gone when it was read: an
    older answer that it exists is not to be believed.
    """

    def __init__(self) -> None:
        self._damaged: OrderedDict[str, None] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()

    def mark_damaged(self, key: str) -> None:
        _remember(self._damaged, key)

    def mark_lost(self, key: str) -> None:
        _remember(self._lost, key)

    def clear(self, key: str) -> None:
        self._damaged.pop(key, None)
        self._lost.pop(key, None)

    def found(self, key: str) -> None:
        """It exists after all; whether it is damaged is another matter."""
        self._lost.pop(key, None)

    def is_damaged(self, key: str) -> bool:
        return key in self._damaged

    def is_suspect(self, key: str) -> bool:
        return key in self._damaged or key in self._lost


def _remember(keys: OrderedDict[str, None], key: str) -> None:
    keys[key] = None
    keys.move_to_end(key)
    while len(keys) > _LEDGER_SIZE:
        keys.popitem(last=False)


class Transport:
    """A client's ways to its store: batched, a bounded number at once, with threads for work on bytes."""

    def __init__(self, store: Store, identity: Identity, limits: Limits) -> None:
        self.identity = identity
        self.limits = limits
        self.ledger = Ledger()
        self._plain_store = store
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="sparse-client")
        self._closed = False
        self.enter_loop()

    def enter_loop(self) -> None:
        """Make anew what waits, since it belongs to the event loop that it first waited in."""
        self._slots = asyncio.Semaphore(self.limits.concurrency)
        # Reads into memory of ours that nobody waits for any more, until the native call is back.
        self._abandoned: set[asyncio.Task[object]] = set()
        #: Whoever puts a key now answers here whether it then had a value.
        self.claims: dict[str, asyncio.Future[bool]] = {}
        rate = self.limits.requests_per_second
        self.store = self._plain_store if rate is None else ThrottledStore(self._plain_store, rate)

    def jobs(self, block_hashes: Sequence[bytes], group: int, chunks: Sequence[int]) -> list[ChunkJob]:
        """The chunks of one group, named, with the own rank's keys."""
        builder = self.identity.keys
        stem = builder.schema.stem(group, builder.schema.rank)
        names = builder.names(block_hashes, group, chunks)
        return [ChunkJob(group, chunk, name, stem + name) for chunk, name in zip(chunks, names, strict=True)]

    async def compute(self, call: Callable[[], T]) -> T:
        """Run work on bytes on a thread; it is over when this returns or raises."""
        if self._closed:
            raise ClientClosedError("the client was closed during this call")
        return await held(self._workers.submit(call))

    async def each_batch(
        self,
        jobs: Sequence[ChunkJob],
        move: Callable[[Sequence[ChunkJob]], Coroutine[None, None, T]],
        *,
        abandonable: bool = False,
    ) -> list[T]:
        """Cut ``jobs`` into batches by bytes and count, and ``move`` each, few at once.

        ``abandonable``: they work on memory of ours, so that whoever waits may leave when cancelled. What has
        begun keeps its place among the few until it has ended.
        """
        sizes = [self.identity.value_bytes(job.group) for job in jobs]
        limits = self.limits

        async def one(batch: range) -> T:
            async with self._slots:
                return await move(jobs[batch.start : batch.stop])

        batches = cut_batches(sizes, max_bytes=limits.max_batch_bytes, max_count=limits.max_batch_chunks)
        return await run_all(self._leave_behind(one, batch) if abandonable else one(batch) for batch in batches)

    async def _leave_behind(self, move: Callable[[range], Coroutine[None, None, T]], batch: range) -> T:
        task = asyncio.ensure_future(move(batch))
        self._abandoned.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()  # ends it where it has not begun, and when the native call is back where it has
            raise

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits gets it from the shield

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which keys have a value that is not known to be damaged."""
        answers = await self.exists_at_all(keys)
        return [found and not self.ledger.is_damaged(key) for key, found in zip(keys, answers, strict=True)]

    async def exists_at_all(self, keys: Sequence[str]) -> list[bool]:
        """Which keys have a value, damaged or not."""
        return await self.in_key_batches(keys, self.store.exists)

    async def in_key_batches(
        self, keys: Sequence[str], ask: Callable[[Sequence[str]], Coroutine[None, None, list[T]]]
    ) -> list[T]:
        size = self.limits.max_batch_keys
        parts = await run_all(ask(keys[start : start + size]) for start in range(0, len(keys), size))
        return [answer for part in parts for answer in part]

    async def settle(self, timeout: float) -> None:
        """Wait for what was abandoned, at most ``timeout`` seconds, and let the threads go."""
        self._closed = True
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=timeout)
        self._workers.shutdown(wait=False)


def all_keys(jobs: Iterable[ChunkJob]) -> list[str]:
    return [job.key for job in jobs]
