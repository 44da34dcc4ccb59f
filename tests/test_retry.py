"""RetryingStore: what is asked again, how often, after which pauses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence

import pytest
from store_contract import OpenStore, Room, StoreContract, value

from mooncake_sparse_client import MemoryStore, Resilience, RetryingStore, Store, WrappedStore
from mooncake_sparse_client.core.results import Health
from mooncake_sparse_client.errors import (
    InvalidRequestError,
    SparseStoreError,
    StoreDownError,
    StoreFullError,
    StoreRejectedError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from mooncake_sparse_client.stores import retry
from mooncake_sparse_client.stores.base import Failure, GetItem, PutItem, RemoveOutcome

QUICK = Resilience(attempts=3, first_pause=1e-4, longest_pause=1e-3)


class TestRetryingStore(StoreContract):
    """Over a store that never fails it changes nothing."""

    @pytest.fixture
    def store(self) -> Store:
        return RetryingStore(MemoryStore())

    @pytest.fixture
    def new_store(self) -> OpenStore:
        async def open_one() -> Store:
            return RetryingStore(MemoryStore())

        return open_one


class Scripted(WrappedStore):
    """Raises the errors of its script, one a call, and then works."""

    def __init__(self, *script: SparseStoreError) -> None:
        super().__init__(MemoryStore())
        self.script = list(script)
        self.calls: list[str] = []

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if self.script:
            raise self.script.pop(0)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self._step("exists")
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self._step("put")
        return await super().put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        self._step("get")
        return await super().get(items)

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        self._step(f"remove {force}")
        return await super().remove(keys, force=force)

    async def health(self) -> Health:
        self._step("health")
        return await super().health()


def down() -> StoreUnavailableError:
    return StoreUnavailableError("no master")


CALLS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "exists": lambda store: store.exists(["a"]),
    "put": lambda store: store.put([value("a", b"bytes")]),
    "get": lambda store: store.get([Room("a", 5).item]),
    "remove True": lambda store: store.remove(["a"], force=True),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("error", [StoreUnavailableError, StoreTimeoutError, StoreFullError])
async def test_what_may_pass_is_asked_again(name: str, error: type[SparseStoreError]) -> None:
    store = Scripted(error("first"), error("second"))
    answer = await CALLS[name](RetryingStore(store, QUICK))
    assert store.calls == [name] * 3
    assert answer == await CALLS[name](MemoryStore())


async def test_what_arrives_at_the_second_attempt_is_whole() -> None:
    store = Scripted()
    retrying = RetryingStore(store, QUICK)
    store.script = [down()]
    assert await retrying.put([value("a", b"bytes"), value("b", b"more")]) == [None, None]
    store.script = [down()]
    rooms = [Room("b", 4), Room("missing", 2), Room("a", 2, 3)]
    answers = await retrying.get([room.item for room in rooms])
    assert [answer and answer.kind for answer in answers] == [None, "missing", None]
    assert (rooms[0].content, rooms[2].content) == (b"more", b"bytes")
    assert store.calls == ["put", "put", "get", "get"]


@pytest.mark.parametrize("name", CALLS)
async def test_the_last_error_is_raised(name: str) -> None:
    errors = [StoreUnavailableError("first"), StoreUnavailableError("second"), StoreTimeoutError("third"), down()]
    store = Scripted(*errors)
    with pytest.raises(StoreTimeoutError, match="third") as caught:
        await CALLS[name](RetryingStore(store, QUICK))
    assert len(store.calls) == 3
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "error", [StoreDownError("not asked"), StoreRejectedError("never"), InvalidRequestError("a bug")]
)
async def test_what_would_fail_again_is_raised_at_once(error: SparseStoreError) -> None:
    store = Scripted(error)
    with pytest.raises(type(error)):
        await RetryingStore(store, QUICK).exists(["a"])
    assert store.calls == ["exists"]


async def test_one_attempt_is_one_attempt() -> None:
    store = Scripted(down())
    with pytest.raises(StoreUnavailableError):
        await RetryingStore(store, Resilience(attempts=1)).exists(["a"])
    assert store.calls == ["exists"]


async def test_health_is_asked_once() -> None:
    store = Scripted(down())
    with pytest.raises(StoreUnavailableError):
        await RetryingStore(store, QUICK).health()
    assert store.calls == ["health"]


async def test_a_single_key_s_failure_is_an_answer() -> None:
    class Busy(MemoryStore):
        calls = 0

        async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
            self.calls += 1
            return [Failure("busy", True, "later")] * len(items)

    store = Busy()
    (failure,) = await RetryingStore(store, QUICK).get([Room("a", 1).item])
    assert failure is not None
    assert (failure.kind, store.calls) == ("busy", 1)


async def test_pauses_grow_twofold_up_to_the_longest_with_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(retry.asyncio, "sleep", sleep)
    for _ in range(20):
        store = RetryingStore(
            Scripted(*(down() for _ in range(9))), Resilience(attempts=7, first_pause=0.1, longest_pause=1.0)
        )
        with pytest.raises(StoreUnavailableError):
            await store.exists(["a"])
    longest = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert len(pauses) == 20 * 6
    for number, pause in enumerate(pauses):
        assert longest[number % 6] / 2 <= pause <= longest[number % 6]
    assert len(set(pauses)) > 100


async def test_a_cancellation_ends_a_pause_at_once() -> None:
    store = Scripted(down())
    task = asyncio.create_task(
        RetryingStore(store, Resilience(first_pause=600, longest_pause=600)).put([value("a", b"bytes")])
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.calls == ["put"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert store.calls == ["put"]


async def test_a_pause_holds_up_no_other_call() -> None:
    store = Scripted(down())
    retrying = RetryingStore(store, Resilience(first_pause=600, longest_pause=600))
    waiting = asyncio.create_task(retrying.exists(["a"]))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(retrying.exists(["b"]), 10) == [False]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_failed_attempts_keep_no_memory() -> None:
    class Memory(bytearray):
        """That can be watched."""

    async def attempt(failures: int) -> weakref.ref[Memory]:
        memory = Memory(b"bytes")
        item = PutItem("a", (memoryview(memory),))
        with contextlib.suppress(StoreUnavailableError):
            await RetryingStore(Scripted(*(down() for _ in range(failures))), QUICK).put([item])
        return weakref.ref(memory)

    gc.collect()
    gc.disable()
    try:
        for failures in (0, 1, 3):
            assert (await attempt(failures))() is None
    finally:
        gc.enable()
