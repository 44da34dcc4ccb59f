"""The data plane: bytes between paged memory and every kind of store, without a copy and within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import LoopThread
from engine import Engine, page
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_sparse_client import (
    BlockMemory,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GetItem,
    HeapMemory,
    KVCacheLayout,
    Limits,
    LocalMooncake,
    MambaSpec,
    MemoryStore,
    MooncakeStore,
    PagedKVCache,
    PrefixHit,
    PutItem,
    SlidingWindowSpec,
    SparseStoreClient,
    Store,
    load_config,
)
from mooncake_sparse_client.core.results import ChunkFailure
from mooncake_sparse_client.errors import ClientClosedError, ConfigError, InvalidBufferError, InvalidRequestError
from mooncake_sparse_client.stores.base import Failure, PlacedGets, PlacedPuts
from mooncake_sparse_client.stores.wrapping import WrappedStore

MIB = 1 << 20
FS = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=640), SlidingWindowSpec(8, 8, page_size_bytes=320)])
ALL_KINDS = KVCacheLayout(
    [
        FullAttentionSpec(32, page_size_bytes=7000),
        SlidingWindowSpec(8, 20, page_size_bytes=320),
        ChunkedLocalAttentionSpec(16, 64, page_size_bytes=401),
        MambaSpec(32, page_size_bytes=30_000),
    ]
)
FULL = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=4096)])
SMALL = Limits(max_batch_bytes=64 << 10, max_batch_chunks=8, staging_bytes=2 * MIB, max_bytes_in_flight=256 << 10)


def loads_of(hit: PrefixHit) -> list[tuple[int, int]]:
    return [(group, chunk) for group, mask in enumerate(hit.load_masks) for chunk in np.flatnonzero(mask).tolist()]


def client_of(store: Store, layout: KVCacheLayout, model_name: str = "m", **options: Any) -> SparseStoreClient:
    return SparseStoreClient(store, layout, model_name=model_name, **{"retention_interval": None, **options})


class BatchStore(WrappedStore):
    """Notes the batches that it gets, and fails chosen keys."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.puts: list[Sequence[PutItem]] = []
        self.gets: list[Sequence[GetItem]] = []
        self.bad_gets: dict[str, list[Failure]] = {}
        self.under_way = self.most_under_way = 0

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self.puts.append(items)
        async with self._counted():
            return await super().put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self.gets.append(items)
        async with self._counted():
            answers = await super().get(items)
        return [
            self.bad_gets[item.key].pop(0) if self.bad_gets.get(item.key) else answer
            for item, answer in zip(items, answers, strict=True)
        ]

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0.001)
            yield
        finally:
            self.under_way -= 1


@pytest.fixture(scope="module")
def shared_store(serving_master: LocalMooncake, fixtures_loop: LoopThread) -> Iterator[MooncakeStore]:
    assert serving_master.owner_address is not None
    config = load_config("shared", owner_address=serving_master.owner_address, pool_size=96 * MIB, environ={})
    store = fixtures_loop.run(MooncakeStore.connect(config))
    yield store
    fixtures_loop.run(store.aclose())


@pytest.fixture(scope="module")
def remote_store(serving_master: LocalMooncake, fixtures_loop: LoopThread) -> Iterator[MooncakeStore]:
    config = load_config("remote", master_server_address=serving_master.master_address, environ={})
    store = fixtures_loop.run(MooncakeStore.connect(config))
    yield store
    fixtures_loop.run(store.aclose())


@pytest.fixture(params=["memory", "embedded", "remote", "shared"])
def any_store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore()
    name = {"embedded": "mooncake_store"}.get(request.param, f"{request.param}_store")
    store: Store = request.getfixturevalue(name)
    return store


