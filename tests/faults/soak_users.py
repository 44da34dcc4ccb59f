"""What applications do while faults happen, and what must hold whatever happens: bytes, bounds and errors."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from mooncake_sparse_client import (
    FullAttentionSpec,
    GetResult,
    KVCacheLayout,
    PagedKVCache,
    PutResult,
    Region,
    SlidingWindowSpec,
    SparseStoreClient,
    load_mask,
)
from mooncake_sparse_client.errors import StoreError

T = TypeVar("T")

LAYOUT: Final = KVCacheLayout(
    [FullAttentionSpec(32, page_size_bytes=40_000), SlidingWindowSpec(8, 20, page_size_bytes=3200)]
)
#: Blocks of each group that a user's paged memory has: as many as the longest prompt has chunks.
BLOCKS: Final = (11, 44)
#: Seconds: of every call, and what a busy machine may add.
TIMEOUT: Final = 8.0
SLACK: Final = 5.0
#: A native call to an owner process that hangs ends after so many seconds, and with it what works on memory in place.
NATIVE: Final = 30.0
#: What a user's memory holds between calls: whatever is written then is written too late.
BLANK: Final = 0xA5
_MOST_VIOLATIONS: Final = 50


@dataclass(slots=True)
class Tally:
    """What came of all calls."""

    outcomes: Counter[str] = field(default_factory=Counter)
    #: Seconds that a call of each kind took at most.
    longest: dict[str, float] = field(default_factory=dict)
    bytes_verified: int = 0
    violations: list[str] = field(default_factory=list)

    def violation(self, text: str) -> None:
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(text)


class Prompts:
    """Prompts, some of which share their beginnings, and the bytes of their chunks, which nobody else derives."""

    def __init__(self, seed: int, count: int) -> None:
        self._seed = seed
        self._fresh = 1 << 20
        draw = random.Random(seed)
        self.tokens = [self._prompt(draw, number) for number in range(count)]
        self._pages: dict[bytes, bytes] = {}

    @staticmethod
    def _prompt(draw: random.Random, number: int) -> list[int]:
        shared = 128 if number % 3 else 0
        return [number % 5] * shared + [1000 + number] * draw.randrange(64, 352 - shared)

    def fresh(self) -> list[int]:
        """A prompt of two blocks that never was before."""
        self._fresh += 1
        return [self._fresh] * 65

    def page(self, tokens: list[int], group: int, chunk: int, *, keep: bool = True) -> bytes:
        """The bytes of a chunk: of the seed, the group, and all tokens up to the chunk's end."""
        end = (chunk + 1) * LAYOUT.groups[group].block_size
        name = hashlib.sha256(f"{self._seed}/{group}/{tokens[:end]}".encode()).digest()
        if name in self._pages:
            return self._pages[name]
        page = random.Random(name).randbytes(LAYOUT.page_sizes[group])
        if keep:
            self._pages[name] = page
        return page

    def difference(self, found: bytes, expected: bytes) -> str:
        """What was found in place of what was expected."""
        if found == bytes([BLANK]) * len(found):
            return "nothing was written there"
        if any(found == page for page in self._pages.values()):
            return "the bytes of another chunk"
        wrong = [number for number, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b]
        return f"{len(wrong)} of {len(expected)} bytes from {wrong[0] if wrong else len(found)} on"


async def bounded(
    tally: Tally, name: str, call: Coroutine[Any, Any, T], bound: float, cancel_after: float | None = None
) -> T | None:
    """What the call answers; None if it was cancelled or the store failed it. Anything else is a violation."""
    task = asyncio.create_task(call)
    began = time.monotonic()
    if cancel_after is not None:
        await asyncio.wait({task}, timeout=cancel_after)
        task.cancel()
    done, _ = await asyncio.wait({task}, timeout=bound)
    took = time.monotonic() - began
    tally.longest[name] = max(tally.longest.get(name, 0.0), took)
    if not done:
        stack = io.StringIO()
        task.print_stack(file=stack)
        tally.violation(
            f"{name} has not ended after {took:.1f} s (cancelled: {cancel_after is not None})\n{stack.getvalue()}"
        )
        task.cancel()
        return None
    if task.cancelled():
        tally.outcomes[f"{name}: cancelled"] += 1
        if cancel_after is None:
            tally.violation(f"{name} was cancelled by nobody")
        return None
    if (error := task.exception()) is None:
        return task.result()
    if isinstance(error, StoreError):
        tally.outcomes[f"{name}: {error.kind}"] += 1
    else:
        tally.violation(f"{name} raised what no store's trouble is:\n{''.join(traceback.format_exception(error))}")
    return None


