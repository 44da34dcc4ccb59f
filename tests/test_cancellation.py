"""Cancelled calls: memory, keys, slots and tasks are let go of, and the client goes on. And closing, which is
where calls in flight end."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import psutil
import pytest
from engine import Engine

from mooncake_sparse_client import (
    FullAttentionSpec,
    GetItem,
    KVCacheLayout,
    Limits,
    LocalMooncake,
    MemoryStore,
    MooncakeStore,
    PutItem,
    RemoveOutcome,
    Resilience,
    SlidingWindowSpec,
    SparseStoreClient,
    load_config,
)
from mooncake_sparse_client.errors import ClientClosedError, StoreTimeoutError, StoreUnavailableError
from mooncake_sparse_client.settings import StoreOpener
from mooncake_sparse_client.stores.base import Failure
from mooncake_sparse_client.stores.wrapping import WrappedStore
from mooncake_sparse_client.waiting import held

MIB = 1 << 20
FS = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32)])
LARGE = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=4 * MIB)])
LIMITS = Limits(max_batch_chunks=2, max_batch_keys=3, concurrency=2)


def page(layout: KVCacheLayout, group: int, chunk: int) -> bytes:
    return random.Random(f"{group}/{chunk}").randbytes(layout.page_sizes[group])


def source_for(layout: KVCacheLayout) -> Any:
    return lambda group, chunk: page(layout, group, chunk)


def intact(got: Any, layout: KVCacheLayout) -> bool:
    return all(bytes(view) == page(layout, *where) for where, view in got.chunks.items())


def sink_for(layout: KVCacheLayout) -> Any:
    rooms: dict[tuple[int, int], bytearray] = {}
    return lambda group, chunk: rooms.setdefault((group, chunk), bytearray(layout.page_sizes[group]))


def client_of(store: Any, layout: KVCacheLayout = FS, **settings: Any) -> SparseStoreClient:
    return SparseStoreClient(
        store, layout, **{"model_name": "m", "retention_interval": None, "limits": LIMITS, **settings}
    )


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """Every test ends with no task but its own."""
    before = asyncio.all_tasks()
    yield
    await tasks_end(before)


async def tasks_end(before: set[asyncio.Task[Any]] | None = None) -> None:
    """Tasks that were left to end by themselves do, soon."""
    mine = before or set()
    async with asyncio.timeout(10):
        while left := asyncio.all_tasks() - mine - {asyncio.current_task()}:
            await asyncio.wait(left)


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def cancelled_after(call: Awaitable[Any], pause: Callable[[], Awaitable[None]]) -> bool:
    """Start the call, pause, cancel it; whether it was cut off (it may have been done already)."""
    task = asyncio.ensure_future(call)
    await pause()
    task.cancel()
    try:
        await asyncio.wait_for(asyncio.shield(task), 20)
    except asyncio.CancelledError:
        assert task.cancelled()
        return True
    return False


class SlowStore(WrappedStore):
    """Every call takes a few turns of the loop before and after it does its work."""

    def __init__(self) -> None:
        self.kept = MemoryStore()
        super().__init__(self.kept)

    async def _turns(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        await self._turns()
        answer = await super().exists(keys)
        await self._turns()
        return answer

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        await self._turns()
        answer = await super().put(items)
        await self._turns()
        return answer

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        await self._turns()
        answer = await super().get(items)
        await self._turns()
        return answer

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        await self._turns()
        return await super().remove(keys, force=force)


class ThreadStore(WrappedStore):
    """Like the native store: works on the caller's memory on a thread, which nothing interrupts.

    A call waits there until ``gate`` opens, and is over when its memory is no longer touched.
    """

    def __init__(self) -> None:
        self.kept = MemoryStore()
        super().__init__(self.kept)
        self.pool = ThreadPoolExecutor(4)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = 0
        self.done = 0

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        def call() -> Any:
            self.begun += 1
            assert self.gate.wait(20)
            try:
                return asyncio.run(work())
            finally:
                self.done += 1

        return await held(self.pool.submit(call))

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        answer: list[Failure | None] = await self._on_thread(lambda: self.kept.put(items))
        return answer

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        answer: list[Failure | None] = await self._on_thread(lambda: self.kept.get(items))
        return answer


async def check_usable(client: SparseStoreClient, layout: KVCacheLayout = FS) -> None:
    """Every call still works, several at once, within a bound."""
    async with asyncio.timeout(20):
        sequence = client.sequence(range(500, 610))
        results = await asyncio.gather(*(client.put(sequence, source_for(layout)) for _ in range(3)))
        assert all(not result.failures for result in results)
        hit = await client.lookup(sequence)
        assert hit.hit_length == 109 // layout.alignment * layout.alignment
        for got in await asyncio.gather(*(client.get(hit) for _ in range(3))):
            assert got.hit_length == hit.hit_length
            assert intact(got, layout)
        assert (await client.exists(sequence))[0].all()
        assert (await client.remove(sequence, force=True)).removed == results[0].written.chunks + (
            results[0].existing.chunks
        )


async def get_paged(client: SparseStoreClient, sequence: Any) -> Any:
    engine = Engine(client.layout, 20)
    await client.register(engine.cache)
    got = await client.get(sequence, into=engine.at)
    await client.unregister(engine.cache)
    return got


async def put_paged(client: SparseStoreClient, sequence: Any) -> Any:
    engine = Engine(client.layout, 20).fill()
    await client.register(engine.cache)
    put = await client.put(client.sequence(range(random.randrange(10**6), 10**6 + 100)[:100]), engine.at)
    await client.unregister(engine.cache)
    return put


CALLS: dict[str, Callable[[SparseStoreClient, Any], Awaitable[Any]]] = {
    "lookup": lambda client, sequence: client.lookup(sequence),
    "get": lambda client, sequence: client.get(sequence),
    "get into": lambda client, sequence: client.get(sequence, into=sink_for(client.layout)),
    "get into paged memory": get_paged,
    "put from paged memory": put_paged,
    "put": lambda client, sequence: client.put(
        client.sequence(range(random.randrange(10**6), 10**6 + 100)[:100]), source_for(client.layout), confirm=True
    ),
    "put the same": lambda client, sequence: client.put(sequence, source_for(client.layout)),
    "exists": lambda client, sequence: client.exists(sequence, all_chunks=True),
    "remove": lambda client, sequence: client.remove(client.sequence(range(1, 101))),
    "health": lambda client, sequence: client.health(),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_may_be_cancelled_anywhere(name: str) -> None:
    store = SlowStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        cut = 0
        for turns in range(60):

            async def pause(turns: int = turns) -> None:
                for _ in range(turns):
                    await asyncio.sleep(0)

            cut += await cancelled_after(CALLS[name](client, sequence), pause)
        assert cut >= (1 if name == "health" else 5)
        await tasks_end()
        got = await client.get(sequence)
        assert got.hit_length == 96
        assert intact(got, FS)
        await check_usable(client)


@pytest.mark.parametrize("name", CALLS)
async def test_many_calls_may_be_cancelled_at_random(name: str) -> None:
    """Fifty rounds of several calls side by side: a slot lost in any of them would block the last ones."""
    store, dice = SlowStore(), random.Random(name)
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        for _ in range(50):

            async def pause() -> None:
                for _ in range(dice.randrange(40)):
                    await asyncio.sleep(0)

            await asyncio.gather(*(cancelled_after(CALLS[name](client, sequence), pause) for _ in range(4)))
        await tasks_end()
        await check_usable(client)


async def test_a_timeout_of_the_callers_is_a_cancellation_too() -> None:
    store = ThreadStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        store.gate.clear()
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.02):
                await client.get(sequence)
        assert not isinstance(caught.value, StoreTimeoutError)  # the caller's own, not the client's
        store.gate.set()
        assert (await client.get(sequence)).hit_length == 96


# Memory


@pytest.mark.parametrize("value_format", ["framed", "raw"])
async def test_a_read_into_paged_memory_is_over_when_it_raises(value_format: Any) -> None:
    store = ThreadStore()
    async with client_of(store, value_format=value_format) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        engine = Engine(FS, 20)
        await client.register(engine.cache)
        store.gate.clear()
        begun = store.begun
        reading = asyncio.create_task(client.get(sequence, into=engine.at))
        await settled(lambda: store.begun > begun)
        for _ in range(3):  # once more does not help
            reading.cancel()
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not reading.done()  # a thread has the caller's memory
        store.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert store.begun == store.done
        engine.memory[:] = 0x5A
        await asyncio.sleep(0.05)
        assert (engine.memory == 0x5A).all()
        assert client._transport.staging.idle
        assert client._transport.budget.in_flight == 0


@pytest.mark.parametrize("value_format", ["framed", "raw"])
async def test_a_write_from_paged_memory_is_over_when_it_raises(value_format: Any) -> None:
    store = ThreadStore()
    async with client_of(store, value_format=value_format) as client:
        sequence, engine = client.sequence(range(100)), Engine(FS, 20).fill()
        await client.register(engine.cache)
        store.gate.clear()
        writing = asyncio.create_task(client.put(sequence, engine.at))
        await settled(lambda: store.begun > 0)
        writing.cancel()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not writing.done()
        store.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert store.begun == store.done
        engine.memory[:] = 0x5A
        # What was written before is whole; the rest is not there.
        present = sum(int(mask.sum()) for mask in await client.exists(sequence))
        assert 0 < present == len(store.kept.keys())
        room = Engine(FS, 20)
        await client.register(room.cache)
        assert (await client.put(sequence, engine.fill().at)).existing.chunks == present
        got = await client.get(sequence, into=room.at)
        assert (got.hit_length, got.failures) == (96, ())
        assert room.has([(0, 0), (0, 1), (0, 2), (1, 11)])


async def test_buffers_that_are_staged_are_no_longer_touched_when_a_call_raises() -> None:
    """Copies are quick, so nobody waits for the store: the caller's buffers were read before it began, and are
    written to only once it has ended."""
    store = ThreadStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        memory = {(0, chunk): bytearray(page(FS, 0, chunk)) for chunk in range(3)}
        memory |= {(1, chunk): bytearray(page(FS, 1, chunk)) for chunk in (3, 7, 11)}
        store.gate.clear()
        writing = asyncio.create_task(client.put(sequence, memory))
        await settled(lambda: store.begun > 0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(writing, 10)
        assert store.done < store.begun
        assert not client._transport.staging.idle  # the slot is the store's until it lets go
        for room in memory.values():
            room[:] = b"\x5a" * len(room)
        store.gate.set()
        await tasks_end()
        assert client._transport.staging.idle
        got = await client.get(sequence)
        assert intact(got, FS)
        assert (await client.put(sequence, source_for(FS))).failures == ()

        rooms = {where: bytearray(FS.page_sizes[where[0]]) for where in [(0, 0), (0, 1), (0, 2), (1, 11)]}
        store.gate.clear()
        begun = store.begun
        reading = asyncio.create_task(client.get(sequence, into=rooms))
        await settled(lambda: store.begun > begun)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, 10)
        store.gate.set()
        await tasks_end()
        assert all(not any(room) for room in rooms.values())
        assert client._transport.staging.idle
        assert client._transport.budget.in_flight == 0


async def test_keys_of_a_put_that_was_left_are_not_written_twice() -> None:
    """A native write that nobody waits for any more goes on. Another put of its keys waits for its end, and then
    finds them there: a second writer beside it would be told that all is well and store nothing."""
    store = ThreadStore()
    sent: list[str] = []
    inner = store.put

    async def noted(items: Sequence[PutItem]) -> list[Failure | None]:
        sent.extend(item.key for item in items)
        return await inner(items)

    store.put = noted  # type: ignore[method-assign]
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        store.gate.clear()
        first = asyncio.create_task(client.put(sequence, source_for(FS)))
        await settled(lambda: store.begun > 0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(first, 10)
        second = asyncio.create_task(client.put(sequence, source_for(FS)))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not second.done()
        store.gate.set()
        put = await second
        assert put.existing.chunks > 0
        assert (put.existing + put.written).chunks == 6
        assert len(set(sent)) == len(sent) == 6
        assert client._transport.left_writing == {}


async def test_a_read_into_memory_of_ours_ends_at_once() -> None:
    """Nobody else has that memory, so nobody needs to wait for the thread."""
    store = ThreadStore()
    async with client_of(store, timeout=15.0) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        for _ in range(3):  # slots are free again although the threads are not
            store.gate.clear()
            begun = store.begun
            reading = asyncio.create_task(client.get(sequence))
            await settled(lambda begun=begun: store.begun > begun)  # type: ignore[misc]
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(reading, 10)
            assert store.done < store.begun
            store.gate.set()
            assert (await client.get(sequence)).hit_length == 96
        await tasks_end()
        assert store.begun == store.done


async def test_a_staged_read_ends_within_the_clients_timeout() -> None:
    store = ThreadStore()
    async with client_of(store, timeout=0.1, resilience=Resilience(breaker=False)) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        store.gate.clear()
        with pytest.raises(StoreTimeoutError):
            await asyncio.wait_for(client.get(sequence), 10)
        assert store.done < store.begun
        store.gate.set()


# Keys that are being written


class GatedStore(WrappedStore):
    """Puts and questions wait for their gates."""

    def __init__(self) -> None:
        self.kept = MemoryStore()
        super().__init__(self.kept)
        self.gates = {"exists": asyncio.Event(), "put": asyncio.Event()}
        self.waiting: list[str] = []
        self.written: list[str] = []

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self.waiting.append("exists")
        await self.gates["exists"].wait()
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self.waiting.append("put")
        await self.gates["put"].wait()
        self.written += [item.key for item in items]
        return await super().put(items)


@pytest.mark.parametrize("where", ["exists", "put"])
async def test_the_keys_of_a_cancelled_put_are_free_again(where: str) -> None:
    store = GatedStore()
    async with client_of(store, limits=Limits()) as client:
        if where == "put":
            store.gates["exists"].set()
        first = asyncio.create_task(client.put(client.sequence(range(100)), source_for(FS)))
        await settled(lambda: where in store.waiting)
        others = [asyncio.create_task(client.put(client.sequence(range(100)), source_for(FS))) for _ in range(2)]
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        store.gates["exists"].set()
        store.gates["put"].set()
        second, third = await asyncio.wait_for(asyncio.gather(*others), 10)
        assert sorted([second.written.chunks, third.written.chunks]) == [0, 6]
        assert sorted([second.existing.chunks, third.existing.chunks]) == [0, 6]
        assert len(store.written) == 6


async def test_a_cancelled_waiter_does_not_disturb_who_writes() -> None:
    store = GatedStore()
    store.gates["exists"].set()
    async with client_of(store, limits=Limits()) as client:
        first = asyncio.create_task(client.put(client.sequence(range(100)), source_for(FS)))
        await settled(lambda: "put" in store.waiting)
        waiters = [asyncio.create_task(client.put(client.sequence(range(100)), source_for(FS))) for _ in range(3)]
        await asyncio.sleep(0.01)
        for waiter in waiters[:2]:
            waiter.cancel()
        cut = await asyncio.gather(*waiters[:2], return_exceptions=True)
        assert all(isinstance(answer, asyncio.CancelledError) for answer in cut)
        assert not first.done()
        store.gates["put"].set()
        assert (await first).written.chunks == 6
        assert (await waiters[2]).existing.chunks == 6
        assert len(store.written) == 6


async def test_a_put_that_runs_out_of_time_frees_its_keys() -> None:
    store = GatedStore()
    store.gates["exists"].set()
    async with client_of(store, timeout=0.1, resilience=Resilience(breaker=False)) as client:
        with pytest.raises(StoreTimeoutError, match="0 chunks were written"):
            await client.put(client.sequence(range(100)), source_for(FS))
        store.gates["put"].set()
        assert (await client.put(client.sequence(range(100)), source_for(FS))).written.chunks == 6


# Closing


@pytest.mark.parametrize("name", [name for name in CALLS if name != "health"])
@pytest.mark.parametrize("turns", [1, 4, 9, 15, 22])
async def test_calls_that_run_while_the_client_closes_end_in_an_orderly_way(name: str, turns: int) -> None:
    """With their result, or with the one error that says why."""
    store = SlowStore()
    client = client_of(store)
    sequence = client.sequence(range(100))
    await client.put(sequence, source_for(FS))
    running = [asyncio.ensure_future(CALLS[name](client, sequence)) for _ in range(3)]
    for _ in range(turns):
        await asyncio.sleep(0)
    await asyncio.wait_for(client.aclose(), 10)
    with pytest.raises(ClientClosedError):
        await client.lookup(sequence)
    for answer in await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10):
        assert not isinstance(answer, BaseException) or isinstance(answer, ClientClosedError), answer
    # Nothing half-written: what the store has is whole.
    async with client_of(store) as other:
        got = await other.get(sequence)
        assert (got.hit_length, got.failures) == (96, ())
        assert intact(got, FS)


async def test_closing_waits_for_reads_that_were_left_to_end() -> None:
    store = ThreadStore()
    client = client_of(store)
    sequence = client.sequence(range(100))
    await client.put(sequence, source_for(FS))
    store.gate.clear()
    begun = store.begun
    reading = asyncio.create_task(client.get(sequence))
    await settled(lambda: store.begun > begun)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    closing = asyncio.create_task(client.aclose())
    await asyncio.sleep(0.05)
    assert not closing.done()
    store.gate.set()
    await asyncio.wait_for(closing, 10)
    assert store.begun == store.done


async def test_closing_waits_no_longer_than_the_timeout() -> None:
    store = ThreadStore()
    client = client_of(store, timeout=0.1, resilience=Resilience(breaker=False))
    sequence = client.sequence(range(100))
    await client.put(sequence, source_for(FS))
    store.gate.clear()
    with pytest.raises(StoreTimeoutError):
        await client.get(sequence)
    await asyncio.wait_for(client.aclose(), 10)
    assert store.done < store.begun
    store.gate.set()


# The real store


@pytest.fixture
async def loaded(mooncake_store: MooncakeStore, fresh: str) -> AsyncIterator[tuple[SparseStoreClient, Any]]:
    """A client whose reads and writes take milliseconds: 24 chunks of 4 MiB."""
    settings: dict[str, Any] = {"model_name": fresh, "value_format": "raw", "limits": Limits(max_batch_chunks=4)}
    async with client_of(mooncake_store, LARGE, **settings) as client:
        sequence = client.sequence(range(16 * 6 + 1))
        put = await client.put(sequence, source_for(LARGE))
        assert put.written.chunks == 6
        yield client, sequence
        await client.remove(sequence, force=True)


async def test_the_native_store_leaves_the_callers_memory_alone(loaded: tuple[SparseStoreClient, Any]) -> None:
    client, sequence = loaded
    rooms = {(0, chunk): bytearray(4 * MIB) for chunk in range(6)}
    hit = await client.lookup(sequence)
    dice, cut, pattern = random.Random(5), 0, b"\x5a" * (4 * MIB)

    async def pause() -> None:
        await asyncio.sleep(dice.random() * 0.006)

    for _ in range(20):
        cut += await cancelled_after(client.get(hit, into=rooms), pause)
        for room in rooms.values():
            room[:] = pattern
        await asyncio.sleep(0.004)
        assert all(room == pattern for room in rooms.values())
    assert cut >= 3
    got = await client.get(hit, into=rooms)
    assert got.hit_length == 96
    assert all(bytes(room) == page(LARGE, *where) for where, room in rooms.items())


async def test_a_cancelled_put_to_the_native_store_stores_nothing_else(
    mooncake_store: MooncakeStore, fresh: str
) -> None:
    """The caller's memory changes as soon as the put has raised; what is stored is what was there before."""
    dice, cut = random.Random(6), 0
    good = {(0, chunk): page(LARGE, 0, chunk) for chunk in range(3)}
    for number in range(10):
        async with client_of(mooncake_store, LARGE, model_name=f"{fresh}-{number}", timeout=20.0) as client:
            sequence = client.sequence(range(49))
            memory = {where: bytearray(content) for where, content in good.items()}

            async def pause() -> None:
                await asyncio.sleep(dice.random() * 0.012)

            cut += await cancelled_after(client.put(sequence, memory), pause)
            for room in memory.values():
                room[:] = bytes(len(room))
            got = await client.get(sequence)
            assert got.failures == ()
            assert all(bytes(view) == good[where] for where, view in got.chunks.items())
            put = await client.put(sequence, good)
            assert (put.written + put.existing).chunks == 3
            assert put.failures == ()
            assert (await client.get(sequence)).hit_length == 48
            await client.remove(sequence, force=True)
    assert cut >= 2