@pytest.mark.parametrize("value_format", ["framed", "raw"])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_paged_memory_goes_to_every_store_and_back(
    any_store: Store, fresh: str, pieces: int, value_format: Any
) -> None:
    """From the store's own memory and from any other: put, look up, read into other blocks; each byte is compared."""
    tokens, blocks = 1101, 160
    async with client_of(any_store, ALL_KINDS, fresh, value_format=value_format, limits=SMALL) as client:
        pool = client.allocate(Engine.nbytes(ALL_KINDS, blocks, pieces))
        for turn, memory in enumerate([pool.array, None]):
            engine = Engine(ALL_KINDS, blocks, pieces=pieces, seed=turn, memory=memory).fill()
            await client.register(engine.cache)
            sequence = client.sequence(np.arange(turn, turn + tokens))
            put = await client.put(sequence, engine.at)
            assert put.written.chunks > 100
            assert not put.failures
            assert (await client.put(sequence, engine.at)).written.chunks == 0
            other = Engine(ALL_KINDS, blocks, pieces=pieces, seed=9, memory=memory)
            await client.register(other.cache)
            hit = await client.lookup(sequence)
            assert hit.hit_length == 1088
            got = await client.get(hit, into=other.at)
            assert (got.hit_length, got.failures, got.chunks) == (1088, (), {})
            assert got.loaded.chunks == len(loads_of(hit))
            assert other.has(loads_of(hit))
            # What was not asked for was not touched.
            rest = set(np.ndindex(4, blocks)) - set(loads_of(hit))
            assert other.is_blank(sorted(rest))
            # A mapping's view of the same values.
            got = await client.get(hit)
            assert {where: bytes(view) for where, view in got.chunks.items()} == {
                where: page(*where, ALL_KINDS.page_sizes[where[0]]) for where in loads_of(hit)
            }
        await client.remove(sequence, force=True)


@pytest.mark.parametrize("mode", ["embedded", "remote", "shared"])
async def test_whether_memory_moves_without_a_copy(
    mode: str, mooncake_store: MooncakeStore, remote_store: MooncakeStore, shared_store: MooncakeStore, fresh: str
) -> None:
    store = {"embedded": mooncake_store, "remote": remote_store, "shared": shared_store}[mode]
    async with client_of(store, FULL, fresh, value_format="raw") as client:
        for pieces in (1, 3):
            ours = Engine(FULL, 8, pieces=pieces, memory=client.allocate(Engine.nbytes(FULL, 8, pieces)).array)
            theirs = Engine(FULL, 8, pieces=pieces)
            # Over the network a copy costs less than three transfers.
            assert await client.register(ours.cache) is (mode != "remote" or pieces == 1)
            for _ in range(2):
                assert await client.register(theirs.cache) is (mode == "embedded" or (mode, pieces) == ("remote", 1))
    large = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=4 * MIB)])
    async with client_of(store, large, fresh, value_format="raw") as client:
        assert await client.register(Engine(large, 1, pieces=3).cache) is (mode != "shared")


async def test_memory_is_registered_before_it_is_used() -> None:
    store = MemoryStore()
    async with client_of(store, FS) as client:
        engine, sequence = Engine(FS, 20).fill(), client.sequence(range(100))
        for call in (
            lambda: client.put(sequence, engine.at),
            lambda: client.get(sequence, into=engine.at),
        ):
            with pytest.raises(InvalidBufferError, match="register"):
                await call()
        await client.register(engine.cache)
        await client.put(sequence, engine.at)
        await client.unregister(engine.cache)
        with pytest.raises(InvalidBufferError, match="register"):
            await client.get(sequence, into=engine.at)
        with pytest.raises(InvalidBufferError, match="PagedKVCache"):
            await client.register(bytearray(100))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["pages", "groups", "tables", "short", "block twice", "read-only"])
async def test_memory_that_does_not_fit_is_told_before_anything_happens(wrong: str) -> None:
    store = MemoryStore()
    async with client_of(store, FS) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, lambda group, chunk: page(group, chunk, FS.page_sizes[group]))
        engine = Engine(FS, 20)
        tables = [table.copy() for table in engine.tables]
        if wrong == "pages":
            with pytest.raises(InvalidBufferError, match=r"640.*320|320.*640"):
                await client.register(PagedKVCache(engine.arrays[::-1]))
            return
        if wrong == "groups":
            with pytest.raises(InvalidBufferError, match="640"):
                await client.register(PagedKVCache(engine.arrays[:1]))
            return
        cache = engine.cache
        if wrong == "tables":
            await client.register(cache)
            with pytest.raises(InvalidBufferError, match="at\\(block_tables\\)"):
                await client.get(sequence, into=cache)
            return
        if wrong == "short":
            tables[1] = tables[1][:11]
        if wrong == "block twice":
            tables[0][1] = tables[0][2]
        if wrong == "read-only":
            for group in engine.arrays:
                for array in group:
                    array.flags.writeable = False
            cache = PagedKVCache(engine.arrays)
        await client.register(cache)
        with pytest.raises(InvalidBufferError):
            await client.get(sequence, into=cache.at(tables))
        assert engine.is_blank([(0, 0), (0, 1), (0, 2), (1, 3)])
        if wrong == "short":
            kept = store.keys()
            with pytest.raises(InvalidBufferError, match="group 1"):
                await client.put(client.sequence(range(7, 107)), cache.at(tables))
            assert store.keys() == kept


