"""ThrottledStore: how often the store is asked, for how many bytes, and in which order callers get their turn."""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import asyncio_throttle.throttler
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_contract import OpenStore, Room, StoreContract, value

from mooncake_sparse_client import FullAttentionSpec, KVCacheLayout, Limits, SparseStoreClient
from mooncake_sparse_client.core.results import Health
from mooncake_sparse_client.errors import ConfigError, InvalidBufferError, StoreUnavailableError
from mooncake_sparse_client.stores.base import Failure, GetItem, PutItem, RemoveOutcome, Store
from mooncake_sparse_client.stores.memory import MemoryStore
from mooncake_sparse_client.stores.regions import HeapMemory
from mooncake_sparse_client.stores.throttle import ThrottledStore


class TestThrottledStore(StoreContract):
    """A throttle that is never felt changes nothing."""

    @pytest.fixture(
        params=[(1_000_000, None), (None, 1 << 40), (1_000_000, 1 << 40)], ids=["requests", "bytes", "both"]
    )
    def rates(self, request: pytest.FixtureRequest) -> tuple[int | None, int | None]:
        rates: tuple[int | None, int | None] = request.param
        return rates

    @pytest.fixture
    def store(self, rates: tuple[int | None, int | None]) -> Store:
        return ThrottledStore(MemoryStore(), *rates)

    @pytest.fixture
    def new_store(self, rates: tuple[int | None, int | None]) -> OpenStore:
        async def open_one() -> Store:
            return ThrottledStore(MemoryStore(), *rates)

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


class LeapingSelector(selectors.DefaultSelector):
    """Where an event loop would wait, time leaps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 500.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for ever"
        self.now += max(timeout, 0)
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        return ready


def in_leaping_time(scenario: Coroutine[Any, Any, None]) -> None:
    """Run it on an event loop whose clock only waiting moves; the request throttle goes by the same clock."""
    selector = LeapingSelector()

    def new_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now  # type: ignore[method-assign]
        return loop

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=new_loop) as runner:
        patch.setattr(asyncio_throttle.throttler, "time", SimpleNamespace(monotonic=lambda: selector.now))
        runner.run(scenario)


@dataclass(frozen=True)
class Move:
    """One batch that the store saw."""

    key: str
    nbytes: int
    time: float


class Ledger(MemoryStore):
    """Notes which batches came, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Move] = []

    def _note(self, keys: Sequence[str], nbytes: int) -> None:
        self.moves.append(Move(keys[0], nbytes, asyncio.get_running_loop().time()))

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self._note([item.key for item in items], sum(buffer.nbytes for item in items for buffer in item.buffers))
        return await super().put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self._note([item.key for item in items], sum(buffer.nbytes for item in items for buffer in item.buffers))
        return await super().get(items)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self._note(keys, 0)
        return await super().exists(keys)

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        self._note(keys, 0)
        return await super().remove(keys, force=force)

    @property
    def order(self) -> list[str]:
        return [move.key for move in self.moves]

    @property
    def times(self) -> list[float]:
        """Since the event loop began."""
        return [round(move.time - 500.0, 6) for move in self.moves]


def batch(name: str, nbytes: int) -> list[PutItem]:
    return [value(name, bytes(nbytes))]


#: No deadline: a loaded machine is no failure. The same examples every time.
quick = settings(max_examples=100, deadline=None, derandomize=True)
RATE = 1000
BURST = RATE / 10


def assert_byte_rate_kept(moves: Sequence[Move]) -> None:
    """Over any time: no more than the rate, what may be saved up, and the last batch."""
    for first in range(len(moves)):
        before = 0
        for move in moves[first:]:
            assert before <= RATE * (move.time - moves[first].time) + BURST + 1e-6
            before += move.nbytes