async def test_a_cancelled_calls_memory_comes_back_without_a_garbage_collection(
    mooncake_store: MooncakeStore, fresh: str
) -> None:
    """A client's staging memory is large: errors that kept it until some collection would exhaust the pool."""
    pool = mooncake_store.memory._pool
    assert pool is not None
    gc.collect()
    free, dice, cut = pool.free_bytes, random.Random(7), 0
    gc.disable()
    try:
        for number in range(6):
            async with client_of(mooncake_store, LARGE, model_name=f"{fresh}-{number}") as client:
                sequence = client.sequence(range(49))

                async def pause() -> None:
                    await asyncio.sleep(dice.random() * 0.006)

                cut += await cancelled_after(client.put(sequence, source_for(LARGE)), pause)
                cut += await cancelled_after(client.get(sequence), pause)
            del client
            await settled(lambda: pool.free_bytes == free)  # a thread lets go of its last work a moment later
    finally:
        gc.enable()
    assert cut >= 3


@pytest.mark.parametrize("name", CALLS)
async def test_calls_to_the_native_store_may_be_cancelled_at_random(
    mooncake_store: MooncakeStore, fresh: str, name: str
) -> None:
    dice = random.Random(name)
    async with client_of(mooncake_store, model_name=fresh) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))

        async def pause() -> None:
            if turns := dice.randrange(6):
                await asyncio.sleep(0.0004 * turns)

        for _ in range(50):
            await asyncio.gather(*(cancelled_after(CALLS[name](client, sequence), pause) for _ in range(3)))
        await tasks_end()
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (96, ())
        assert intact(got, FS)
        await check_usable(client)
    assert (await mooncake_store.health()).ok


