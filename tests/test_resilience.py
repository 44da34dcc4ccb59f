"""A client whose store is down: what its calls cost, what they answer, and how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mooncake_sparse_client import (
    FullAttentionSpec,
    KVCacheLayout,
    Limits,
    MemoryStore,
    Resilience,
    SlidingWindowSpec,
    SparseStoreClient,
    Tally,
    WrappedStore,
)
from mooncake_sparse_client.core.results import ChunkFailure, Health
from mooncake_sparse_client.errors import (
    ConfigError,
    SparseStoreError,
    StoreDownError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from mooncake_sparse_client.settings import within_timeout
from mooncake_sparse_client.stores.base import Failure, GetItem, PutItem, RemoveOutcome
from mooncake_sparse_client.waiting import held

FS = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32)])
#: The breaker opens at the third failure and stays open.
SHUT = Resilience(attempts=1, hang_seconds=600, probe_seconds=600)
#: Hangs are noticed quickly, and each look may follow the last one at once.
QUICK = Resilience(attempts=1, hang_seconds=0.05, probe_seconds=1e-6)


def source(group: int, chunk: int) -> bytes:
    return bytes([group, chunk % 251]) * (FS.page_sizes[group] // 2)


def client_of(store: Any, **settings: Any) -> SparseStoreClient:
    return SparseStoreClient(store, FS, **{"model_name": "m", "retention_interval": None, **settings})


class Faulty(WrappedStore):
    """Fails, or waits for a gate, as a test says."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.calls: list[str] = []
        #: By method: raised, or waited for; under "all" for all of them.
        self.does: dict[str, SparseStoreError | asyncio.Event] = {}
        self.health_is = Health(ok=True)

    async def _step(self, name: str) -> None:
        self.calls.append(name)
        does = self.does.get(name) or self.does.get("all")
        if isinstance(does, asyncio.Event):
            await does.wait()
        elif does is not None:
            raise type(does)(str(does))

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        await self._step("exists")
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        await self._step("put")
        return await super().put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        await self._step("get")
        return await super().get(items)

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        await self._step("remove")
        return await super().remove(keys, force=force)

    async def health(self) -> Health:
        self.calls.append("health")
        return self.health_is


async def trip(client: SparseStoreClient, store: Faulty) -> None:
    """Have three lookups fail, of a prompt that no test uses."""
    store.does["all"] = StoreUnavailableError("no master at 1.2.3.4")
    sequence = client.sequence(range(7000, 7040))
    for _ in range(3):
        with contextlib.suppress(StoreUnavailableError):
            await client.lookup(sequence)
    store.calls.clear()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def calls_of(client: SparseStoreClient, sequence: Any, hit: Any) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {
        "lookup": lambda: client.lookup(sequence),
        "get": lambda: client.get(sequence),
        "get hit": lambda: client.get(hit),
        "put": lambda: client.put(sequence, source),
        "exists": lambda: client.exists(sequence),
        "remove": lambda: client.remove(sequence),
    }


# While it is down


async def test_every_call_is_refused_and_the_store_hears_nothing() -> None:
    store = Faulty()
    async with client_of(store, resilience=SHUT) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source)
        hit = await client.lookup(sequence)
        await trip(client, store)
        errors = []
        for call in calls_of(client, sequence, hit).values():
            with pytest.raises(StoreDownError, match=r"1\.2\.3\.4") as caught:
                await call()
            errors.append(caught.value)
        assert len(set(map(id, errors))) == 6
        assert store.calls == []


async def test_nothing_is_hashed_for_a_call_that_is_refused() -> None:
    store = Faulty()
    async with client_of(store, resilience=SHUT) as client:
        await trip(client, store)
        sequence = client.sequence(range(10_000))
        for call in (client.lookup, client.get, client.exists, client.remove):
            with pytest.raises(StoreDownError):
                await call(sequence)
        with pytest.raises(StoreDownError):
            await client.put(sequence, source)
        assert sequence.unhashed_tokens == 10_000


