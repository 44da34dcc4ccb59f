"""BreakerStore: when a store counts as down, what its callers are told then, and how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_contract import OpenStore, Room, StoreContract, value

from mooncake_sparse_client import BreakerStore, MemoryStore, Resilience, Store, WrappedStore
from mooncake_sparse_client.core.results import Health
from mooncake_sparse_client.errors import (
    ClientClosedError,
    InvalidRequestError,
    SparseStoreError,
    StoreDownError,
    StoreFullError,
    StoreRejectedError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from mooncake_sparse_client.stores import breaker
from mooncake_sparse_client.stores.base import Failure, GetItem, PlacedGets, PutItem, RemoveOutcome
from mooncake_sparse_client.stores.circuit import Call, Circuit, State

#: Hangs are noticed quickly, and each look may follow the last one at once.
QUICK = Resilience(trip_after=3, hang_seconds=0.02, probe_seconds=1e-6)
#: Nothing hangs for this one, and nothing is looked at.
PATIENT = Resilience(trip_after=3, hang_seconds=600, probe_seconds=600)


class TestBreakerStore(StoreContract):
    """Over a store that never fails it changes nothing."""

    @pytest.fixture
    def store(self) -> Store:
        return BreakerStore(MemoryStore())

    @pytest.fixture
    def new_store(self) -> OpenStore:
        async def open_one() -> Store:
            return BreakerStore(MemoryStore())

        return open_one


class Scripted(WrappedStore):
    """Does with each call what a test tells it to: raise, answer, or wait. Notes all calls."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.calls: list[str] = []
        #: By method: an error to raise, an answer, or a gate to wait for. Stays until it is changed.
        self.does: dict[str, Any] = {}
        self.cancelled: list[str] = []

    async def _step(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append(name)
        does = self.does.get(name)
        if isinstance(does, asyncio.Event):
            try:
                await does.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
        elif isinstance(does, BaseException):
            raise does.with_traceback(None)
        elif isinstance(does, type):
            raise does("no master")  # which nobody else knows
        elif does is not None:
            return does
        return await call()

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        answer: list[bool] = await self._step("exists", lambda: super(Scripted, self).exists(keys))
        return answer

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        answer: list[Failure | None] = await self._step("put", lambda: super(Scripted, self).put(items))
        return answer

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        answer: list[Failure | None] = await self._step("get", lambda: super(Scripted, self).get(items))
        return answer

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        answer: list[RemoveOutcome] = await self._step(
            "remove", lambda: super(Scripted, self).remove(keys, force=force)
        )
        return answer

    async def health(self) -> Health:
        answer: Health = await self._step("health", super().health)
        return answer


CALLS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "exists": lambda store: store.exists(["a"]),
    "remove": lambda store: store.remove(["a"]),
    "put": lambda store: store.put([value("a", b"bytes")]),
    "get": lambda store: store.get([Room("a", 5).item]),
}
QUESTIONS, MOVES = ("exists", "remove"), ("put", "get")
BAD = Health(ok=False, kind="unavailable")


def unavailable() -> StoreUnavailableError:
    return StoreUnavailableError("no master at 1.2.3.4")


async def call(store: Store, name: str) -> object:
    return await CALLS[name](store)


async def fails(store: Store, name: str, error: type[BaseException] = StoreUnavailableError) -> None:
    with pytest.raises(error) as caught:
        await call(store, name)
    assert type(caught.value) is error


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def trip(store: BreakerStore, inner: Scripted, name: str = "exists") -> None:
    """Open the breaker by failures of one method, which stays broken."""
    inner.does[name] = unavailable()
    for _ in range(3):
        await fails(store, name)
    assert store.is_down


async def on_trial(store: BreakerStore, inner: Scripted) -> None:
    """Puts have failed, the store has answered since, and puts work by now."""
    await trip(store, inner, "put")
    del inner.does["put"]
    await fails(store, "exists", StoreDownError)
    await until(lambda: not store.is_down)
    assert store.on_trial
    inner.calls.clear()


# Opening


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("error", [StoreUnavailableError, StoreTimeoutError])
async def test_failures_in_a_row_open_it_and_then_nobody_asks(name: str, error: type[SparseStoreError]) -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    inner.does[name] = error("no master at 1.2.3.4")
    for _ in range(3):
        assert not store.is_down
        assert store.refusal() is None
        await fails(store, name, error)
    assert store.is_down
    asked = list(inner.calls)
    for other in CALLS:
        await fails(store, other, StoreDownError)
    assert inner.calls == asked
    refusal = store.refusal()
    assert refusal is not None
    assert refusal.retriable
    for part in ("no master at 1.2.3.4", "3 of the", "s ago", "looked"):
        assert part in str(refusal)