@pytest.mark.parametrize("value_format", ["framed", "raw"])
async def test_five_hundred_cancelled_transfers_leave_nothing(
    mooncake_store: MooncakeStore, fresh: str, value_format: Any
) -> None:
    """Reads and writes of every kind, several at once, cut off anywhere. Memory is the caller's again at once, and
    at the end every slot, byte in flight, thread and task is accounted for."""
    layout = KVCacheLayout(
        [FullAttentionSpec(16, page_size_bytes=200_000), SlidingWindowSpec(16, 33, page_size_bytes=8000)]
    )
    limits = Limits(max_batch_bytes=MIB, staging_bytes=3 * MIB, max_bytes_in_flight=4 * MIB)
    dice, threads = random.Random(value_format), threading.active_count()
    async with client_of(mooncake_store, layout, model_name=fresh, value_format=value_format, limits=limits) as client:
        stored = client.sequence(range(161))
        source = Engine(layout, 12).fill()
        await client.register(source.cache)
        await client.put(stored, source.at)
        hit = await client.lookup(stored)
        sinks = [Engine(layout, 12, seed=number) for number in range(4)]
        for sink in sinks:
            await client.register(sink.cache)

        async def cut_off(number: int, turn: int) -> bool:
            sink, kind = sinks[number], dice.randrange(4)
            rooms = {
                (group, chunk): bytearray(size) for group, size in enumerate(layout.page_sizes) for chunk in range(10)
            }
            new = client.sequence(range(1000 * turn + 200 * number, 1000 * turn + 200 * number + 161))
            call: Awaitable[Any] = [
                lambda: client.get(hit, into=sink.at),
                lambda: client.get(hit, into=rooms),
                lambda: client.put(new, source.at),
                lambda: client.put(new, source_for(layout)),
            ][kind]()

            async def pause() -> None:
                await asyncio.sleep(dice.random() * 0.004)

            cut = await cancelled_after(call, pause)
            sink.memory[:] = number
            for room in rooms.values():
                room[:] = bytes(len(room))
            await asyncio.sleep(0.002)
            assert (sink.memory == number).all()
            assert not any(any(room) for room in rooms.values())
            if kind > 1:  # what did get there is whole
                got = await client.get(new)
                assert got.failures == ()
                assert intact(got, layout)
                await client.remove(new, force=True)
            return cut

        cut = 0
        for turn in range(1, 126):
            cut += sum(await asyncio.gather(*(cut_off(number, turn) for number in range(4))))
        assert cut > 100
        await tasks_end()
        assert client._transport.staging.idle
        assert client._transport.budget.in_flight == 0
        assert not client._transport.claims
        got = await client.get(hit, into=sinks[0].at)
        assert (got.hit_length, got.failures) == (160, ())
        assert sinks[0].has([(0, chunk) for chunk in range(10)])
        await client.remove(stored, force=True)
    await asyncio.sleep(0.1)
    assert threading.active_count() <= threads + 12  # the store's pools, which it keeps


