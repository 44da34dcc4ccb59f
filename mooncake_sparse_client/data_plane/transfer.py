"""What reading and writing share: chunks with their keys, what is known to be wrong, and the ways to the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..config import Limits
from ..core.keys import Chunks
from ..core.masks import BoolArray
from ..errors import ClientClosedError, InvalidRequestError
from ..identity import Identity
from ..resilience import Resilience
from ..stores.base import Store
from ..stores.breaker import BreakerStore
from ..stores.regions import Region
from ..stores.retry import RetryingStore
from ..stores.throttle import ThrottledStore
from ..waiting import held, run_abreast, run_all
from .batches import cut_batches
from .claims import Claims
from .lane import Answers, Lane
from .ledger import Ledger
from .pacing import paced
from .pressure import Backpressure
from .questions import Questions
from .staging import Budget, StagingPool

T = TypeVar("T")
Numbers: TypeAlias = NDArray[np.intp]
#: ``(group, chunks)``.
Parts: TypeAlias = Sequence[tuple[int, Chunks]]
#: Builds the keys of one group's chunks from the block hashes.
KeysOf: TypeAlias = Callable[[Sequence[bytes], int, Chunks], list[str]]
#: More chunks than this are named on a thread: some tenths of a microsecond each add up for the event loop.
_NAMED_INLINE = 1024
#: Batches of one call that are prepared or checked while others are on the wire.
_AHEAD = 2


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """Chunks to move, in columns; those of one group stand together."""

    groups: Numbers
    chunks: Numbers
    keys: list[str]
    #: ``(group, where its jobs stand)``.
    runs: list[tuple[int, slice]]

    def __len__(self) -> int:
        return len(self.keys)

    def where(self) -> Iterator[tuple[int, int]]:
        """Each job's ``(group, chunk)``."""
        return zip(self.groups.tolist(), self.chunks.tolist(), strict=True)

    def pick(self, numbers: Numbers) -> Jobs:
        """Some of them, in their order."""
        if len(numbers) == len(self.keys):
            return self
        groups, keys = self.groups[numbers], [self.keys[number] for number in numbers.tolist()]
        return Jobs(groups, self.chunks[numbers], keys, runs_of(groups))

    def cut(self, batch: slice) -> Jobs:
        groups = self.groups[batch]
        return Jobs(groups, self.chunks[batch], self.keys[batch], runs_of(groups))


def runs_of(groups: Numbers) -> list[tuple[int, slice]]:
    """Each group of a column, with the slice of its run."""
    count = len(groups)
    if not count:
        return []
    if groups[0] == groups[-1]:  # as they stand in order, there is but one
        return [(int(groups[0]), slice(0, count))]
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), count]
    return [(int(groups[first]), slice(first, last)) for first, last in pairwise(edges)]


def parts_of(runs: Sequence[tuple[int, slice]], chunks: Numbers) -> list[tuple[int, Numbers]]:
    """Each group of a column, with its chunks."""
    return [(group, chunks[run]) for group, run in runs]


def chosen(masks: Sequence[BoolArray]) -> tuple[Numbers, Numbers]:
    """The columns ``(groups, chunks)`` of what one boolean array a group chooses."""
    picked = [np.flatnonzero(mask) for mask in masks]
    if len(picked) == 1:
        return np.zeros(len(picked[0]), dtype=np.intp), picked[0]
    groups = np.repeat(np.arange(len(picked)), [len(some) for some in picked])
    return groups, np.concatenate(picked)


def listed(masks: Sequence[BoolArray]) -> list[tuple[int, int]]:
    """``(group, chunk)`` of what one boolean array a group chooses."""
    groups, chunks = chosen(masks)
    return list(zip(groups.tolist(), chunks.tolist(), strict=True))


def _keys(build: KeysOf, block_hashes: Sequence[bytes], parts: Iterable[tuple[int, Chunks]]) -> list[str]:
    keys: list[str] = []
    for group, chunks in parts:
        keys += build(block_hashes, group, chunks)
    return keys