async def test_blocks_that_an_engine_freed_are_unavailable() -> None:
    async with client_of(MemoryStore(), FS) as client:
        engine, sequence = Engine(FS, 20).fill(), client.sequence(range(100))
        await client.register(engine.cache)
        tables = [engine.tables[0].copy(), engine.tables[1].copy()]
        tables[1][:8] = -1
        put = await client.put(sequence, engine.cache.at(tables))
        assert put.unavailable.chunks == 2
        assert put.written.chunks == 4
        assert put.failures == ()
        tables[0][2] = -1
        with pytest.raises(InvalidBufferError, match=r"group 0.*chunk 2|chunk 2.*group 0"):
            await client.get(sequence, into=engine.cache.at(tables))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_paged_memory_is_a_source_and_sink_like_any_other(data: st.DataObject) -> None:
    """Whatever the layout, the format and the holes: a client that is given paged memory ends where one ends
    that is given a mapping."""
    layout = data.draw(st.sampled_from([FS, ALL_KINDS, FULL]))
    value_format = data.draw(st.sampled_from(["framed", "raw"]))
    tokens = data.draw(st.integers(1, 260))
    pieces, blocks = data.draw(st.integers(1, 4)), 40
    lacks = data.draw(
        st.sets(st.tuples(st.integers(0, len(layout.groups) - 1), st.integers(0, 33)), max_size=5), label="lacks"
    )
    lost = data.draw(st.sets(st.integers(0, 200), max_size=3), label="lost")
    seed = data.draw(st.integers(0, 9))  # outside of the event loop: drawing may read files

    async def run() -> None:
        engine = Engine(layout, blocks, pieces=pieces, seed=seed).fill()
        tables = [table.copy() for table in engine.tables]
        for group, chunk in lacks:
            tables[group][chunk] = -1
        stores = MemoryStore(), MemoryStore()
        clients = [client_of(store, layout, value_format=value_format, limits=SMALL) for store in stores]

        def mapping(group: int, chunk: int) -> bytes | None:
            return None if (group, chunk) in lacks else page(group, chunk, layout.page_sizes[group])

        async with clients[0] as paged, clients[1] as plain:
            await paged.register(engine.cache)
            sequence = paged.sequence(range(tokens))
            assert await paged.put(sequence, engine.cache.at(tables)) == await plain.put(sequence, mapping)
            assert set(stores[0].keys()) == set(stores[1].keys())
            gone = [sorted(stores[0].keys())[number] for number in lost if number < len(stores[0].keys())]
            hits = [await client.lookup(sequence) for client in clients]
            for store in stores:
                await store.remove(gone)
            room = Engine(layout, blocks, pieces=pieces, seed=5)
            await paged.register(room.cache)
            got, expected = await paged.get(hits[0], into=room.at), await plain.get(hits[1])
            assert (got.hit_length, set(got.failures), got.loaded) == (
                expected.hit_length,
                set(expected.failures),
                expected.loaded,
            )
            assert room.has(list(expected.chunks))

    asyncio.run(run())


async def test_batches_are_handed_over_in_columns_and_stay_within_the_limits() -> None:
    store = BatchStore()
    async with client_of(store, FULL, value_format="raw", limits=SMALL) as client:
        engine, sequence = Engine(FULL, 200, pieces=1).fill(), client.sequence(range(3201))
        await client.register(engine.cache)
        assert (await client.put(sequence, engine.at)).written.chunks == 200
        got = await client.get(sequence, into=engine.at)
        assert got.hit_length == 3200
        for batches, kind in ((store.puts, PlacedPuts), (store.gets, PlacedGets)):
            assert all(isinstance(batch, kind) for batch in batches)
            assert {len(batch) for batch in batches} == {8}
            assert sum(len(batch) for batch in batches) == 200
        assert store.most_under_way == SMALL.concurrency