async def children() -> set[psutil.Process]:
    return await asyncio.to_thread(lambda: set(psutil.Process().children(recursive=True)))


async def gone(before: set[psutil.Process]) -> None:
    async with asyncio.timeout(20):
        while await children() - before:
            await asyncio.sleep(0.05)


async def test_a_store_closes_after_the_calls_in_flight(master: LocalMooncake) -> None:
    """Closing it under a running call would end the process."""
    config = load_config(
        "embedded",
        master_server_address=master.master_address,
        global_segment_size=64 * MIB,
        local_hostname="127.0.0.1",
        environ={},
    )
    store = await MooncakeStore.connect(config)
    content = np.zeros(16 * MIB, np.uint8)
    await store.put([PutItem("large", (content.data,))])
    room = np.ones(16 * MIB, np.uint8)
    calls: list[asyncio.Task[Any]] = [
        asyncio.create_task(store.get([GetItem("large", (room.data,))])),
        asyncio.create_task(store.put([PutItem("other", (content.data,))])),
        asyncio.create_task(store.exists([str(number) for number in range(1000)])),
    ]
    abandoned = asyncio.create_task(store.exists([str(number) for number in range(5000)]))
    await asyncio.sleep(0)
    abandoned.cancel()
    closing = [asyncio.create_task(store.aclose()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ClientClosedError):
        await store.exists(["large"])
    closing[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing[0]
    assert await calls[0] == [None]
    assert not room.any()
    assert await calls[1] == [None]
    assert len(await calls[2]) == 1000
    await closing[1]
    await store.aclose()
    await asyncio.gather(abandoned, return_exceptions=True)


@pytest.mark.parametrize("turns", [1, 2, 5])
async def test_a_cancelled_close_still_closes(native_library: None, turns: int) -> None:
    before = await children()
    client = SparseStoreClient.local(FS, model_name="m", segment_size="16MB", timeout=20.0)
    await client.__aenter__()
    await client.put(client.sequence(range(100)), source_for(FS))
    closing = asyncio.create_task(client.aclose())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(ClientClosedError):
        await client.health()
    await client.aclose()
    await gone(before)


async def test_whoever_closes_second_waits_for_the_end(native_library: None) -> None:
    before = await children()
    client = SparseStoreClient.local(FS, model_name="m", segment_size="16MB")
    await client.__aenter__()
    first = asyncio.create_task(client.aclose())
    await asyncio.sleep(0)
    await client.aclose()
    assert await children() <= before
    await first


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.08, 0.12, 0.2])
async def test_a_cancelled_start_leaves_nothing(native_library: None, delay: float) -> None:
    before = await children()
    client = SparseStoreClient.local(FS, model_name="m", segment_size="16MB")
    opening = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(delay)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await client.aclose()
    await gone(before)


