"""The two sides of the comparisons: what our client does, and what the native calls do, on the same memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from ...client import SparseStoreClient
from ...config import Limits
from ...core.framing import ValueFormatName
from ...core.plans import PrefixHit
from ...errors import StoreAnswerError
from ...paged import PagedKVCache
from .ground import BATCH_BYTES, BATCH_CHUNKS, BATCH_KEYS, BLOCK_TOKENS, SAME_BATCHES, Ground, Memory
from .measure import Side, in_tasks, on_thread, timed, timed_on_thread
from .rivals import AsyncRival, PlainLoop, batches


class Prefix:
    """One sequence of our client, whose chunks lie one after another in memory. Raises where less than all is done."""

    def __init__(
        self, client: SparseStoreClient, source: PagedKVCache, sink: PagedKVCache, *, first: int, chunks: int
    ) -> None:
        tables = [np.arange(first, first + chunks)]
        self._client, self._chunks = client, chunks
        self._source, self._sink = source.at(tables), sink.at(tables)
        # One token more than the whole blocks, since a hit never takes the last one.
        self._sequence = client.sequence(np.arange(first * BLOCK_TOKENS, (first + chunks) * BLOCK_TOKENS + 1))
        self._sequence.block_hashes  # noqa: B018 - hashed now, and not while somebody is measured
        self._hit: PrefixHit | None = None

    async def put(self) -> None:
        """Write all chunks, which must be absent."""
        result = await self._client.put(self._sequence, self._source)
        _expect(result.written.chunks, self._chunks, "a put")

    async def fill(self) -> None:
        """Write what is not there."""
        await self._client.put(self._sequence, self._source)

    async def find(self) -> None:
        """Look up what ``get`` will read."""
        self._hit = await self._client.lookup(self._sequence)

    async def get(self) -> None:
        """Read what ``find`` has found, which must be all."""
        assert self._hit is not None  # noqa: S101
        result = await self._client.get(self._hit, into=self._sink)
        _expect(result.hit_length // BLOCK_TOKENS, self._chunks, "a get")

    async def exists(self) -> None:
        """Ask for all chunks, which must be there."""
        (present,) = await self._client.exists(self._sequence, all_chunks=True)
        _expect(int(present.sum()), self._chunks, "a question")

    async def remove(self) -> None:
        await self._client.remove(self._sequence, force=True)


class Ours:
    """Our client at work on ``prefixes``, which so many tasks share."""

    def __init__(self, prefixes: Sequence[Prefix], memory: Memory) -> None:
        self.prefixes = prefixes
        self._memory = memory

    async def remove(self) -> None:
        await in_tasks(1, self.prefixes, Prefix.remove)

    async def _find(self) -> None:
        await in_tasks(1, self.prefixes, Prefix.fill)
        await in_tasks(1, self.prefixes, Prefix.find)

    def put(self, tasks: int = 1) -> Side:
        return Side(lambda: timed(in_tasks(tasks, self.prefixes, Prefix.put)), self.remove)

    def get(self, tasks: int = 1, times: int = 1) -> Side:
        prefixes = [*self.prefixes] * times
        return Side(lambda: timed(in_tasks(tasks, prefixes, Prefix.get)), self._find, self._memory.check)

    def exists(self, times: int) -> Side:
        return Side(lambda: timed(in_tasks(1, [*self.prefixes] * times, Prefix.exists)), self._find)


class Plain:
    """A plain loop of native batch calls, on a thread."""

    def __init__(self, loop: PlainLoop, memory: Memory) -> None:
        self._loop = loop
        self._memory = memory

    async def remove(self) -> None:
        await on_thread(self._loop.remove)

    async def _fill(self) -> None:
        await on_thread(self._loop.put)  # what is there stays

    def put(self) -> Side:
        return Side(lambda: timed_on_thread(self._loop.put_asking), self.remove)

    def put_unasked(self) -> Side:
        return Side(lambda: timed_on_thread(self._loop.put), self.remove)

    def get(self) -> Side:
        return Side(lambda: timed_on_thread(self._loop.get), self._fill, self._memory.check)

    def exists(self, times: int) -> Side:
        def ask() -> None:
            for _ in range(times):
                self._loop.exists()

        return Side(lambda: timed_on_thread(ask), self._fill)


class Async:
    """Mooncake's own asyncio class, asked for its prefixes by so many tasks."""

    def __init__(self, rival: AsyncRival, memory: Memory) -> None:
        self._rival = rival
        self._memory = memory

    async def remove(self) -> None:
        await self._rival.remove()

    def put(self, tasks: int) -> Side:
        return Side(lambda: timed(self._rival.put(tasks)), self.remove)

    def get(self, tasks: int, times: int) -> Side:
        return Side(lambda: timed(self._rival.get(tasks, times)), self._rival.fill, self._memory.check)

    def get_chunkwise(self, tasks: int) -> Side:
        return Side(lambda: timed(self._rival.get_chunkwise(tasks)), self._rival.fill, self._memory.check)


def plain(ground: Ground, chunk_bytes: int, memory: Memory) -> Plain:
    """The native calls of the store that our clients use, over keys of their own."""
    calls = batches(
        f"bench-plain-{chunk_bytes}-",
        memory.source.ctypes.data,
        memory.sink.ctypes.data,
        count=memory.source.nbytes // chunk_bytes,
        nbytes=chunk_bytes,
        per_batch=min(BATCH_CHUNKS, BATCH_BYTES // chunk_bytes),
    )
    return Plain(PlainLoop(ground.native, calls, keys_per_question=BATCH_KEYS), memory)


@asynccontextmanager
async def ours(
    ground: Ground,
    value_format: ValueFormatName,
    chunk_bytes: int,
    memory: Memory,
    *,
    prefixes: int = 1,
    limits: Limits = SAME_BATCHES,
) -> AsyncIterator[Ours]:
    """A client of ours whose chunks fill ``memory``, as so many equal prefixes."""
    async with ground.client(value_format, chunk_bytes, limits) as client:
        source, sink = (PagedKVCache([[half.reshape(-1, chunk_bytes)]]) for half in (memory.source, memory.sink))
        await client.register(source)
        await client.register(sink)
        chunks = memory.source.nbytes // chunk_bytes // prefixes
        parts = [Prefix(client, source, sink, first=number * chunks, chunks=chunks) for number in range(prefixes)]
        yield Ours(parts, memory)


def _expect(found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise StoreAnswerError(
            f"{what} of {wanted} chunks found or moved {found}; is the memory for the store too small?"
        )