@quick
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.integers(1, 30) | st.integers(1, 1000), min_size=1, max_size=40),
    pause=st.sampled_from([0.0, 0.05, 0.5]),
    requests=st.sampled_from([None, 5, 100]),
)
def test_the_byte_rate_is_kept_over_any_time(seed: int, sizes: list[int], pause: float, requests: int | None) -> None:
    dice = random.Random(seed)
    ledger = Ledger()

    async def scenario() -> None:
        store = ThrottledStore(ledger, requests, RATE)
        calls = []
        for number, nbytes in enumerate(sizes):
            calls.append(asyncio.ensure_future(store.put(batch(str(number), nbytes))))
            if dice.random() < 0.5:
                await asyncio.sleep(dice.random() * pause)
        await asyncio.gather(*calls)

    in_leaping_time(scenario())
    assert ledger.order == [str(number) for number in range(len(sizes))]
    assert_byte_rate_kept(ledger.moves)
    if requests is None and pause == 0:
        # Nor is anybody held up for longer than that takes.
        taken = 0
        for move, seconds in zip(ledger.moves, ledger.times, strict=True):
            assert seconds == pytest.approx(max(0, (taken - BURST) / RATE), abs=1e-6)
            taken += move.nbytes


def test_a_batch_larger_than_a_second_is_let_through_and_paid_for_afterwards() -> None:
    ledger = Ledger()

    async def scenario() -> None:
        store = ThrottledStore(ledger, bytes_per_second=RATE)
        await store.put(batch("huge", 5100))
        await store.put(batch("a", 1))
        await asyncio.sleep(60)
        await store.put(batch("after a rest", 5100))  # no more than a tenth of a second was saved up
        await store.put(batch("b", 1))

    in_leaping_time(scenario())
    assert ledger.order == ["huge", "a", "after a rest", "b"]
    assert ledger.times == [0, 5, 65, 70]


def test_reads_count_what_they_ask_for_and_columns_what_they_say() -> None:
    ledger = Ledger()

    class Columns(list[GetItem]):
        nbytes = 900

    async def scenario() -> None:
        store = ThrottledStore(ledger, bytes_per_second=RATE)
        await store.get([Room("a", 300, 200).item, Room("b", 600).item])
        await store.get(Columns([Room("c", 1).item]))
        await store.get([Room("d", 1).item])

    in_leaping_time(scenario())
    assert ledger.times == [0, 1, 1.9]


def test_questions_and_removals_move_no_bytes() -> None:
    ledger = Ledger()

    async def scenario() -> None:
        store = ThrottledStore(ledger, bytes_per_second=RATE)
        await store.put(batch("a", 10_100))
        waiting = asyncio.ensure_future(store.put(batch("b", 1)))
        await asyncio.sleep(1)
        for _ in range(50):
            await store.exists(["a"])
            assert await store.health() == Health(ok=True)
        await store.remove(["a"])
        await waiting

    in_leaping_time(scenario())
    assert ledger.times == [0, *[1] * 51, 10]


def test_two_jobs_share_the_rate() -> None:
    ledger = Ledger()

    async def scenario() -> None:
        store = ThrottledStore(ledger, bytes_per_second=RATE)

        async def job(name: str, count: int) -> None:
            for _ in range(count):
                await store.put(batch(name, 500))

        await asyncio.gather(job("greedy", 20), job("other", 5))

    in_leaping_time(scenario())
    assert ledger.order[1:11] == ["greedy", "other"] * 5
    assert ledger.times == [0] + [round(number * 0.5 - 0.1, 6) for number in range(1, 25)]