class User:
    """One task of an application: a call at a time, of a kind drawn at random."""

    def __init__(self, name: str, client: SparseStoreClient, prompts: Prompts, tally: Tally, seed: int) -> None:
        self._name, self._client, self._prompts, self._tally = name, client, prompts, tally
        self._draw = random.Random(f"{seed}/{name}")
        self._held: deque[tuple[list[int], Mapping[tuple[int, int], memoryview]]] = deque(maxlen=3)
        self._paged_memory = [
            client.allocate(blocks * size).array.reshape(blocks, size)
            for blocks, size in zip(BLOCKS, LAYOUT.page_sizes, strict=True)
        ]
        self._paged = PagedKVCache([[memory] for memory in self._paged_memory])
        self._region = self._new_region()
        self._blank()

    def _new_region(self) -> Region:
        region = self._client.allocate(sum(map(int.__mul__, BLOCKS, LAYOUT.page_sizes)))
        region.array[:] = BLANK
        return region

    def _blank(self) -> None:
        for memory in self._paged_memory:
            memory[:] = BLANK

    async def open(self) -> None:
        """Before its first work."""
        await self._client.register(self._paged)

    async def work(self, stop: asyncio.Event) -> None:
        """Make calls until told to stop."""
        kinds: dict[Callable[[list[int]], Coroutine[Any, Any, None]], int] = {
            self._lookup: 3,
            self._exists: 1,
            self._put: 4,
            self._put_paged: 2,
            self._get: 4,
            self._get_into_own_memory: 2,
            self._get_into_allocated_memory: 2,
            self._get_paged: 3,
            self._remove: 1,
        }
        while not stop.is_set():
            (kind,) = self._draw.choices(list(kinds), list(kinds.values()))
            self._check_blank()
            await kind(self._draw.choice(self._prompts.tokens))
            await asyncio.sleep(self._draw.random() * 0.03)

    async def _call(self, kind: str, call: Coroutine[Any, Any, T], *, in_place: bool = False) -> T | None:
        cancel_after = self._draw.random() ** 3 * 0.5 if self._draw.random() < 0.15 else None
        name = f"{self._name.split()[0]} {kind}"
        return await bounded(self._tally, name, call, TIMEOUT + SLACK + NATIVE * in_place, cancel_after)

    def _came(self, kind: str, what: str) -> None:
        self._tally.outcomes[f"{self._name.split()[0]} {kind}: {what}"] += 1

    async def _lookup(self, tokens: list[int]) -> None:
        if hit := await self._call("lookup", self._client.lookup(self._client.sequence(tokens))):
            self._came("lookup", "hit" if hit.hit_length else "miss")

    async def _exists(self, tokens: list[int]) -> None:
        if masks := await self._call("exists", self._client.exists(self._client.sequence(tokens))):
            self._came("exists", "some" if any(mask.any() for mask in masks) else "none")

    async def _remove(self, tokens: list[int]) -> None:
        sequence = self._client.sequence(tokens)
        if result := await self._call("remove", self._client.remove(sequence, force=self._draw.random() < 0.5)):
            self._came("remove", "some" if result.removed else "leased" if result.leased else "none")

    async def _put(self, tokens: list[int]) -> None:
        def source(group: int, chunk: int) -> list[memoryview]:
            page = memoryview(self._prompts.page(tokens, group, chunk))
            return [page[:1000], page[1000:]]

        confirm = self._draw.random() < 0.3
        self._count_put(
            "put", await self._call("put", self._client.put(self._client.sequence(tokens), source, confirm=confirm))
        )

    async def _put_paged(self, tokens: list[int]) -> None:
        for group, memory in enumerate(self._paged_memory):
            for chunk in range(len(tokens) // LAYOUT.groups[group].block_size):
                memory[chunk] = np.frombuffer(self._prompts.page(tokens, group, chunk), np.uint8)
        put = self._client.put(self._client.sequence(tokens), self._tables(len(tokens)))
        self._count_put("put paged", await self._call("put paged", put, in_place=True))
        self._blank()  # a write that still read from it would store something else

    def _count_put(self, kind: str, result: PutResult | None) -> None:
        if result is not None:
            self._came(kind, "failed" if result.failures else "written" if result.written.chunks else "existing")
            for failure in result.failures:
                self._tally.outcomes[f"chunk not written: {failure.reason}"] += 1

    async def _get(self, tokens: list[int]) -> None:
        got = await self._call("get", self._client.get(self._client.sequence(tokens)))
        if got is not None:
            self._verify("get", tokens, got, lambda group, chunk: got.chunks[group, chunk])
            self._held.append((tokens, got.chunks))
        for held, chunks in self._held:  # what was read stays as it was, whatever became of the store
            for (group, chunk), view in chunks.items():
                self._compare("get, seen again,", held, group, chunk, view)

    async def _get_into_own_memory(self, tokens: list[int]) -> None:
        memory: dict[tuple[int, int], bytearray] = {}

        def sink(group: int, chunk: int) -> bytearray:
            return memory.setdefault((group, chunk), bytearray(LAYOUT.page_sizes[group]))

        got = await self._call("get into own", self._client.get(self._client.sequence(tokens), into=sink))
        if got is not None:
            self._verify("get into own", tokens, got, lambda group, chunk: memory[group, chunk])

    async def _get_into_allocated_memory(self, tokens: list[int]) -> None:
        if self._draw.random() < 0.1:
            self._region = self._new_region()
        got = await self._call("get into allocated", self._client.get(self._client.sequence(tokens), into=self._room))
        if got is not None:
            self._verify("get into allocated", tokens, got, self._room)
        self._region.array[:] = BLANK

    def _room(self, group: int, chunk: int) -> memoryview:
        size = LAYOUT.page_sizes[group]
        start = (BLOCKS[0] * LAYOUT.page_sizes[0] if group else 0) + chunk * size
        return self._region.view[start : start + size]

    async def _get_paged(self, tokens: list[int]) -> None:
        get = self._client.get(self._client.sequence(tokens), into=self._tables(len(tokens)))
        got = await self._call("get paged", get, in_place=True)
        if got is not None:
            self._verify("get paged", tokens, got, lambda group, chunk: memoryview(self._paged_memory[group][chunk]))
        self._blank()

    def _tables(self, length: int) -> PagedKVCache:
        return self._paged.at([range(length // spec.block_size) for spec in LAYOUT.groups])

    def _verify(
        self, kind: str, tokens: list[int], got: GetResult, read: Callable[[int, int], memoryview | bytearray]
    ) -> None:
        """What a get says that it restored must be there, to the byte."""
        self._came(kind, "shorter" if got.failures else "hit" if got.hit_length else "miss")
        for failure in got.failures:
            self._tally.outcomes[f"chunk not read: {failure.reason}"] += 1
        wanted = [
            (group, chunk)
            for group, mask in enumerate(load_mask(LAYOUT, got.hit_length))
            for chunk in np.flatnonzero(mask).tolist()
        ]
        if got.hit_length > len(tokens) or (got.chunks and sorted(got.chunks) != wanted):
            self._tally.violation(f"{self._name} {kind}: {got} is no answer for {len(tokens)} tokens")
        for group, chunk in wanted:
            try:
                self._compare(kind, tokens, group, chunk, read(group, chunk))
            except KeyError:
                self._tally.violation(f"{self._name} {kind}: chunk {group, chunk} is missing in {got}")

    def _compare(self, kind: str, tokens: list[int], group: int, chunk: int, found: memoryview | bytearray) -> None:
        expected = self._prompts.page(tokens, group, chunk)
        self._tally.bytes_verified += len(expected)
        if (content := bytes(found)) != expected:
            difference = self._prompts.difference(content, expected)
            self._tally.violation(f"WRONG BYTES: {self._name} {kind} of chunk {group, chunk}: {difference}")

    def _check_blank(self) -> None:
        """No call is under way: nothing may write now."""
        for memory in (*self._paged_memory, self._region.array):
            if (memory != BLANK).any():
                self._tally.violation(f"LATE WRITE: memory of {self._name} has changed while no call was under way")
                memory[:] = BLANK


async def works(client: SparseStoreClient, prompts: Prompts) -> bool:
    """Whether what has never been there before can be put and read back. Raises ``StoreError``."""
    tokens = prompts.fresh()
    sequence = client.sequence(tokens)
    put = await client.put(sequence, lambda group, chunk: prompts.page(tokens, group, chunk, keep=False))
    got = await client.get(sequence)
    return (
        not put.failures
        and got.hit_length == 64
        and all(bytes(view) == prompts.page(tokens, *where, keep=False) for where, view in got.chunks.items())
    )