@pytest.mark.parametrize("error", [StoreFullError, StoreRejectedError])
async def test_a_refusal_of_the_store_is_an_answer(error: type[SparseStoreError]) -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    for _ in range(3):
        inner.does["put"] = unavailable()
        await fails(store, "put")
        await fails(store, "put")
        inner.does["put"] = error("no")
        await fails(store, "put", error)
    assert not store.is_down


async def test_mistakes_of_the_caller_and_empty_batches_count_neither_way() -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    inner.does["exists"] = InvalidRequestError("a bug")
    for _ in range(5):
        await fails(store, "exists", InvalidRequestError)
    inner.does["exists"] = unavailable()
    await fails(store, "exists")
    await fails(store, "exists")
    inner.does["exists"] = []
    assert await store.exists([]) == []
    inner.does["exists"] = ValueError("another")
    await fails(store, "exists", ValueError)
    inner.does["exists"] = unavailable()
    await fails(store, "exists")
    assert store.is_down


@pytest.mark.parametrize(("good", "bad"), [("exists", "get"), ("put", "remove")])
async def test_questions_and_transfers_are_counted_apart(good: str, bad: str) -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    inner.does[bad] = unavailable()
    for _ in range(3):
        await call(store, good)
        await fails(store, bad)
    assert store.is_down


@pytest.mark.parametrize(("good", "bad"), [("exists", "remove"), ("remove", "exists"), ("put", "get"), ("get", "put")])
async def test_a_success_of_the_same_kind_starts_the_count_anew(good: str, bad: str) -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    inner.does[bad] = unavailable()
    for _ in range(4):
        await fails(store, bad)
        await fails(store, bad)
        await call(store, good)
    assert not store.is_down


@pytest.mark.parametrize("kind", ["transfer", "timeout", "unavailable"])
async def test_a_transfer_of_which_nothing_arrives_in_a_long_time_has_failed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "_SLOW", 0.0)
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    inner.does["get"] = [Failure(kind, True, "gone")] * 2
    for _ in range(3):
        assert not store.is_down
        await call(store, "get")
    assert store.is_down
    assert kind in str(store.refusal())


async def test_owners_that_are_gone_and_quick_to_say_so_open_nothing() -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    inner.does["get"] = [Failure("transfer", True, "gone")] * 2
    for _ in range(10):
        await call(store, "get")
    assert not store.is_down


@pytest.mark.parametrize("other", [None, Failure("missing", False, ""), Failure("full", True, "")])
async def test_one_key_that_was_answered_is_a_success(other: Failure | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "_SLOW", 0.0)
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    inner.does["get"] = [Failure("transfer", True, "gone"), other, Failure("transfer", True, "gone")]
    for _ in range(10):
        await call(store, "get")
    assert not store.is_down


# Hanging


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_hangs_opens_it(name: str) -> None:
    inner = Scripted()
    hangs: list[str] = []
    store = BreakerStore(inner, QUICK, on_hang=hangs.append)
    gate = inner.does[name] = asyncio.Event()
    inner.does["health"] = BAD
    hanging = asyncio.ensure_future(call(store, name))
    await until(lambda: store.is_down)
    assert len(hangs) == 1
    assert "hung" in hangs[0]
    await fails(store, "exists", StoreDownError)
    gate.set()
    await hanging  # what was under way has its answer all the same
    assert store.is_down  # which is old by now
    await store.settle(10)


async def test_what_is_slow_while_others_work_does_not_hang() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    gate = inner.does["get"] = asyncio.Event()
    slow = asyncio.ensure_future(call(store, "get"))
    await asyncio.sleep(0)
    await call(store, "put")
    await asyncio.sleep(0.06)
    assert not store.is_down
    gate.set()
    await slow


async def test_a_question_that_works_says_nothing_of_a_transfer_that_hangs() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    inner.does["get"] = asyncio.Event()
    hanging = asyncio.ensure_future(call(store, "get"))
    await asyncio.sleep(0)
    await call(store, "exists")
    await until(lambda: store.is_down)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_a_large_transfer_has_longer() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    gate = inner.does["get"] = asyncio.Event()
    large = PlacedGets(["a"], [0], [16 << 20], 16 << 20)
    inner.inner.get = lambda _: answered([None])  # type: ignore[method-assign]
    slow = asyncio.ensure_future(store.get(large))
    await asyncio.sleep(0.1)  # five times what a question may take
    assert not store.is_down
    gate.set()
    assert await slow == [None]