async def test_small_calls_side_by_side_travel_together() -> None:
    """While requests are on the wire the next ones gather, each key once, within the limits of a batch."""
    store = BatchStore()
    limits = Limits(max_batch_chunks=64)
    async with client_of(store, FULL, limits=limits) as client:
        engine, sequences = Engine(FULL, 64).fill(), [client.sequence(range(n, n + 65)) for n in range(0, 3200, 100)]
        await client.register(engine.cache)
        await asyncio.gather(*(client.put(sequence, engine.at) for sequence in sequences))
        assert sum(map(len, store.puts)) == 128
        assert len(store.puts) <= 8
        hits = [await client.lookup(sequence) for sequence in sequences]
        rooms = [Engine(FULL, 8, seed=number) for number in range(len(hits))]
        for room in rooms:
            await client.register(room.cache)
        got = await asyncio.gather(*(client.get(hit, into=room.at) for hit, room in zip(hits, rooms, strict=True)))
        assert all(each.hit_length == 64 and not each.failures for each in got)
        assert all(room.has([(0, chunk) for chunk in range(4)]) for room in rooms)
        assert len(store.gets) <= 8
        assert all(len({item.key for item in batch}) == len(batch) <= 64 for batch in store.gets)
        # The same prefix for many at once: each key stands in a request once, and everybody gets the bytes.
        got = await asyncio.gather(*(client.get(hits[0], into=room.at) for room in rooms))
        assert all(each.hit_length == 64 for each in got)
        assert all(room.has([(0, chunk) for chunk in range(4)]) for room in rooms)


async def test_a_late_chunk_is_read_again_into_the_same_block() -> None:
    store = BatchStore()
    async with client_of(store, FS) as client:
        engine, sequence = Engine(FS, 20).fill(), client.sequence(range(100))
        await client.register(engine.cache)
        await client.put(sequence, engine.at)
        keys = [item.key for batch in store.puts for item in batch]
        store.bad_gets = {keys[0]: [Failure("lease_expired", True, "late")]}
        room = Engine(FS, 20, seed=3)
        await client.register(room.cache)
        got = await client.get(sequence, into=room.at)
        assert (got.hit_length, got.failures) == (96, ())
        assert room.has([(0, 0), (0, 1), (0, 2), (1, 11)])


@pytest.mark.parametrize("kind", ["paged", "mapping"])
async def test_a_sink_made_for_the_hit_alone_gets_the_longest_prefix_that_it_has_room_for(kind: str) -> None:
    """A chunk goes between lookup and get. The prefix below wants another window, which the sink has no room for."""
    store = MemoryStore()
    async with client_of(store, FS) as client:
        sequence = client.sequence(range(200))
        await client.put(sequence, lambda group, chunk: page(group, chunk, FS.page_sizes[group]))
        hit = await client.lookup(sequence)
        assert hit.hit_length == 192
        wanted = set(loads_of(hit))
        (key,) = client._transport.jobs(sequence.block_hashes, np.array([0]), np.array([5])).keys
        await store.remove([key])
        engine = Engine(FS, 30)
        rooms = {where: bytearray(FS.page_sizes[where[0]]) for where in wanted | {(1, 15)}}
        # Room for the hit at 192, and for the window at 128; none for the one at 160.
        tables = [np.where([(g, c) in rooms for c in range(30)], table, -1) for g, table in enumerate(engine.tables)]
        if kind == "paged":
            await client.register(engine.cache)
            got = await client.get(hit, into=engine.cache.at(tables))
        else:
            got = await client.get(hit, into=rooms)
        assert got.hit_length == 128
        assert [failure[:2] for failure in got.failures] == [(0, 5)]
        for where in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 15)]:
            content = engine.bytes_of(*where) if kind == "paged" else bytes(rooms[where])
            assert content == page(*where, FS.page_sizes[where[0]])