async def test_a_store_that_is_down_may_count_as_empty() -> None:
    store = Faulty()
    async with client_of(store, resilience=SHUT, when_down="miss") as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source)
        hit = await client.lookup(sequence)
        await trip(client, store)
        nothing = await client.lookup(sequence, local_tokens=40)
        assert (nothing.hit_length, nothing.keys_asked, nothing.block_hashes) == (32, 0, sequence.block_hashes)
        got = await client.get(hit)
        assert (got.hit_length, got.chunks) == (0, {})
        assert set(got.failures) == {ChunkFailure(*where, "down") for where in [(0, 0), (0, 1), (0, 2), (1, 11)]}
        assert (await client.get(sequence)).hit_length == 0
        assert [mask.any() for mask in await client.exists(sequence)] == [False, False]
        put = await client.put(client.sequence(range(500, 600)), source)
        assert put.failed == Tally(6, 288)
        assert {failure.reason for failure in put.failures} == {"down"}
        assert put.end_token == 96
        with pytest.raises(StoreDownError):
            await client.remove(sequence)  # nobody may believe that something went
        assert store.calls == []


@pytest.mark.parametrize("when_down", ["raise", "miss"])
@pytest.mark.parametrize("num_tokens", [1_000, 100_000])
async def test_ten_thousand_lookups_ask_nothing(when_down: str, num_tokens: int) -> None:
    store = Faulty()
    async with client_of(store, resilience=SHUT, when_down=when_down) as client:
        await trip(client, store)
        sequence = client.sequence(range(num_tokens))
        refused = 0
        for _ in range(10_000):
            try:
                assert (await client.lookup(sequence)).hit_length == 0
            except StoreDownError:
                refused += 1
        assert refused == (10_000 if when_down == "raise" else 0)
        assert store.calls == []


async def test_health_asks_for_real() -> None:
    store = Faulty()
    async with client_of(store, resilience=SHUT) as client:
        await trip(client, store)
        assert await client.health() == Health(ok=True)
        store.health_is = Health(ok=False, kind="unavailable", detail="still")
        assert await client.health() == store.health_is
        assert store.calls == ["health", "health"]


async def test_health_takes_no_longer_than_what_counts_as_hung() -> None:
    class Hung(MemoryStore):
        async def health(self) -> Health:
            await asyncio.Event().wait()
            raise AssertionError

    async with client_of(Hung(), timeout=600, resilience=Resilience(hang_seconds=0.05)) as client:
        health = await client.health()
    assert (health.ok, health.kind) == (False, "timeout")
    assert "0.05" in health.detail


async def test_health_is_a_value_whatever_the_store_raises() -> None:
    class Broken(MemoryStore):
        async def health(self) -> Health:
            raise StoreUnavailableError("gone")

    async with client_of(Broken()) as client:
        assert await client.health() == Health(ok=False, kind="unavailable", detail="gone")


async def test_calls_that_need_no_store_go_on() -> None:
    store = Faulty()
    async with client_of(store, resilience=SHUT) as client:
        await trip(client, store)
        assert client.allocate(100).nbytes == 100
        assert client.plan_put(client.sequence(range(100))).end_token == 96


# Coming back


async def test_it_comes_back_by_itself() -> None:
    store = Faulty()
    async with client_of(store, resilience=QUICK) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source)
        await trip(client, store)
        store.does.clear()
        with pytest.raises(StoreDownError):
            await client.lookup(sequence)  # which has it looked at
        await until(lambda: "health" in store.calls)
        await asyncio.sleep(0)
        assert (await client.get(sequence)).hit_length == 96
        assert store.calls.count("health") == 1


async def test_transfers_that_failed_are_tried_one_at_a_time() -> None:
    store = Faulty()
    limits = Limits(max_batch_chunks=1, concurrency=2)
    async with client_of(store, resilience=QUICK, when_down="miss", limits=limits) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source)
        store.does["get"] = StoreUnavailableError("no owner")
        while "health" not in store.calls:
            assert (await client.get(sequence)).hit_length == 0
        await asyncio.sleep(0)
        assert (await client.lookup(sequence)).hit_length == 96  # questions are answered
        assert (await client.get(sequence)).hit_length == 0
        store.does.clear()
        store.calls.clear()
        # One of the batches shows that values move, whatever becomes of the call that it is of.
        await client.get(sequence)
        assert (await client.get(sequence)).hit_length == 96


