"""MemoryStore: the contract of every store, and its own bound on memory."""

from __future__ import annotations

import pytest
from store_contract import OpenStore, StoreContract, failure_of, read, value

from mooncake_sparse_client.errors import ClientClosedError, ConfigError
from mooncake_sparse_client.stores.base import RemoveOutcome, Store
from mooncake_sparse_client.stores.memory import MemoryStore


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()

    @pytest.fixture
    def new_store(self) -> OpenStore:
        async def open_one() -> Store:
            return MemoryStore()

        return open_one


class TestBoundedMemoryStore(TestMemoryStore):
    """A bound that is never reached changes nothing."""

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(1 << 30)


async def test_it_shows_what_it_holds() -> None:
    store = MemoryStore()
    assert (store.keys(), store.nbytes) == ((), 0)
    await store.put([value("a", b"1"), value("b", b"22"), value("c", b"333")])
    assert (store.keys(), store.nbytes) == (("a", "b", "c"), 6)
    await store.put([value("a", b"not taken"), value("b", b"4444", replace=True)])
    assert (set(store.keys()), store.nbytes) == ({"a", "b", "c"}, 8)
    await store.remove(["c", "d"])
    assert (set(store.keys()), store.nbytes) == ({"a", "b"}, 5)
    await store.aclose()
    assert store.nbytes == 0


async def test_the_value_used_longest_ago_makes_room() -> None:
    store = MemoryStore(10)
    await store.put([value("a", b"333"), value("b", b"333"), value("c", b"333")])
    assert store.keys() == ("a", "b", "c")
    assert await store.exists(["a"]) == [True]  # a use, like a read
    assert await read(store, "b", 3) == b"333"
    assert store.keys() == ("c", "a", "b")
    assert await store.put([value("d", b"333")]) == [None]
    assert (store.keys(), store.nbytes) == (("a", "b", "d"), 9)
    assert (await failure_of(store, "c", 3)).kind == "missing"
    await store.put([value("a", b"ignored")])  # a use as well
    assert await store.put([value("e", b"7777777")]) == [None]
    assert (store.keys(), store.nbytes) == (("a", "e"), 10)


async def test_an_unanswered_question_is_no_use() -> None:
    store = MemoryStore(2)
    await store.put([value("a", b"1"), value("b", b"1")])
    await store.exists(["nothing"])
    await store.remove(["nothing"])
    await store.put([value("c", b"1")])
    assert store.keys() == ("b", "c")


async def test_a_replacement_may_evict_others_but_not_itself() -> None:
    store = MemoryStore(6)
    await store.put([value("a", b"22"), value("b", b"22"), value("c", b"22")])
    assert await store.put([value("a", b"4444", replace=True)]) == [None]
    assert (store.keys(), store.nbytes) == (("c", "a"), 6)
    assert await read(store, "a", 4) == b"4444"


async def test_a_value_larger_than_the_bound_is_refused() -> None:
    store = MemoryStore(10)
    assert store.max_value_bytes == 10
    await store.put([value("a", b"333")])
    (failure, fine) = await store.put([value("b", b"6 byte", b"5 byte"), value("c", b"333")])
    assert failure is not None
    assert failure.kind == "full"
    assert "12" in failure.detail
    assert "10" in failure.detail
    assert fine is None
    assert store.keys() == ("a", "c")  # nothing went for what did not fit
    (failure,) = await store.put([value("a", b"eleven byte", replace=True)])
    assert failure is not None
    assert failure.kind == "full"
    assert await read(store, "a", 3) == b"333"
    assert await store.put([value("d", b"ten bytes.")]) == [None]
    assert store.keys() == ("d",)


async def test_what_was_put_is_a_copy() -> None:
    store = MemoryStore()
    memory = bytearray(b"first")
    await store.put([value("a", memory)])
    memory[:] = b"XXXXX"
    assert await read(store, "a", 5) == b"first"


async def test_closing_forgets_everything() -> None:
    store = MemoryStore()
    await store.put([value("a", b"first")])
    await store.aclose()
    assert store.keys() == ()
    with pytest.raises(ClientClosedError, match="closed"):
        await store.exists(["a"])


async def test_nothing_is_leased() -> None:
    store = MemoryStore()
    await store.put([value("a", b"first")])
    await read(store, "a", 5)
    assert await store.remove(["a"]) == [RemoveOutcome.REMOVED]


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, "1"])
def test_a_bound_is_a_number_of_bytes(capacity: object) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        MemoryStore(capacity)  # type: ignore[arg-type]