async def test_a_pool_without_room_for_the_staging_memory_is_told(shared_store: MooncakeStore, fresh: str) -> None:
    with pytest.raises(ConfigError, match=r"staging_bytes=1073741824.*pool"):
        client_of(shared_store, FULL, fresh, limits=Limits(staging_bytes=1 << 30))


async def test_damage_in_paged_memory_is_a_miss_and_heals() -> None:
    store = BatchStore()
    async with client_of(store, FS) as client:
        engine, sequence = Engine(FS, 20).fill(), client.sequence(range(100))
        await client.register(engine.cache)
        await client.put(sequence, engine.at)
        item = next(item for batch in store.puts for item in batch if "@group:0@" in item.key)
        value = bytearray().join(item.buffers)  # the header's slot is another's by now
        room = bytearray(len(value))
        await store.inner.get([GetItem(item.key, (memoryview(room),))])
        room[100] ^= 1
        await store.inner.put([PutItem(item.key, (memoryview(room),), replace=True)])
        other = Engine(FS, 20, seed=3)
        await client.register(other.cache)
        got = await client.get(sequence, into=other.at)
        assert got.hit_length < 96
        assert [failure.reason for failure in got.failures] == ["checksum"]
        assert isinstance(got.failures[0], ChunkFailure)
        assert (await client.put(sequence, engine.at)).written.chunks == 1
        got = await client.get(sequence, into=other.at)
        assert (got.hit_length, got.failures) == (96, ())
        assert other.has([(0, 0), (0, 1), (0, 2), (1, 11)])


@pytest.mark.parametrize("pieces", [1, 2])
async def test_damage_heals_in_every_store(any_store: Store, fresh: str, pieces: int) -> None:
    async with client_of(any_store, FS, fresh) as client:
        engine = Engine(FS, 20, pieces=pieces, memory=client.allocate(Engine.nbytes(FS, 20, pieces)).array).fill()
        sequence = client.sequence(range(100))
        await client.register(engine.cache)
        await client.put(sequence, engine.at)
        hit = await client.lookup(sequence)
        key = client._transport.jobs(sequence.block_hashes, np.array([0]), np.array([1])).keys[0]
        value = bytearray(640 + 64)
        assert await any_store.get([GetItem(key, (memoryview(value),))]) == [None]
        value[200] ^= 0x10
        assert await any_store.put([PutItem(key, (memoryview(value),), replace=True)]) == [None]
        got = await client.get(hit)
        assert [failure.reason for failure in got.failures] == ["checksum"]
        assert (await client.put(sequence, engine.at)).written.chunks == 1
        assert (await client.get(hit)).hit_length == 96


async def test_memory_for_callers_comes_from_the_pool_and_returns(shared_store: MooncakeStore, fresh: str) -> None:
    async with client_of(shared_store, FULL, fresh, limits=SMALL) as client:
        for _ in range(20):  # more in all than there is
            region = client.allocate(20 * MIB)
            region.array[:] = 1
            assert region.view[-1] == 1
            del region
        with pytest.raises(InvalidRequestError, match="pool_size"):
            client.allocate(1 << 40)


async def test_limits_that_cannot_hold_a_chunk_are_told() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=3 * MIB)])
    with pytest.raises(ConfigError, match=f"{3 * MIB + 64}.*{2 * MIB}"):
        client_of(MemoryStore(), layout, limits=SMALL)


async def test_more_than_fits_into_the_staging_memory_waits_for_its_turn() -> None:
    """Forty callers with buffers of their own, and memory for two batches: all come through, none is lost."""
    store = BatchStore()
    limits = Limits(max_batch_bytes=1 * MIB, staging_bytes=2 * MIB, max_bytes_in_flight=64 * MIB, concurrency=8)
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=100_000)])
    async with client_of(store, layout, limits=limits) as client:
        sequences = [client.sequence(range(n, n + 161)) for n in range(40)]
        content = {chunk: random.Random(chunk).randbytes(100_000) for chunk in range(10)}
        await asyncio.gather(*(client.put(sequence, lambda group, chunk: content[chunk]) for sequence in sequences))
        for got in await asyncio.gather(*(client.get(sequence) for sequence in sequences)):
            assert got.hit_length == 160
            assert all(bytes(view) == content[chunk] for (_, chunk), view in got.chunks.items())
        assert client._transport.staging.idle
        assert client._transport.budget.in_flight == 0
        assert store.most_under_way >= 2