async def test_a_new_event_loop_begins_with_a_closed_breaker() -> None:
    store = Faulty()

    async def use(client: SparseStoreClient) -> None:
        await trip(client, store)

    client = client_of(store, resilience=SHUT)

    def in_turn() -> int:
        asyncio.run(use(client))
        store.does.clear()
        return asyncio.run(client.lookup(client.sequence(range(100)))).hit_length

    assert await asyncio.to_thread(in_turn) == 0
    assert store.calls == ["exists"]


# Hanging


async def test_when_a_call_hangs_all_that_ask_end_at_once() -> None:
    store = Faulty()
    async with client_of(store, resilience=dataclasses.replace(QUICK, probe_seconds=600), timeout=600) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source)
        hit = await client.lookup(sequence)
        store.does["all"] = asyncio.Event()
        calls = [asyncio.ensure_future(call()) for call in calls_of(client, sequence, hit).values()]
        calls += [asyncio.ensure_future(client.put(client.sequence(range(500, 600)), source))]
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert [type(answer) for answer in answers] == [StoreDownError] * 7
        assert len(set(map(id, answers))) == 7
        assert "hung" in str(answers[0])
        assert "looking a sequence up" in str(answers[0])
        assert "0 chunks were written" in str(answers[-1])
        assert len(asyncio.all_tasks()) == 1
        store.does["all"].set()  # type: ignore[union-attr]


async def test_a_call_that_hangs_may_count_as_a_miss() -> None:
    store = Faulty()
    async with client_of(store, resilience=QUICK, timeout=600, when_down="miss") as client:
        store.does["all"] = asyncio.Event()
        assert (await asyncio.wait_for(client.lookup(client.sequence(range(100))), 20)).hit_length == 0
        put = await asyncio.wait_for(client.put(client.sequence(range(100)), source), 20)
        assert {failure.reason for failure in put.failures} == {"down"}