async def answered(answer: Any) -> Any:
    return answer


async def test_a_cancelled_call_counts_neither_way() -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    inner.does["exists"] = unavailable()
    await fails(store, "exists")
    await fails(store, "exists")
    inner.does["exists"] = asyncio.Event()
    for _ in range(5):
        waiting = asyncio.ensure_future(call(store, "exists"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not store.is_down
    inner.does["exists"] = unavailable()
    await fails(store, "exists")
    assert store.is_down


async def test_a_cancelled_call_leaves_no_timer() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    inner.does["exists"] = asyncio.Event()
    waiting = asyncio.ensure_future(call(store, "exists"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.06)
    assert not store.is_down


# Coming back


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_good_look_closes_what_questions_opened(name: str) -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await trip(store, inner, name)
    del inner.does[name]
    await fails(store, name, StoreDownError)  # has it looked at
    await until(lambda: not store.is_down)
    assert not store.on_trial
    for other in CALLS:
        await call(store, other)
    assert inner.calls.count("health") == 1


async def test_a_bad_look_changes_nothing_and_the_next_comes() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await trip(store, inner)
    for bad in (BAD, unavailable(), StoreTimeoutError("late"), StoreRejectedError("no")):
        inner.does["health"] = bad
        looks = inner.calls.count("health")
        await fails(store, "get", StoreDownError)
        await until(lambda looks=looks: inner.calls.count("health") > looks)
        for _ in range(3):
            await asyncio.sleep(0)
        assert store.is_down
    del inner.does["health"]
    assert store.refusal() is not None  # asking for that is asking
    await until(lambda: not store.is_down)


async def test_an_idle_client_is_not_probed() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await trip(store, inner)
    await asyncio.sleep(0.03)
    assert "health" not in inner.calls


async def test_looks_are_no_more_often_than_the_pause() -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    await trip(store, inner)
    for _ in range(1000):
        await fails(store, "exists", StoreDownError)
        assert store.refusal() is not None
    await asyncio.sleep(0)
    assert inner.calls == ["exists"] * 3


async def test_one_look_at_a_time_and_one_that_hangs_is_given_up() -> None:
    inner = Scripted()
    store = BreakerStore(inner, Resilience(hang_seconds=0.05, probe_seconds=1e-6))
    await trip(store, inner)
    inner.does["health"] = asyncio.Event()
    for _ in range(20):
        await fails(store, "exists", StoreDownError)
        await asyncio.sleep(0)
    assert inner.calls.count("health") == 1
    await until(lambda: inner.cancelled == ["health"])
    del inner.does["health"]
    await until(lambda: store.refusal() is None)
    assert inner.calls.count("health") == 2


async def test_while_a_look_does_not_let_go_no_other_begins() -> None:
    class Stubborn(Scripted):
        async def health(self) -> Health:
            self.calls.append("health")
            while not self.does["free"].is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.does["free"].wait()
            return Health(ok=True)

    inner = Stubborn()
    store = BreakerStore(inner, QUICK)
    await trip(store, inner)
    inner.does["free"] = asyncio.Event()
    await fails(store, "exists", StoreDownError)
    await asyncio.sleep(0.06)
    await fails(store, "exists", StoreDownError)
    await asyncio.sleep(0)
    assert inner.calls.count("health") == 1
    await asyncio.wait_for(store.settle(0.01), 10)  # within its bound
    inner.does["free"].set()
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_a_store_that_is_closed_meanwhile_says_so_itself() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await trip(store, inner)
    inner.does.clear()
    await inner.inner.aclose()
    await fails(store, "exists", StoreDownError)
    await until(lambda: not store.is_down)
    await fails(store, "exists", ClientClosedError)


async def test_closing_it_while_it_is_open_closes_the_store() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await trip(store, inner)
    inner.does["health"] = asyncio.Event()
    await fails(store, "exists", StoreDownError)
    await asyncio.sleep(0)
    await store.aclose()
    assert len(asyncio.all_tasks()) == 1
    del inner.does["exists"]
    for name in CALLS:
        await fails(store, name, ClientClosedError)


async def test_settling_ends_the_look_and_begins_no_other() -> None:
    inner = Scripted()
    store = BreakerStore(inner, Resilience(hang_seconds=600, probe_seconds=1e-6))
    await trip(store, inner)
    inner.does["health"] = asyncio.Event()
    await fails(store, "exists", StoreDownError)
    await asyncio.sleep(0)
    assert inner.calls.count("health") == 1
    await store.settle(10)
    assert len(asyncio.all_tasks()) == 1
    await fails(store, "exists", StoreDownError)
    await asyncio.sleep(0)
    assert inner.calls.count("health") == 1


async def test_health_is_asked_for_real_and_changes_nothing() -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    await trip(store, inner)
    assert await store.health() == Health(ok=True)
    inner.does["health"] = BAD
    assert await store.health() == BAD
    assert store.is_down


# On trial


async def test_after_transfers_failed_one_at_a_time_is_let_through() -> None:
    inner = Scripted()
    store = BreakerStore(inner, Resilience(hang_seconds=600, probe_seconds=1e-6))
    await on_trial(store, inner)
    gate = inner.does["put"] = asyncio.Event()
    first = asyncio.ensure_future(call(store, "put"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for name in MOVES:
        await fails(store, name, StoreDownError)
    for name in QUESTIONS:
        await call(store, name)
    assert store.refusal() is None
    assert inner.calls == ["put", *QUESTIONS]
    gate.set()
    assert await first == [None]
    assert not store.on_trial
    for name in CALLS:
        await call(store, name)


@pytest.mark.parametrize("name", MOVES)
async def test_one_failure_on_trial_opens_it_again(name: str) -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await on_trial(store, inner)
    inner.does[name] = unavailable()
    await fails(store, name)
    assert store.is_down
    del inner.does[name]
    await fails(store, name, StoreDownError)
    await until(lambda: store.on_trial)
    await call(store, name)
    assert not store.on_trial
    assert not store.is_down


async def test_a_trial_that_hangs_opens_it_again() -> None:
    inner = Scripted()
    hangs: list[str] = []
    store = BreakerStore(inner, QUICK, on_hang=hangs.append)
    await on_trial(store, inner)
    gate = inner.does["get"] = asyncio.Event()
    hanging = asyncio.ensure_future(call(store, "get"))
    await until(lambda: store.is_down)
    assert len(hangs) == 1
    await fails(store, "exists", StoreDownError)
    await until(lambda: store.on_trial)
    # The one that hangs is no longer what the others wait for.
    assert await call(store, "put") == [None]
    assert not store.on_trial
    gate.set()
    assert len(await hanging) == 1  # type: ignore[arg-type]


async def test_a_trial_that_nobody_waits_for_still_counts() -> None:
    """As when the same caller's next batch was refused, and the caller has given up."""
    inner = Scripted()
    store = BreakerStore(inner, Resilience(hang_seconds=600, probe_seconds=1e-6))
    await on_trial(store, inner)
    gate = inner.does["put"] = asyncio.Event()
    left = asyncio.ensure_future(call(store, "put"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not left.done()  # its memory is in use
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert not store.on_trial
    assert not store.is_down
    assert inner.cancelled == []


@pytest.mark.parametrize("first", ["left", "hung"])
async def test_a_trial_that_hangs_and_that_nobody_waits_for_is_ended(first: str) -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await on_trial(store, inner)
    inner.does["put"] = asyncio.Event()
    left = asyncio.ensure_future(call(store, "put"))
    await asyncio.sleep(0)
    if first == "hung":
        await until(lambda: store.is_down)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(left, 10)
    assert store.is_down
    assert inner.cancelled == ["put"]
    assert len(asyncio.all_tasks()) <= 2  # a look, at most


async def test_a_quick_refusal_of_a_dead_owner_decides_no_trial() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await on_trial(store, inner)
    inner.does["get"] = [Failure("transfer", True, "gone")]
    await call(store, "get")
    assert store.on_trial
    await call(store, "put")
    assert not store.on_trial


async def test_questions_that_fail_meanwhile_do_not_end_the_doubt_about_transfers() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await on_trial(store, inner)
    await trip(store, inner, "exists")
    del inner.does["exists"]
    await fails(store, "exists", StoreDownError)
    await until(lambda: store.on_trial)


async def test_once_a_transfer_has_worked_the_doubt_is_over() -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await on_trial(store, inner)
    await call(store, "put")
    await trip(store, inner, "exists")
    del inner.does["exists"]
    await fails(store, "exists", StoreDownError)
    await until(lambda: not store.is_down)
    assert not store.on_trial


# Errors and memory


async def test_each_refused_call_has_an_error_of_its_own() -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    await trip(store, inner)
    errors = await asyncio.gather(*(call(store, name) for name in CALLS), return_exceptions=True)
    assert len({id(error) for error in errors}) == len(CALLS)


class Memory(bytearray):
    """That can be watched."""


@pytest.mark.parametrize("how", ["failed", "refused", "tried"])
async def test_an_error_keeps_no_memory(how: str) -> None:
    inner = Scripted()
    store = BreakerStore(inner, QUICK)
    await on_trial(store, inner)
    if how == "failed":
        await call(store, "put")
    if how == "refused":
        inner.does["health"] = BAD
        await trip(store, inner)
    inner.does["put"] = StoreUnavailableError

    async def attempt() -> weakref.ref[Memory]:
        memory = Memory(b"bytes")
        with contextlib.suppress(StoreUnavailableError):
            await store.put([PutItem("a", (memoryview(memory),))])
        return weakref.ref(memory)

    gc.collect()
    gc.disable()
    try:
        known = await attempt()
        await asyncio.sleep(0)
        assert known() is None
    finally:
        gc.enable()
    await store.settle(10)


async def test_refusing_costs_the_store_nothing() -> None:
    inner = Scripted()
    store = BreakerStore(inner, PATIENT)
    await trip(store, inner)
    for _ in range(10_000):
        with contextlib.suppress(StoreDownError):
            await store.exists(["a"])
    assert len(inner.calls) == 3


# The circuit, beside a slow and obvious definition of it


@dataclass
class Model:
    """Remembers everything that happened, and looks it all through."""

    trip_after: int
    state: str = "closed"
    era: int = 0
    #: What became of calls, in order: (kind, era that it began in, worked).
    outcomes: list[tuple[str, int, bool]] = field(default_factory=list)
    #: Where in ``outcomes`` each call began.
    begun: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    transfers_doubted: bool = False

    def begin(self, number: int, kind: str) -> None:
        self.begun[number] = (kind, self.era, len(self.outcomes))

    def end(self, number: int, *, worked: bool) -> None:
        kind, era, _ = self.begun.pop(number)
        self.outcomes.append((kind, era, worked))
        if era != self.era:
            return
        if worked:
            if self.state == "trial" and kind == "moves":
                self.state, self.transfers_doubted = "closed", False
            return
        row = 0
        for other, other_era, other_worked in reversed(self.outcomes):
            if other == kind and other_era == self.era:
                if other_worked:
                    break
                row += 1
        if row >= self.trip_after or (self.state == "trial" and kind == "moves"):
            self.trip(kind)

    def hang(self, number: int) -> None:
        kind, era, start = self.begun[number]
        others = [worked for other, _, worked in self.outcomes[start:] if other == kind]
        if era == self.era and not any(others):
            self.trip(kind)

    def trip(self, kind: str) -> None:
        self.state = "open"
        self.era += 1
        self.transfers_doubted |= kind == "moves"

    def answer(self) -> None:
        if self.state == "open":
            self.state = "trial" if self.transfers_doubted else "closed"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "worked", "failed", "hung", "works", "works", "fails", "fails", "answers", "answers"]
        ),
        st.sampled_from(["questions", "moves"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 3))
def test_the_circuit_is_what_its_definition_says(steps: list[tuple[str, str, int]], trip_after: int) -> None:
    circuit, model = Circuit(trip_after), Model(trip_after)
    calls: dict[int, Call] = {}
    for now, (step, kind, choice) in enumerate(steps):
        if step in ("begin", "works", "fails") and circuit.state is not State.OPEN:
            calls[now] = circuit.begin(getattr(circuit, kind), now)
            model.begin(now, kind)
        number = now if now in calls else sorted(calls)[choice % len(calls)] if calls else None
        if step == "answers":
            circuit.answers(now)
            model.answer()
        elif number is not None and step == "hung":
            circuit.hung(calls[number], now)
            model.hang(number)
        elif number is not None and step != "begin":
            ended, worked = calls.pop(number), step.startswith("work")
            if worked:
                circuit.worked(ended, now)
            else:
                circuit.failed(ended, "why", now)
            model.end(number, worked=worked)
        assert circuit.state.value == model.state