async def test_a_cancellation_goes_before_an_error() -> None:
    """One batch has failed, another is still under way: whoever cancels now must see it."""
    slow = asyncio.Event()

    class HalfDown(MemoryStore):
        async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
            if items[0].buffers[-1][0] == 0:
                raise StoreUnavailableError("down")
            try:
                await slow.wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)  # as a native call that has begun
                raise
            return await super().put(items)

    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=8)])
    for when_down in ("miss", "raise"):
        client = SparseStoreClient(
            HalfDown(),
            layout,
            model_name="m",
            limits=Limits(max_batch_chunks=1),
            when_down=when_down,  # type: ignore[arg-type]
        )
        async with client:
            put = asyncio.create_task(client.put(client.sequence(range(64)), lambda _, chunk: bytes([chunk % 2]) * 8))
            await asyncio.sleep(0.02)
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            assert put.cancelled()


async def test_reads_that_nobody_waits_for_are_few_and_end() -> None:
    """A cancelled get leaves at most what had begun, and that keeps its place until it has ended."""
    alive = most = begun = 0
    threads = ThreadPoolExecutor(4)

    class Stubborn(MemoryStore):
        async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
            nonlocal alive, most, begun
            begun += 1
            alive += 1
            most = max(most, alive)
            try:
                await held(threads.submit(time.sleep, 0.1))  # cannot be hurried, as a native call
                return await super().get(items)
            finally:
                alive -= 1

    async with SparseStoreClient(Stubborn(), FS, model_name="m", limits=Limits(concurrency=2)) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        hit = await client.lookup(sequence)
        gets = [asyncio.create_task(client.get(hit)) for _ in range(30)]
        await asyncio.sleep(0.02)
        for get in gets:
            get.cancel()
        await asyncio.gather(*gets, return_exceptions=True)
        assert (await client.get(hit)).hit_length == 96
        assert most == 2
        assert begun == 3
    assert alive == 0
    threads.shutdown(wait=False)


async def test_a_client_is_entered_once() -> None:
    """Two who enter at once would open two stores, and close one."""
    opened: list[MemoryStore] = []

    async def opener(stack: AsyncExitStack) -> MemoryStore:
        await asyncio.sleep(0.01)
        store = MemoryStore()
        stack.push_async_callback(store.aclose)
        opened.append(store)
        return store

    client = SparseStoreClient(StoreOpener(opener), FS, model_name="m")
    answers = await asyncio.gather(client.__aenter__(), client.__aenter__(), return_exceptions=True)
    assert sorted(type(answer).__name__ for answer in answers) == ["ClientClosedError", "SparseStoreClient"]
    await client.aclose()

    client = SparseStoreClient(StoreOpener(opener), FS, model_name="m")
    entering = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(ClientClosedError, match="while it was being opened"):
        await entering
    assert len(opened) == 2
    for store in opened:
        with pytest.raises(ClientClosedError):
            await store.exists(["key"])
