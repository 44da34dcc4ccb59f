"""What a client does while faults happen to its store, and what must hold: every byte, the bounds on time, recovery."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np
from ground import MIB, Ground

from mooncake_sparse_client import (
    FullAttentionSpec,
    KVCacheLayout,
    Limits,
    SlidingWindowSpec,
    SparseStoreClient,
    chunk_name,
)
from mooncake_sparse_client.core.results import GetResult, PutResult
from mooncake_sparse_client.errors import StoreError
from mooncake_sparse_client.resilience import Resilience
from mooncake_sparse_client.stores.local import LocalMooncake

LAYOUT: Final = KVCacheLayout(
    [FullAttentionSpec(16, page_size_bytes=8192), SlidingWindowSpec(16, 32, page_size_bytes=4096)]
)
LIMITS: Final = Limits(max_batch_bytes=64 << 10, concurrency=1, staging_bytes=4 * MIB, max_bytes_in_flight=MIB)
#: Of every call, in seconds, and what a busy machine and the end of a native call may add.
TIMEOUT: Final = 4.0
SLACK: Final = 6.0
#: Seconds in which all is well again after a fault is over. A master speaks of a dead owner's keys for ten of them.
SOON: Final = 45.0
RESILIENCE: Final = Resilience(probe_seconds=0.3, trip_after=2)
#: What the store's failure may be called, in an error or in a result.
KINDS: Final = frozenset(
    {"unavailable", "down", "timeout", "transfer", "missing", "full", "busy", "lease_expired", "unconfirmed"}
)
#: Tokens of a prompt whose put and get take many batches.
LONG: Final = 3200

#: Seeds of prompts that no other test uses.
_seeds = itertools.count(1)


def page(seed: int, group: int, chunk: int, nbytes: int) -> bytes:
    """The bytes of one chunk, which nothing else derives."""
    return random.Random(f"{seed}/{group}/{chunk}").randbytes(nbytes)


class Workload:
    """One client that puts, looks up and reads prompts, and compares each byte that it gets."""

    def __init__(self, client: SparseStoreClient) -> None:
        self.client = client
        self.layout = client.layout

    def sequence(self, seed: int, tokens: int) -> Any:
        return self.client.sequence(np.arange(tokens) + seed * 10_000)

    async def put(
        self, seed: int, tokens: int = 320, *, at: Callable[[int], None] | None = None, confirm: bool = False
    ) -> PutResult:
        """``at`` is told how many chunks the source has been asked for."""
        counter = itertools.count(1)

        def source(group: int, chunk: int) -> bytes:
            if at is not None:
                at(next(counter))
            return page(seed, group, chunk, self.layout.page_sizes[group])

        return await self.client.put(self.sequence(seed, tokens), source, confirm=confirm)

    async def get(self, seed: int, tokens: int = 320, *, at: Callable[[int], None] | None = None) -> GetResult:
        """What of the prompt the store has, each byte compared. Odd prompts are read into memory of ours."""
        counter = itertools.count(1)
        memory: dict[tuple[int, int], bytearray] = {}

        def sink(group: int, chunk: int) -> bytearray:
            if at is not None:
                at(next(counter))
            return memory.setdefault((group, chunk), bytearray(self.layout.page_sizes[group]))

        into = sink if at is not None or seed % 2 else None
        hit = await self.client.lookup(self.sequence(seed, tokens))
        got = await self.client.get(hit, into=into)
        found = memory if into is not None else got.chunks
        for group, chunk in needed(self.layout, got.hit_length):
            view = bytes(found[group, chunk])
            assert view == page(seed, group, chunk, len(view)), f"wrong bytes in chunk {chunk} of group {group}"
        return got

    async def round_trip(self, tokens: int = 320, *, confirm: bool = True) -> bool:
        """Whether a fresh prompt is written, found and read as a whole."""
        seed = new_seed()
        put = await self.put(seed, tokens, confirm=confirm)
        if put.failures:
            return False
        return (await self.get(seed, tokens)).hit_length == whole(tokens)

    async def recovers(self, within: float = SOON) -> float:
        """Seconds until two round trips in a row are well, with this same client. None takes longer than it may."""
        began = time.monotonic()
        well, last = 0, "?"
        while well < 2:
            assert time.monotonic() - began < within, f"not well after {within:g} s: {last}"
            outcome = await self.bounded(self.round_trip(), calls=3)
            well, last = (well + 1 if outcome is True else 0), repr(outcome)
            await asyncio.sleep(0 if well else 0.2)
        return time.monotonic() - began

    async def bounded(self, call: Awaitable[Any], *, calls: int = 1) -> Any:
        """What so many calls answer within their time, or the store's error, which they may raise."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(100):
                outcome = await call
        except StoreError as error:
            outcome = error
        assert not isinstance(outcome, StoreError) or outcome.kind in KINDS, repr(outcome)
        took = time.monotonic() - began
        assert took < calls * TIMEOUT + SLACK, f"took {took:.1f} s: {outcome!r}"
        if isinstance(outcome, PutResult | GetResult):
            assert {failure.reason for failure in outcome.failures} <= KINDS, outcome
        return outcome

    async def during(self, what: str, fault: Callable[[], Awaitable[None]]) -> Any:
        """Do ``what`` (``idle``, ``put`` or ``get``) with a prompt of many batches, and the fault in its midst."""
        seed = new_seed()
        if what == "get":
            assert not (await self.put(seed, LONG)).failures
        midst = asyncio.Event()
        if what == "idle":
            await fault()
            return None
        call = {"put": self.put, "get": self.get}[what]
        task = asyncio.ensure_future(
            self.bounded(call(seed, LONG, at=lambda n: midst.set() if n > 60 else None), calls=2)
        )
        await asyncio.wait([task, asyncio.ensure_future(midst.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not task.done(), f"the {what} was over before the fault: {task}"
        await fault()
        return await task


def needed(layout: KVCacheLayout, hit_length: int) -> list[tuple[int, int]]:
    """The chunks that a hit of this length consists of, from the rules of full and window groups alone."""
    chunks = []
    for group, spec in enumerate(layout.groups):
        window = getattr(spec, "sliding_window", None)
        first = 0 if window is None else max(0, hit_length - window + 1) // spec.block_size
        chunks += [(group, chunk) for chunk in range(first, hit_length // spec.block_size)]
    return chunks


def whole(tokens: int) -> int:
    """Tokens of the longest hit of a prompt: the last token is always left to compute."""
    return (tokens - 1) // 16 * 16


def new_seed() -> int:
    return next(_seeds)


def key_of(client: SparseStoreClient, sequence: Any, group: int, chunk: int) -> str:
    name = chunk_name(client.layout, sequence.block_hashes, group, chunk)
    assert name is not None
    return client.keys.key(group, name)


def fails(outcome: Any) -> bool:
    """Whether a call told of the store's failure, one way or the other."""
    return isinstance(outcome, StoreError) or bool(outcome.failures)


def client_of(ground: Ground | LocalMooncake, mode: str, model: str, **settings: Any) -> SparseStoreClient:
    """One of the ground, in ``mode``, that is not open yet."""
    settings = {"timeout": TIMEOUT, "resilience": RESILIENCE, "limits": LIMITS, "pool_size": 24 * MIB, **settings}
    where = {"owner_address": ground.owner_address} if mode == "shared" else {}
    return SparseStoreClient.connect(
        settings.pop("layout", LAYOUT),
        model_name=model,
        mode=mode,
        master_server_address=ground.master_address,
        retention_interval=None,
        **where,
        **settings,
    )


@asynccontextmanager
async def workload(ground: Ground | LocalMooncake, mode: str, model: str, **settings: Any) -> AsyncIterator[Workload]:
    """What a client of the ground does, in ``mode``."""
    async with client_of(ground, mode, model, **settings) as client:
        yield Workload(client)
