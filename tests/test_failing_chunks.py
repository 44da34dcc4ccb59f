"""Chunks that fail: how a get shrinks, what a put tries again, and what both remember of an owner that is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent / "core"))
from strategies import layouts, slower

from mooncake_sparse_client import (
    FullAttentionSpec,
    GetItem,
    KVCacheLayout,
    Limits,
    MemoryStore,
    PutItem,
    Resilience,
    SlidingWindowSpec,
    SparseStoreClient,
    chunk_name,
    longest_usable_prefix,
)
from mooncake_sparse_client.core.results import ChunkFailure
from mooncake_sparse_client.data_plane.ledger import OUT_OF_REACH_SECONDS
from mooncake_sparse_client.stores.base import Failure
from mooncake_sparse_client.stores.wrapping import WrappedStore

F16 = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48)])
FS = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32)])
#: A chunk a request, and three requests prepared at a time.
ONE_BY_ONE = Limits(max_batch_chunks=1, concurrency=1)
ABREAST = 3
TRANSFER = Failure("transfer", True, "the owner does not deliver")
BUSY = Failure("busy", True, "another writer has not finished")
FULL = Failure("full", True, "no room")
MISSING = Failure("missing", False, "not there")


def page(group: int, chunk: int, nbytes: int) -> bytes:
    return random.Random(f"{group}/{chunk}").randbytes(nbytes)


def source_for(layout: KVCacheLayout) -> Any:
    return lambda group, chunk: page(group, chunk, layout.page_sizes[group])


def intact(got: Any, layout: KVCacheLayout) -> bool:
    return all(bytes(view) == page(*where, layout.page_sizes[where[0]]) for where, view in got.chunks.items())


def client_of(store: Any, layout: KVCacheLayout = F16, **settings: Any) -> SparseStoreClient:
    plain = Resilience(attempts=1, breaker=False)
    return SparseStoreClient(
        store, layout, **{"model_name": "m", "retention_interval": None, "resilience": plain, **settings}
    )


def key_of(client: SparseStoreClient, sequence: Any, group: int, chunk: int) -> str:
    name = chunk_name(client.layout, sequence.block_hashes, group, chunk)
    assert name is not None
    return client.keys.key(group, name)


class Faulty(WrappedStore):
    """A store whose owners of memory do what a test says: ``on_get`` and ``on_put`` answer a failure for a key, or
    None for none. What a put reports and swallows, ``swallows`` says."""

    def __init__(self) -> None:
        self.kept = MemoryStore()
        super().__init__(self.kept)
        self.on_get: Callable[[str], Failure | None] = lambda key: None
        self.on_put: Callable[[str], Failure | None] = lambda key: None
        self.swallows: Callable[[str], bool] = lambda key: False
        self.gets: list[list[str]] = []
        self.puts: list[list[str]] = []
        self.asked: list[str] = []
        self.turns = 1

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked += keys
        return await super().exists(keys)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self.gets.append([item.key for item in items])
        for _ in range(self.turns):
            await asyncio.sleep(0)
        failures = {item.key: self.on_get(item.key) for item in items}
        good = [item for item in items if failures[item.key] is None]
        failures |= dict(zip([item.key for item in good], await super().get(good), strict=True))
        return [failures[item.key] for item in items]

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self.puts.append([item.key for item in items])
        for _ in range(self.turns):
            await asyncio.sleep(0)
        failures = {item.key: self.on_put(item.key) for item in items}
        good = [item for item in items if failures[item.key] is None and not self.swallows(item.key)]
        failures |= dict(zip([item.key for item in good], await super().put(good), strict=True))
        return [failures[item.key] for item in items]


def times(failure: Failure, attempts: dict[str, int]) -> Callable[[str], Failure | None]:
    """The failure, for each key so often."""
    left = dict(attempts)

    def answer(key: str) -> Failure | None:
        left[key] = left.get(key, 0) - 1
        return failure if left[key] >= 0 else None

    return answer


# Reads


async def test_behind_a_lost_chunk_nothing_is_read() -> None:
    store = Faulty()
    async with client_of(store, limits=ONE_BY_ONE) as client:
        sequence = client.sequence(range(16 * 100 + 1))
        await client.put(sequence, source_for(F16))
        hit = await client.lookup(sequence)
        await store.kept.remove([key_of(client, sequence, 0, 5)])
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (80, (ChunkFailure(0, 5, "missing"),))
        assert sorted(got.chunks) == [(0, chunk) for chunk in range(5)]
        assert intact(got, F16)
        assert len(store.gets) <= 6 + ABREAST


async def test_an_owner_that_is_gone_is_asked_a_few_times_and_then_left_alone() -> None:
    store = Faulty()
    async with client_of(store, limits=ONE_BY_ONE) as client:
        sequence = client.sequence(range(16 * 100 + 1))
        await client.put(sequence, source_for(F16))
        hit = await client.lookup(sequence)
        store.on_get = lambda key: TRANSFER
        got = await client.get(hit)
        assert (got.hit_length, got.failures[0]) == (0, ChunkFailure(0, 0, "transfer"))
        assert len(store.gets) <= ABREAST + 1
        assert Counter(key for keys in store.gets for key in keys).most_common(1)[0][1] == 2
        # An older hit does not lead there again, and a lookup does not promise what cannot be read.
        store.gets.clear()
        again = await client.get(hit)
        assert (again.hit_length, again.failures[0], store.gets) == (0, ChunkFailure(0, 0, "transfer"), [])
        assert (await client.lookup(sequence)).hit_length == 0
        assert not (await client.exists(sequence))[0][0]
        # When its time is over it is asked for, and read, as ever.
        ledger, now = client._transport.ledger, time.monotonic()
        store.on_get = lambda key: None
        ledger._now = lambda: now + OUT_OF_REACH_SECONDS + 1
        assert (await client.lookup(sequence)).hit_length == 1600
        assert (await client.get(hit)).hit_length == 1600


async def test_being_asked_for_does_not_keep_a_key_out_of_reach() -> None:
    store = Faulty()
    async with client_of(store) as client:
        sequence = client.sequence(range(33))
        await client.put(sequence, source_for(F16))
        hit = await client.lookup(sequence)
        store.on_get = lambda key: TRANSFER
        await client.get(hit)
        ledger, now = client._transport.ledger, time.monotonic()
        for later in (4.0, 8.0):
            ledger._now = lambda later=later: now + later
            assert (await client.get(hit)).hit_length == 0
        store.on_get = lambda key: None
        ledger._now = lambda: now + OUT_OF_REACH_SECONDS + 1
        assert (await client.get(hit)).hit_length == 32


async def test_what_is_gone_from_a_dead_owner_and_written_anew_is_found_at_once() -> None:
    store = Faulty()
    async with client_of(store) as client, client_of(store) as other:
        sequence = client.sequence(range(33))
        await client.put(sequence, source_for(F16))
        store.on_get = lambda key: TRANSFER
        assert (await client.get(sequence)).hit_length == 0
        store.on_get = lambda key: None
        await store.kept.remove(store.kept.keys())  # the master has forgotten the owner
        assert (await client.lookup(sequence)).hit_length == 0
        await other.put(sequence, source_for(F16))
        assert (await client.lookup(sequence)).hit_length == 32
        assert (await client.get(sequence)).hit_length == 32


async def test_what_may_come_is_asked_for_once_more_and_the_rest_goes_on() -> None:
    store = Faulty()
    async with client_of(store, limits=ONE_BY_ONE) as client:
        sequence = client.sequence(range(16 * 20 + 1))
        await client.put(sequence, source_for(F16))
        hit = await client.lookup(sequence)
        keys = [key_of(client, sequence, 0, chunk) for chunk in range(20)]
        store.on_get = times(BUSY, {keys[2]: 1, keys[3]: 1, keys[11]: 2})
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (176, (ChunkFailure(0, 11, "busy"),))
        assert intact(got, F16)
        read = Counter(key for each in store.gets for key in each)
        assert [read[key] for key in keys[:12]] == [1, 1, 2, 2, *[1] * 7, 2]
        assert sum(read[key] for key in keys[12:]) <= ABREAST
        # The lowest goes first, as soon as it is clear that it is late.
        order = [key for each in store.gets for key in each]
        assert order.index(keys[2], order.index(keys[2]) + 1) <= 2 + ABREAST + 1


async def test_a_late_chunk_that_nothing_needs_any_more_is_not_asked_for_again() -> None:
    store = Faulty()
    async with client_of(store, limits=ONE_BY_ONE) as client:
        sequence = client.sequence(range(16 * 20 + 1))
        await client.put(sequence, source_for(F16))
        hit = await client.lookup(sequence)
        keys = [key_of(client, sequence, 0, chunk) for chunk in range(20)]
        store.on_get = lambda key: {keys[4]: MISSING, keys[5]: BUSY}.get(key)
        got = await client.get(hit)
        assert got.hit_length == 64
        assert sum(each.count(keys[5]) for each in store.gets) <= 1


async def test_a_window_that_is_lost_leaves_what_shorter_prefixes_need() -> None:
    store = Faulty()
    async with client_of(store, FS, limits=ONE_BY_ONE) as client:
        sequence = client.sequence(range(321))
        await client.put(sequence, source_for(FS))
        hit = await client.lookup(sequence)
        store.on_get = {key_of(client, sequence, 1, 39): MISSING}.get
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (288, (ChunkFailure(1, 39, "missing"),))
        assert intact(got, FS)
        assert max(Counter(key for keys in store.gets for key in keys).values()) == 1


@slower
@given(layouts(), st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_whatever_fails_the_rest_is_the_longest_prefix_of_what_came(
    layout: KVCacheLayout, seed: int, blocks: int
) -> None:
    asyncio.run(whatever_fails(layout, random.Random(seed), blocks))


async def whatever_fails(plain: KVCacheLayout, dice: random.Random, blocks: int) -> None:
    groups = [_sized(spec) for spec in plain.groups]
    layout = KVCacheLayout(groups, use_eagle=plain.use_eagle, hash_block_size=plain.hash_block_size)
    store = Faulty()
    limits = Limits(max_batch_chunks=dice.choice([1, 2, 5, 512]), concurrency=dice.choice([1, 2]))
    async with client_of(store, layout, limits=limits) as client:
        sequence = client.sequence(range(blocks * layout.alignment + 1))
        await client.put(sequence, source_for(layout))
        hit = await client.lookup(sequence)
        present = [mask.copy() for mask in await client.exists(sequence, all_chunks=True)]
        fates: dict[str, list[Failure]] = {}
        for group, mask in enumerate(present):
            for chunk in np.flatnonzero(mask).tolist():
                fate = dice.choices([[], [BUSY], [TRANSFER] * 2, [MISSING]], [30, 3, 1, 1])[0]
                fates[key_of(client, sequence, group, chunk)] = list(fate)
                mask[chunk] = fate in ([], [BUSY])
        store.on_get = lambda key: fates[key].pop(0) if fates[key] else None
        got = await client.get(hit)
        possible = longest_usable_prefix(layout, len(sequence), present)
        assert intact(got, layout)
        assert got.hit_length % layout.alignment == 0
        # A margin chunk is believed to be there until it is read, so that a hit may be longer by it.
        if not layout.use_eagle and not any(spec.eagle for spec in layout.groups):
            assert got.hit_length <= possible
            if all(spec.dense for spec in layout.groups):
                assert got.hit_length == possible  # windows may take more rounds than a get makes
        assert max(Counter(key for keys in store.gets for key in keys).values(), default=0) <= 2


def _sized(spec: Any) -> Any:
    return dataclasses.replace(spec, page_size_bytes=spec.page_size_bytes or 24)


# Writes


async def test_only_what_failed_is_put_again() -> None:
    store = Faulty()
    async with client_of(store) as client:
        sequence = client.sequence(range(16 * 10))
        keys = [key_of(client, sequence, 0, chunk) for chunk in range(10)]
        store.on_put = times(TRANSFER, {keys[3]: 2, keys[7]: 1})
        put = await client.put(sequence, source_for(F16))
        assert (put.written.chunks, put.failures) == (10, ())
        assert [sorted(each) for each in store.puts] == [sorted(keys), sorted([keys[3], keys[7]]), [keys[3]]]
        store.on_put = lambda key: None
        assert (await client.get(sequence)).hit_length == 144


async def test_what_a_put_finds_removed_meanwhile_is_put_again() -> None:
    store = Faulty()
    async with client_of(store) as client:
        sequence = client.sequence(range(32))
        store.on_put = times(MISSING, {key_of(client, sequence, 0, 1): 1})
        assert (await client.put(sequence, source_for(F16))).written.chunks == 2


async def test_what_another_writer_finishes_is_not_put_again() -> None:
    store = Faulty()
    async with client_of(store) as client:
        sequence = client.sequence(range(64))
        key = key_of(client, sequence, 0, 2)

        def busy(of: str) -> Failure | None:
            if of == key:
                store.kept._values[key] = b"theirs"
                return BUSY
            return None

        store.on_put = busy
        put = await client.put(sequence, source_for(F16))
        assert (put.written.chunks, put.existing.chunks, put.failures) == (3, 1, ())
        assert sum(each.count(key) for each in store.puts) == 1


@pytest.mark.parametrize("failure", [TRANSFER, BUSY, FULL])
async def test_what_stays_so_fails_with_its_own_reason(failure: Failure) -> None:
    store = Faulty()
    async with client_of(store, timeout=0.6) as client:
        sequence = client.sequence(range(64))
        key = key_of(client, sequence, 0, 2)
        store.on_put = {key: failure}.get
        put = await client.put(sequence, source_for(F16))
        assert (put.written.chunks, put.failures) == (3, (ChunkFailure(0, 2, failure.kind),))
        assert sum(each.count(key) for each in store.puts) > 2
        assert client._transport.claims == {}


async def test_a_swallowed_put_is_made_again() -> None:
    store = Faulty()
    async with client_of(store) as client:
        sequence = client.sequence(range(64))
        key = key_of(client, sequence, 0, 2)
        seen: list[str] = []

        def swallows(of: str) -> bool:
            seen.append(of)
            return of == key and seen.count(key) == 1

        store.swallows = swallows
        put = await client.put(sequence, source_for(F16), confirm=True)
        assert (put.written.chunks, put.failures) == (4, ())
        assert seen.count(key) == 2
        assert (await client.get(client.sequence(range(65)))).hit_length == 64


async def test_a_swallowed_put_may_be_anothers_in_the_end() -> None:
    store = Faulty()
    async with client_of(store) as client:
        sequence = client.sequence(range(64))
        key = key_of(client, sequence, 0, 2)
        asyncio.get_running_loop().call_later(0.05, store.kept._values.__setitem__, key, b"theirs")
        store.swallows = lambda of: of == key
        put = await client.put(sequence, source_for(F16), confirm=True)
        assert (put.written.chunks, put.existing.chunks, put.failures) == (3, 1, ())


async def out_of_reach(client: SparseStoreClient, store: Faulty, sequence: Any, chunk: int) -> str:
    """A chunk that exists, on an owner that was found not to deliver."""
    await client.put(sequence, source_for(F16))
    key = key_of(client, sequence, 0, chunk)
    store.on_get = {key: TRANSFER}.get
    assert (await client.get(sequence)).hit_length == 16 * chunk
    store.puts.clear()
    return key


async def test_what_is_out_of_reach_does_not_count_as_existing() -> None:
    store = Faulty()
    async with client_of(store, timeout=0.6) as client:
        sequence = client.sequence(range(81))
        await out_of_reach(client, store, sequence, 2)
        put = await client.put(sequence, source_for(F16))
        assert (put.existing.chunks, put.failures) == (4, (ChunkFailure(0, 2, "transfer"),))
        assert store.puts == []  # a store answers that all is well, and keeps the value that nobody can read
        assert client._transport.claims == {}


async def test_what_was_out_of_reach_is_written_once_it_is_gone() -> None:
    store = Faulty()
    async with client_of(store) as client:
        sequence = client.sequence(range(81))
        key = await out_of_reach(client, store, sequence, 2)
        hit = await client.lookup(sequence)
        putting = asyncio.create_task(client.put(sequence, source_for(F16), hit=hit))
        await asyncio.sleep(0.03)
        # Meanwhile nobody else is held up, not even where one request is under way at a time.
        other = await client.put(client.sequence(range(1, 60)), source_for(F16))
        assert (other.written.chunks, putting.done()) == (3, False)
        await store.kept.remove([key])
        put = await putting
        assert (put.written.chunks, put.existing.chunks, put.failures) == (1, 4, ())
        store.on_get = lambda key: None
        assert (await client.get(sequence)).hit_length == 80


async def test_what_is_out_of_reach_no_longer_exists_as_ever() -> None:
    """The owner hung, and came back: what it has need not be written."""
    store = Faulty()
    async with client_of(store) as client:
        sequence = client.sequence(range(81))
        await out_of_reach(client, store, sequence, 2)
        now = time.monotonic()
        client._transport.ledger._now = lambda: now + OUT_OF_REACH_SECONDS + 1
        put = await client.put(sequence, source_for(F16))
        assert (put.existing.chunks, put.failures, store.puts) == (5, (), [])


async def test_a_damaged_value_on_a_dead_owner_is_not_replaced_again_and_again() -> None:
    """Replacing goes to where the value is, and takes a dead owner's time for each."""
    store = Faulty()
    async with client_of(store, timeout=1.0) as client:
        sequence = client.sequence(range(81))
        await client.put(sequence, source_for(F16))
        key = key_of(client, sequence, 0, 2)
        store.kept._values[key] = bytes(len(store.kept._values[key]))
        assert (await client.get(sequence)).hit_length == 32
        store.puts.clear()
        store.on_put = {key: TRANSFER}.get
        put = await client.put(sequence, source_for(F16))
        assert (put.existing.chunks, put.failures) == (4, (ChunkFailure(0, 2, "transfer"),))
        assert store.puts == [[key]]