async def test_transfers_that_hang_and_hold_all_places_hold_up_nobody() -> None:
    """Native calls cannot be ended: until they are back, who comes is refused, and does not wait behind them."""
    threads = ThreadPoolExecutor(2)

    class Hung(Faulty):
        stuck = 0.0

        async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
            self.calls.append("get")
            if self.stuck:
                await held(threads.submit(time.sleep, self.stuck))
            return await super().get(items)

    store = Hung()
    async with client_of(store, resilience=QUICK, timeout=600, limits=Limits(concurrency=2)) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source)
        hit = await client.lookup(sequence)
        store.stuck = 0.6
        answers = await asyncio.gather(*(client.get(hit) for _ in range(4)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreDownError}
        store.stuck = 0
        with pytest.raises(StoreDownError):
            await client.lookup(sequence)
        await until(lambda: "health" in store.calls)
        await asyncio.sleep(0)
        assert (await client.lookup(sequence)).hit_length == 96  # questions are answered again
        store.calls.clear()
        with pytest.raises(StoreDownError, match="one transfer at a time"):
            await client.get(hit)
        assert store.calls == []  # though it waits for nothing
        while not client._transport.lane.idle:
            await asyncio.sleep(0.01)
        assert (await client.get(hit)).hit_length == 96
    threads.shutdown(wait=False)


def test_a_hang_is_noticed_before_a_call_is_given_up() -> None:
    assert within_timeout(Resilience(), 30.0).hang_seconds == 5.0
    assert within_timeout(Resilience(), 1.0).hang_seconds < 1.0


async def test_without_a_breaker_a_call_ends_by_its_timeout() -> None:
    store = Faulty()
    off = Resilience(attempts=1, breaker=False, hang_seconds=0.01)
    async with client_of(store, resilience=off, timeout=0.1) as client:
        store.does["all"] = asyncio.Event()
        for _ in range(4):
            with pytest.raises(StoreTimeoutError):
                await client.lookup(client.sequence(range(100)))
        store.does["all"] = StoreUnavailableError("gone")
        for _ in range(4):
            with pytest.raises(StoreUnavailableError) as caught:
                await client.lookup(client.sequence(range(100)))
            assert caught.value.kind == "unavailable"
        store.does.clear()
        assert (await client.lookup(client.sequence(range(100)))).hit_length == 0


# Asking again


async def test_a_request_that_failed_is_made_again() -> None:
    class Flaky(Faulty):
        """Fails two of three calls."""

        async def _step(self, name: str) -> None:
            await super()._step(name)
            if len(self.calls) % 3:
                raise StoreUnavailableError("a moment, please")

    store = Flaky()
    quick = Resilience(attempts=3, trip_after=4, first_pause=1e-3, longest_pause=1e-3)
    async with client_of(store, resilience=quick) as client:
        sequence = client.sequence(range(100))
        put = await client.put(sequence, source)
        assert (put.written.chunks, put.failed.chunks) == (6, 0)
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (96, ())
        assert bytes(got.chunks[0, 2]) == source(0, 2)
        assert (await client.remove(sequence)).removed == 6


async def test_a_client_without_resilience_wraps_nothing() -> None:
    store = MemoryStore()
    off = Resilience(attempts=1, breaker=False)
    async with client_of(store, resilience=off) as client:
        assert client._transport.store is store


async def test_a_throttle_s_waiting_is_no_hanging(caplog: pytest.LogCaptureFixture) -> None:
    store = Faulty()
    limits = Limits(requests_per_second=4)
    async with client_of(store, resilience=QUICK, limits=limits) as client:
        with caplog.at_level(logging.WARNING):
            answers = await asyncio.gather(*(client.exists(client.sequence([number] * 40)) for number in range(2)))
            for number in range(6):  # for more than a second, most of it spent waiting
                await client.exists(client.sequence([number] * 40))
    assert len(answers) == 2
    assert caplog.records == []


# Settings, memory


@pytest.mark.parametrize("wrong", [None, "yes", Resilience])
def test_a_resilience_is_a_resilience(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="resilience"):
        client_of(MemoryStore(), resilience=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"trip_after": True},
        {"first_pause": 0},
        {"hang_seconds": float("inf")},
        {"probe_seconds": "1"},
        {"first_pause": 2.0},
        {"breaker": None},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Resilience(**wrong)


class Watched(bytearray):
    """Memory that can be watched."""


async def test_a_call_that_is_refused_or_cut_keeps_no_memory() -> None:
    store = Faulty()
    async with client_of(store, resilience=dataclasses.replace(QUICK, probe_seconds=600), timeout=600) as client:
        sequence = client.sequence(range(64))
        gate = store.does["put"] = asyncio.Event()

        async def attempt() -> list[weakref.ref[Watched]]:
            memories = {(0, chunk): Watched(64) for chunk in range(2)} | {(1, chunk): Watched(32) for chunk in range(8)}
            with pytest.raises(StoreDownError):
                await client.put(sequence, memories)
            return [weakref.ref(memory) for memory in memories.values()]

        gc.collect()
        gc.disable()
        try:
            for _ in ("cut", "refused"):
                known = await attempt()
                gate.set()
                for _ in range(10):
                    await asyncio.sleep(0)
                assert [ref() for ref in known] == [None] * 10
        finally:
            gc.enable()


async def test_closing_while_it_is_looked_at_leaves_nothing() -> None:
    class Hung(Faulty):
        async def health(self) -> Health:
            self.calls.append("health")
            await asyncio.Event().wait()
            raise AssertionError

    store = Hung()
    async with client_of(store, resilience=dataclasses.replace(QUICK, hang_seconds=600), timeout=1000) as client:
        await trip(client, store)
        with pytest.raises(StoreDownError):
            await client.lookup(client.sequence(range(100)))
        await until(lambda: "health" in store.calls)
        assert len(asyncio.all_tasks()) == 2
    assert len(asyncio.all_tasks()) == 1
