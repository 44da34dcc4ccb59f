"""ThrottledStore: how often the store is asked, and in which order callers get their turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import asyncio_throttle.throttler
import pytest
from store_contract import OpenStore, Room, StoreContract, value

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, Limits, SparseStoreClient
from mooncake_sparse_client.core.results import Health
from mooncake_sparse_client.errors import StoreUnavailableError
from mooncake_sparse_client.stores.base import Store
from mooncake_sparse_client.stores.memory import MemoryStore
from mooncake_sparse_client.stores.throttle import ThrottledStore


class TestThrottledStore(StoreContract):
    """A throttle that is never felt changes nothing."""

    @pytest.fixture
    def store(self) -> Store:
        return ThrottledStore(MemoryStore(), 1_000_000)

    @pytest.fixture
    def new_store(self) -> OpenStore:
        async def open_one() -> Store:
            return ThrottledStore(MemoryStore(), 1_000_000)

        return open_one


class FakeTime:
    """A clock that only waiting moves. It counts who waits by polling at a time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.polling = 0
        self.most_polling = 0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.polling += 1
        self.most_polling = max(self.most_polling, self.polling)
        try:
            await asyncio.sleep(0)
            self.now += seconds
        finally:
            self.polling -= 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(asyncio_throttle.throttler, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(asyncio_throttle.throttler, "asyncio", SimpleNamespace(sleep=clock.sleep))
    return clock


class Journal(MemoryStore):
    """Notes when each question came."""

    def __init__(self, clock: FakeTime) -> None:
        super().__init__()
        self.clock = clock
        self.asked: list[tuple[str, float]] = []

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append((keys[0], self.clock.now))
        return await super().exists(keys)

    @property
    def order(self) -> list[str]:
        return [key for key, _ in self.asked]


async def turns(count: int = 30) -> None:
    """Let whatever can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_come_first_come_first_served_and_within_the_rate(clock: FakeTime) -> None:
    journal = Journal(clock)
    store = ThrottledStore(journal, 10)
    names = [f"{number:02}" for number in range(45)]
    await asyncio.gather(*(store.exists([name]) for name in names))
    assert journal.order == names
    times = [time for _, time in journal.asked]
    assert all(later - earlier >= 1.0 for earlier, later in zip(times, times[10:], strict=False))
    assert times[9] == times[0]  # what the rate allows is not held up
    assert times[-1] - times[0] < 4.5  # nor is the rest for longer than it must


async def test_only_the_first_in_the_queue_polls(clock: FakeTime) -> None:
    store = ThrottledStore(MemoryStore(), 3)
    await asyncio.gather(*(store.exists([str(number)]) for number in range(20)))
    assert clock.most_polling == 1


async def test_who_comes_late_does_not_overtake(clock: FakeTime) -> None:
    journal = Journal(clock)
    store = ThrottledStore(journal, 1)
    waiting = [asyncio.create_task(store.exists([f"early-{number}"])) for number in range(3)]
    late: list[asyncio.Task[list[bool]]] = []
    while not all(task.done() for task in waiting):
        await asyncio.sleep(0)
        if len(late) < 40:
            late.append(asyncio.create_task(store.exists([f"late-{len(late)}"])))
    assert journal.order[:3] == ["early-0", "early-1", "early-2"]
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


@pytest.mark.parametrize("victims", [(1,), (3,), (1, 2, 3), (2, 5)])
async def test_a_cancelled_waiter_leaves_the_queue(clock: FakeTime, victims: tuple[int, ...]) -> None:
    """The first waiter (number 1) polls, the others wait for their turn."""
    journal = Journal(clock)
    store = ThrottledStore(journal, 1)
    tasks = [asyncio.create_task(store.exists([str(number)])) for number in range(6)]
    await turns()
    assert journal.order == ["0"]
    for victim in victims:
        tasks[victim].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    others = [str(number) for number in range(6) if number not in victims]
    assert journal.order == others
    assert [number for number, answer in enumerate(answers) if isinstance(answer, asyncio.CancelledError)] == [*victims]
    times = [time for _, time in journal.asked]
    # A request that never came to the store takes nobody's place in the rate.
    assert all(1.0 <= later - earlier < 1.1 for earlier, later in itertools.pairwise(times))
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_every_kind_of_request_counts_once_whatever_its_size(clock: FakeTime) -> None:
    store = ThrottledStore(MemoryStore(), 4)
    started = clock.now
    await store.put([value(str(number), b"1") for number in range(100)])
    await store.exists([str(number) for number in range(100)])
    await store.get([Room(str(number), 1).item for number in range(100)])
    await store.remove([str(number) for number in range(100)])
    assert clock.now == started
    await store.exists(["one more"])
    assert clock.now - started >= 1.0


async def test_health_and_closing_do_not_wait(clock: FakeTime) -> None:
    inner = MemoryStore(77)
    store = ThrottledStore(inner, 1)
    assert (store.max_value_bytes, store.lease_seconds) == (77, None)
    await store.exists(["a"])
    waiting = asyncio.create_task(store.exists(["b"]))
    started = clock.now
    assert await store.health() == Health(ok=True)
    assert clock.now - started < 0.1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    started = clock.now
    await store.aclose()
    assert clock.now == started
    with pytest.raises(Exception, match="closed"):
        await inner.health()


async def test_errors_pass_and_count(clock: FakeTime) -> None:
    class Down(MemoryStore):
        async def exists(self, keys: Sequence[str]) -> list[bool]:
            raise StoreUnavailableError("down")

    store = ThrottledStore(Down(), 1)
    started = clock.now
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match="down"):
            await store.exists(["a"])
    assert clock.now - started >= 2.0


async def test_a_client_can_be_limited(clock: FakeTime) -> None:
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=16)])
    limits = Limits(requests_per_second=2)
    async with SparseStoreClient(MemoryStore(), layout, model_name="m", limits=limits) as client:
        sequence = client.sequence(range(17))
        started = clock.now
        await client.lookup(sequence)
        await client.lookup(sequence)
        assert clock.now == started
        await client.lookup(sequence)
        assert clock.now - started >= 1.0