# Back-pressure


async def test_a_full_store_slows_all_puts_down_and_no_reads() -> None:
    store = Faulty()
    async with client_of(store) as client:
        known = client.sequence([1000] * 161)
        await client.put(known, source_for(F16))
        store.puts.clear()
        store.on_put = lambda key: FULL
        sequences = [client.sequence([number] * 64) for number in range(40)]
        first = asyncio.create_task(client.put(sequences[0], source_for(F16)))
        while not store.puts:
            await asyncio.sleep(0)
        await asyncio.sleep(0.005)
        puts = [first, *(asyncio.create_task(client.put(each, source_for(F16))) for each in sequences[1:])]
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert (await client.get(known)).hit_length == 160
        # Pauses of 10, 20, 40, ... milliseconds, at least half of each: nothing like forty clients' attempts.
        assert len(store.puts) <= 8
        store.on_put = lambda key: None
        for put in await asyncio.gather(*puts):
            assert (put.written.chunks, put.failures) == (4, ())


async def test_a_put_that_never_had_its_turn_says_full() -> None:
    store = Faulty()
    async with client_of(store, timeout=0.4) as client:
        store.on_put = lambda key: FULL
        puts = [client.put(client.sequence([number] * 64), source_for(F16)) for number in range(10)]
        for put in await asyncio.gather(*puts):
            assert {failure.reason for failure in put.failures} == {"full"}
            assert put.failed.chunks == 4
        store.on_put = lambda key: None
        # The pause that is left may be longer than such a short call's patience.
        while (put := await client.put(client.sequence(range(64)), source_for(F16))).failed.chunks:
            assert put.written.chunks == 0
        assert put.written.chunks == 4


async def test_an_owner_that_takes_nothing_is_not_offered_all_of_a_put() -> None:
    store = Faulty()
    async with client_of(store, limits=ONE_BY_ONE) as client:
        sequence = client.sequence(range(16 * 50))
        calls = 0

        def gone_at_first(key: str) -> Failure | None:
            nonlocal calls
            calls += 1
            return TRANSFER if calls <= ABREAST else None

        store.on_put = gone_at_first
        put = await client.put(sequence, source_for(F16))
        assert (put.written.chunks, put.failures) == (50, ())
        assert len(store.puts) <= 50 + 2 * ABREAST