async def test_a_devices_memory_is_refused_where_nothing_reaches_it(any_store: Store, fresh: str) -> None:
    """Whoever copies from it without the library for it ends the process."""
    async with client_of(any_store, FULL, fresh, value_format="raw") as client:
        cache = PagedKVCache([[BlockMemory(1 << 40, 4096, 4096, 8, on_device=True)]])
        with pytest.raises(InvalidBufferError, match="accelerator"):
            await client.register(cache)
    with pytest.raises(InvalidBufferError, match="checksum"):
        async with client_of(any_store, FULL, fresh) as client:
            await client.register(cache)


async def test_damage_heals_where_the_pool_is_used_up(shared_store: MooncakeStore, fresh: str) -> None:
    async with client_of(shared_store, FS, fresh, limits=SMALL) as client:
        engine = Engine(FS, 20, memory=client.allocate(Engine.nbytes(FS, 20)).array).fill()
        await client.register(engine.cache)
        sequence = client.sequence(range(100))
        await client.put(sequence, engine.at)
        (key,) = client._transport.jobs(sequence.block_hashes, np.array([0]), np.array([1])).keys
        value = bytearray(640 + 64)
        assert await shared_store.get([GetItem(key, (memoryview(value),))]) == [None]
        value[200] ^= 0x10
        assert await shared_store.put([PutItem(key, (memoryview(value),), replace=True)]) == [None]
        assert [failure.reason for failure in (await client.get(sequence)).failures] == ["checksum"]
        rest = []
        for size in (16 * MIB, MIB, 4096):
            with contextlib.suppress(InvalidRequestError):
                while True:
                    rest.append(client.allocate(size))
        put = await client.put(sequence, engine.at)
        assert (put.written.chunks, put.failures) == (1, ())
        assert (await client.get(sequence)).hit_length == 96


async def test_after_closing_nothing_more_is_sent_and_memory_is_let_go_of() -> None:
    store = RegisteringStore()
    client = client_of(store, FULL, value_format="raw", limits=SMALL)
    async with client:
        engine, sequence = Engine(FULL, 200).fill(), client.sequence(range(3201))
        await client.register(engine.cache)
        assert store.registered
        putting = asyncio.create_task(client.put(sequence, engine.at))
        while not store.puts:
            await asyncio.sleep(0)
    sent = len(store.puts)
    with pytest.raises(ClientClosedError):
        await putting
    assert len(store.puts) == sent < 25
    assert store.registered == []


async def test_memory_is_let_go_of_whatever_happens_meanwhile() -> None:
    """A register that is cut off, one that runs while the client closes, an unregister that is cut off."""
    store = RegisteringStore()
    async with client_of(store, FULL, value_format="raw") as client:
        pieces = PagedKVCache([[np.zeros((8, 2048), np.uint8), np.zeros((8, 2048), np.uint8)]])
        for turns in range(12):
            task = asyncio.create_task(client.register(pieces))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            cut = (await asyncio.gather(task, return_exceptions=True))[0]
            assert len(store.registered) == (0 if isinstance(cut, asyncio.CancelledError) else len(pieces.spans()))
            task = asyncio.create_task(client.unregister(pieces))
            for _ in range(turns % 5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.unregister(pieces)
            assert store.registered == []
        late = asyncio.create_task(client.register(pieces))
        await asyncio.sleep(0)
    await asyncio.gather(late, return_exceptions=True)
    assert store.registered == []


class RegisteringStore(BatchStore):
    """Knows what is registered; registering takes a few turns."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[tuple[int, int]] = []
        self.gather_bytes, self.reaches_devices = 0, False
        self.allocate, self.covers = HeapMemory().allocate, HeapMemory().covers

    @property
    def memory(self) -> Any:
        return self

    async def register(self, address: int, nbytes: int) -> bool:
        for _ in range(3):
            await asyncio.sleep(0)
        self.registered.append((address, nbytes))
        return True

    async def unregister(self, address: int, nbytes: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.registered.remove((address, nbytes))