@pytest.mark.parametrize("victims", [(1,), (3,), (1, 2, 3), (2, 5), (0, 4)])
def test_a_cancelled_batch_takes_no_bytes(victims: tuple[int, ...]) -> None:
    """Number 0 goes at once, number 1 is the first to wait."""
    ledger = Ledger()

    async def scenario() -> None:
        store = ThrottledStore(ledger, bytes_per_second=RATE)
        tasks = [asyncio.ensure_future(store.put(batch(str(number), 1000))) for number in range(6)]
        await asyncio.sleep(0.4)
        for victim in victims:
            tasks[victim].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = [number for number, answer in enumerate(answers) if isinstance(answer, asyncio.CancelledError)]
        assert cancelled == [victim for victim in victims if victim != 0]  # that one was over
        assert asyncio.all_tasks() == {asyncio.current_task()}

    in_leaping_time(scenario())
    left = [number for number in range(6) if number not in victims or number == 0]
    assert ledger.order == [str(number) for number in left]
    assert ledger.times == [0] + [round(number - 0.1, 6) for number in range(1, len(left))]


def test_a_batch_cancelled_while_it_waits_for_a_request_takes_no_bytes() -> None:
    ledger = Ledger()

    async def scenario() -> None:
        store = ThrottledStore(ledger, 1, RATE)
        await store.exists(["a"])
        waiting = asyncio.ensure_future(store.put(batch("b", 50_000)))
        await asyncio.sleep(0.5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await store.put(batch("c", 1))
        await store.put(batch("d", 1))

    in_leaping_time(scenario())
    assert ledger.order == ["a", "c", "d"]
    assert ledger.moves[-1].time < 503


def test_both_rates_are_kept_at_once() -> None:
    ledger = Ledger()

    async def scenario() -> None:
        store = ThrottledStore(ledger, 4, RATE)
        await asyncio.gather(
            *(store.put(batch(f"put-{number}", 400)) for number in range(8)),
            *(store.exists([f"ask-{number}"]) for number in range(12)),
        )

    in_leaping_time(scenario())
    times = [move.time for move in ledger.moves]
    assert all(later - earlier >= 1.0 for earlier, later in zip(times, times[4:], strict=False))
    puts = [move for move in ledger.moves if move.nbytes]
    assert [move.key for move in puts] == [f"put-{number}" for number in range(8)]
    assert_byte_rate_kept(puts)
    assert [move.key for move in ledger.moves if not move.nbytes] == [f"ask-{number}" for number in range(12)]


def test_a_batch_that_fails_counts() -> None:
    class Down(Ledger):
        async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
            await super().put(items)
            raise StoreUnavailableError("down")

    ledger = Down()

    async def scenario() -> None:
        store = ThrottledStore(ledger, bytes_per_second=RATE)
        for _ in range(3):
            with pytest.raises(StoreUnavailableError, match="down"):
                await store.put(batch("a", 600))

    in_leaping_time(scenario())
    assert ledger.times == [0, 0.5, 1.1]


async def test_what_is_no_buffer_is_for_the_store_to_refuse() -> None:
    store = ThrottledStore(MemoryStore(), bytes_per_second=RATE)
    with pytest.raises(InvalidBufferError):
        await store.put([PutItem("a", (b"plain bytes",))])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ThrottledStore(MemoryStore()),
        lambda: ThrottledStore(MemoryStore(), None, None),
        lambda: ThrottledStore(MemoryStore(), 0),
        lambda: ThrottledStore(MemoryStore(), -1, 5),
        lambda: ThrottledStore(MemoryStore(), 1.5),  # type: ignore[arg-type]
        lambda: ThrottledStore(MemoryStore(), True),
        lambda: ThrottledStore(MemoryStore(), requests_per_second="7"),  # type: ignore[arg-type]
    ],
)
def test_a_throttle_has_a_rate(make: Callable[[], ThrottledStore]) -> None:
    with pytest.raises(ConfigError, match="requests_per_second"):
        make()


@pytest.mark.parametrize("rate", [0, -5, 0.5, False, "1GB"])
def test_the_byte_rate_is_a_number_of_bytes(rate: Any) -> None:
    with pytest.raises(ConfigError, match="bytes_per_second"):
        ThrottledStore(MemoryStore(), 5, rate)


def test_its_memory_is_the_stores() -> None:
    class Placed(MemoryStore):
        memory = HeapMemory()

    store = Placed()
    assert ThrottledStore(store, 5).memory is store.memory