class Transport:
    """A client's ways to its store: batched, a bounded number at once, with threads for work on bytes."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        limits: Limits,
        resilience: Resilience,
        staging: Region,
        *,
        on_hang: Callable[[str], object],
    ) -> None:
        """``on_hang``: called with the trouble when the store counts as down since it does not answer."""
        self.identity = identity
        self.limits = limits
        self._resilience = resilience
        self._on_hang = on_hang
        self.ledger = Ledger()
        self.memory = store.memory
        #: Slots for headers, and for values whose own memory is not registered.
        self.staging = StagingPool(staging)
        self._lost_staging: list[StagingPool] = []
        #: Bytes of a group's values.
        self.value_sizes = np.array([identity.value_bytes(group) for group in range(len(identity.page_sizes))])
        self._plain_store = store
        # One thread for each kind of work: two at the same bytes would only wait for the interpreter's lock, and
        # make the event loop wait for both.
        self._namer = ThreadPoolExecutor(1, thread_name_prefix="sparse-client-names")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="sparse-client-bytes")
        self._closed = False
        self.enter_loop()

    def enter_loop(self) -> None:
        """Make anew what waits, since it belongs to the event loop that it first waited in."""
        self.claims: Claims = {}
        self.pressure = Backpressure()
        #: Writes that nobody waits for any more, and that go on: by key, what ends with them.
        self.left_writing: dict[str, asyncio.Task[Answers]] = {}
        self._renew_staging()
        self.store = self._wrapped(self._plain_store)
        self.lane = Lane(self.store, self.limits)
        self.questions = Questions(self.store, self.limits)
        #: Bytes that are being prepared, moved or checked.
        self.budget = Budget(self.limits.max_bytes_in_flight)

    def _wrapped(self, store: Store) -> Store:
        """The store with what cuts across. The breaker is innermost, so that waiting for a turn never looks like a
        store that hangs; a pause between two attempts takes no turn from others."""
        limits, resilience = self.limits, self._resilience
        self._breaker = BreakerStore(store, resilience, on_hang=self._on_hang) if resilience.breaker else None
        if self._breaker is not None:
            store = self._breaker
        if limits.requests_per_second is not None or limits.bytes_per_second is not None:
            store = ThrottledStore(store, limits.requests_per_second, limits.bytes_per_second)
        return RetryingStore(store, resilience) if resilience.attempts > 1 else store

    def check_up(self, *, moving: bool = False) -> None:
        """``moving``: for a call that moves values. Raises ``StoreDownError`` where the store would not be asked."""
        breaker = self._breaker
        if breaker is None:
            return
        breaker.check()
        # While transfers that hung have all the places, another one would wait for them.
        if moving and breaker.on_trial and self.lane.full:
            raise breaker.down_error()

    def _renew_staging(self) -> None:
        """Slots that an event loop took with it stay out, since the store may use them: others take their place,
        if there is memory for that."""
        if not self.staging.idle:
            with contextlib.suppress(InvalidRequestError, ClientClosedError):
                staging = StagingPool(self.memory.allocate(self.limits.staging_bytes))
                self._lost_staging.append(self.staging)
                self.staging = staging
        self.staging.enter_loop()

    def jobs(self, block_hashes: Sequence[bytes], groups: Numbers, chunks: Numbers) -> Jobs:
        """The chunks with the own rank's keys."""
        runs = runs_of(groups)
        return Jobs(groups, chunks, _keys(self.identity.keys.own_keys, block_hashes, parts_of(runs, chunks)), runs)

    async def many_jobs(self, block_hashes: Sequence[bytes], groups: Numbers, chunks: Numbers) -> Jobs:
        """``jobs``, of any number."""
        runs = runs_of(groups)
        keys = await self.keys(self.identity.keys.own_keys, block_hashes, parts_of(runs, chunks))
        return Jobs(groups, chunks, keys, runs)

    async def keys(self, build: KeysOf, block_hashes: Sequence[bytes], parts: Parts) -> list[str]:
        """The keys of the parts one after another; very many are built on a thread, in turns."""
        if sum(len(chunks) for _, chunks in parts) <= _NAMED_INLINE:
            return _keys(build, block_hashes, parts)
        turns = [
            (group, chunks[first : first + _NAMED_INLINE])
            for group, chunks in parts
            for first in range(0, len(chunks), _NAMED_INLINE)
        ]
        return await self.compute(lambda: _keys(build, block_hashes, paced(turns)))

    async def compute(self, call: Callable[[], T]) -> T:
        """Hash or name very much on a thread; it is over when this returns or raises."""
        return await self._run(self._namer, call)

    async def copy(self, call: Callable[[], T]) -> T:
        """Run work on chunks' bytes on a thread; it is over when this returns or raises."""
        return await self._run(self._copier, call)

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        if self._closed:
            raise ClientClosedError.during_a_call()
        return await held(pool.submit(call))

    async def each_batch(
        self,
        groups: Numbers,
        pieces: int,
        move: Callable[[slice], Coroutine[None, None, None]],
        *,
        one_by_one: bool = False,
    ) -> None:
        """Cut a column of jobs into batches by bytes and count, and ``move`` each, in order and few at once.

        ``pieces``: the most that one value has.
        """
        if not len(groups):
            return
        limits = self.limits
        sizes = self.value_sizes[groups]
        most = max(1, min(limits.max_batch_chunks, limits.max_batch_pieces // pieces))
        total = int(sizes.sum())

        async def carry(batch: range, nbytes: int) -> None:
            await self.budget.take(nbytes)
            try:
                await move(slice(batch.start, batch.stop))
            finally:
                self.budget.give_back(nbytes)

        if len(sizes) <= most and total <= limits.max_batch_bytes:
            await carry(range(len(sizes)), total)
            return
        batches = cut_batches(sizes, max_bytes=limits.max_batch_bytes, max_count=most)
        await run_abreast(
            1 if one_by_one else limits.concurrency + _AHEAD,
            batches,
            lambda batch: carry(batch, int(sizes[batch.start : batch.stop].sum())),
        )

    def leave_writing(self, keys: Sequence[str], task: asyncio.Task[Answers]) -> None:
        """Nobody waits for this write any more; until it has ended, nobody else writes its keys."""
        self.left_writing |= dict.fromkeys(keys, task)
        task.add_done_callback(lambda _: self._forget_writing(keys, task))

    def _forget_writing(self, keys: Sequence[str], task: asyncio.Task[Answers]) -> None:
        for key in keys:
            if self.left_writing.get(key) is task:
                del self.left_writing[key]

    async def exists(self, keys: Sequence[str]) -> BoolArray:
        """Which keys have a value that is not known to be damaged, or out of reach for now."""
        return await self.exists_at_all(keys) & ~self.ledger.unusable(keys)

    async def exists_at_all(self, keys: Sequence[str]) -> BoolArray:
        """Which keys have a value, of whatever use."""
        found = await self.questions.ask(keys)
        self.ledger.answered(keys, found)
        return found

    async def in_key_batches(
        self, keys: Sequence[str], ask: Callable[[Sequence[str]], Coroutine[None, None, list[T]]]
    ) -> list[T]:
        size = self.limits.max_batch_keys
        if len(keys) <= size:
            return await ask(keys) if keys else []
        parts = await run_all(ask(keys[start : start + size]) for start in range(0, len(keys), size))
        return [answer for part in parts for answer in part]

    async def settle(self, timeout: float) -> None:
        """Wait for what was left behind, at most ``timeout`` seconds, and let the threads go."""
        self._closed = True
        await run_all([self.lane.settle(timeout), self.questions.settle(timeout)])
        if self._breaker is not None:
            await self._breaker.settle(timeout)
        for staging in (self.staging, *self._lost_staging):
            staging.close()
        self._namer.shutdown(wait=False)
        self._copier.shutdown(wait=False)
