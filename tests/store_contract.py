"""What every store does: subclass ``StoreContract`` with a ``store`` and a ``new_store`` fixture.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> Store: ...          # may be shared by tests: each uses keys of its own
        @pytest.fixture
        def new_store(self) -> OpenStore: ...  # opens another one, for the tests that close it
"""

from __future__ import annotations

import asyncio
import random
import uuid
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from mooncake_sparse_client.core.results import Health
from mooncake_sparse_client.errors import ClientClosedError, InvalidBufferError, InvalidRequestError
from mooncake_sparse_client.stores.base import Failure, GetItem, PutItem, RemoveOutcome, Store

OpenStore: TypeAlias = Callable[[], Awaitable[Store]]
MIB = 1 << 20


def value(key: str, *pieces: bytes | bytearray, replace: bool = False) -> PutItem:
    """A value to write, in as many buffers as there are pieces."""
    return PutItem(key, tuple(memoryview(piece) for piece in pieces), replace)


class Room:
    """Memory to read one value into."""

    def __init__(self, key: str, *sizes: int) -> None:
        self.pieces = [bytearray(size) for size in sizes]
        self.item = GetItem(key, tuple(memoryview(piece) for piece in self.pieces))

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)


async def read(store: Store, key: str, nbytes: int) -> bytes:
    """A value that must be there."""
    room = Room(key, nbytes)
    assert await store.get([room.item]) == [None]
    return room.content


async def failure_of(store: Store, key: str, nbytes: int) -> Failure:
    """Why a value cannot be read."""
    (failure,) = await store.get([Room(key, nbytes).item])
    assert isinstance(failure, Failure)
    assert failure.detail
    return failure


class StoreContract:
    """The tests. A store that leases what it shows to exist sets ``leases``."""

    leases = False

    @pytest.fixture
    def prefix(self) -> str:
        return f"contract-{uuid.uuid4().hex}"

    async def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.max_value_bytes is None or store.max_value_bytes > 0
        assert (store.lease_seconds is not None) == self.leases

    async def test_what_was_put_exists_and_comes_back(self, store: Store, prefix: str) -> None:
        assert await store.exists([prefix]) == [False]
        assert await store.put([value(prefix, b"some bytes")]) == [None]
        assert await store.exists([prefix]) == [True]
        assert await read(store, prefix, 10) == b"some bytes"

    async def test_several_buffers_make_one_value(self, store: Store, prefix: str) -> None:
        assert await store.put([value(prefix, b"one ", b"two ", b"three")]) == [None]
        assert await read(store, prefix, 13) == b"one two three"
        room = Room(prefix, 2, 5, 6)
        assert await store.get([room.item]) == [None]
        assert room.pieces == [b"on", b"e two", b" three"]

    async def test_a_piece_without_bytes_adds_nothing(self, store: Store, prefix: str) -> None:
        assert await store.put([value(prefix, b"one", b"", b"two")]) == [None]
        room = Room(prefix, 0, 6, 0)
        assert await store.get([room.item]) == [None]
        assert room.content == b"onetwo"

    @pytest.mark.parametrize("pieces", [(), (b"",)])
    async def test_a_value_without_bytes_is_rejected(self, store: Store, prefix: str, pieces: tuple[bytes]) -> None:
        (failure,) = await store.put([value(prefix, *pieces)])
        assert failure is not None
        assert (failure.kind, failure.retriable) == ("rejected", False)
        assert await store.exists([prefix]) == [False]

    async def test_a_put_of_an_existing_key_keeps_its_value(self, store: Store, prefix: str) -> None:
        await store.put([value(prefix, b"first")])
        assert await store.put([value(prefix, b"other")]) == [None]
        assert await store.put([value(prefix, b"of another size")]) == [None]
        assert await read(store, prefix, 5) == b"first"

    @pytest.mark.parametrize("new", [b"other", b"of another size", b"s"])
    async def test_a_put_that_replaces_changes_the_value(self, store: Store, prefix: str, new: bytes) -> None:
        await store.put([value(prefix, b"first")])
        half = len(new) // 2
        assert await store.put([value(prefix, new[:half], new[half:], replace=True)]) == [None]
        assert await read(store, prefix, len(new)) == new

    async def test_a_leased_value_can_be_replaced(self, store: Store, prefix: str) -> None:
        await store.put([value(prefix, b"first")])
        assert await store.exists([prefix]) == [True]
        assert await read(store, prefix, 5) == b"first"
        assert await store.put([value(prefix, b"second", replace=True)]) == [None]
        assert await read(store, prefix, 6) == b"second"

    async def test_a_put_that_would_replace_nothing_writes(self, store: Store, prefix: str) -> None:
        assert await store.put([value(prefix, b"first", replace=True)]) == [None]
        assert await read(store, prefix, 5) == b"first"

    async def test_one_batch_writes_and_replaces(self, store: Store, prefix: str) -> None:
        keys = [f"{prefix}-{number}" for number in range(6)]
        await store.put([value(key, b"old") for key in keys[:4]])
        batch = [value(key, b"new", replace=number % 2 == 0) for number, key in enumerate(keys)]
        assert await store.put(batch) == [None] * 6
        assert [await read(store, key, 3) for key in keys] == [b"new", b"old", b"new", b"old", b"new", b"new"]

    @pytest.mark.parametrize("sizes", [(4,), (6,), (1,), (100_000,), (2, 2), (5, 1)])
    async def test_another_length_is_told(self, store: Store, prefix: str, sizes: tuple[int, ...]) -> None:
        await store.put([value(prefix, b"first")])
        (failure,) = await store.get([Room(prefix, *sizes).item])
        assert failure is not None
        assert (failure.kind, failure.retriable) == ("length", False)
        assert "5" in failure.detail
        assert str(sum(sizes)) in failure.detail
        assert await read(store, prefix, 5) == b"first"

    async def test_what_is_missing_is_told(self, store: Store, prefix: str) -> None:
        failure = await failure_of(store, prefix, 5)
        assert (failure.kind, failure.retriable) == ("missing", False)
        assert prefix in failure.detail

    async def test_nothing_asked_is_nothing_answered(self, store: Store) -> None:
        assert await store.exists([]) == []
        assert await store.put([]) == []
        assert await store.get([]) == []
        assert await store.remove([]) == []
        assert await store.remove([], force=True) == []

    @pytest.mark.parametrize("bad", ["duplicate", "empty", "no text"])
    async def test_keys_that_cannot_be_are_refused_before_anything_happens(
        self, store: Store, prefix: str, bad: str
    ) -> None:
        fine, there = f"{prefix}-fine", f"{prefix}-there"
        wrong: str = {"duplicate": fine, "empty": "", "no text": b"bytes"}[bad]  # type: ignore[assignment]
        await store.put([value(there, b"here")])
        with pytest.raises(InvalidRequestError):
            await store.put([value(fine, b"1"), value(there, b"new", replace=True), value(wrong, b"2")])
        room = Room(there, 4)
        with pytest.raises(InvalidRequestError):
            await store.get([room.item, Room(fine, 1).item, Room(wrong, 1).item])
        assert room.content == bytes(4)
        with pytest.raises(InvalidRequestError):
            await store.exists([there, fine, wrong])
        with pytest.raises(InvalidRequestError):
            await store.remove([there, fine, wrong], force=True)
        assert await store.exists([fine, there]) == [False, True]
        assert await read(store, there, 4) == b"here"

    async def test_answers_come_in_the_order_of_the_batch(self, store: Store, prefix: str) -> None:
        keys = [f"{prefix}-{number}" for number in range(12)]
        random.Random(1).shuffle(keys)
        there = set(keys[::3])
        assert await store.put([value(key, key.encode()) for key in keys if key in there]) == [None] * len(there)
        assert await store.exists(keys) == [key in there for key in keys]
        rooms = [Room(key, len(key) + (number == 3)) for number, key in enumerate(keys)]
        failures = await store.get([room.item for room in rooms])
        assert [failure and failure.kind for failure in failures] == [
            "length" if number == 3 else None if key in there else "missing" for number, key in enumerate(keys)
        ]
        assert [room.content.decode() for room, failure in zip(rooms, failures, strict=True) if not failure] == [
            key for number, key in enumerate(keys) if key in there and number != 3
        ]
        outcomes = await store.remove(keys, force=True)
        assert outcomes == [RemoveOutcome.REMOVED if key in there else RemoveOutcome.ABSENT for key in keys]
        assert await store.exists(keys) == [False] * len(keys)

    @pytest.mark.parametrize("key", ["zweiunddreißig-三十二-🌔", "a b/../c?d=e&f%00", "line\nline\ttab", "x" * 20_000])
    async def test_a_key_may_be_any_text(self, store: Store, prefix: str, key: str) -> None:
        key = prefix + key
        assert await store.put([value(key, b"bytes")]) == [None]
        assert await store.exists([key, key[:-1], key + "x"]) == [True, False, False]
        assert await read(store, key, 5) == b"bytes"
        assert await store.remove([key], force=True) == [RemoveOutcome.REMOVED]
        assert await store.exists([key]) == [False]

    async def test_a_value_may_be_large(self, store: Store, prefix: str) -> None:
        large = random.Random(2).randbytes(9 * MIB + 7)
        view = memoryview(large)
        pieces = (view[:1], view[1 : 5 * MIB], view[5 * MIB :])
        assert await store.put([PutItem(prefix, pieces), value(prefix + "small", b"s")]) == [None, None]
        room = Room(prefix, 3 * MIB, 6 * MIB + 7)
        assert await store.get([room.item, Room(prefix + "small", 1).item]) == [None, None]
        assert room.content == large

    async def test_a_batch_may_have_many_keys(self, store: Store, prefix: str) -> None:
        keys = [f"{prefix}-{number}" for number in range(5000)]
        assert await store.put([value(key, key.encode()) for key in keys[::2]]) == [None] * 2500
        assert await store.exists(keys) == [True, False] * 2500
        rooms = [Room(key, len(key)) for key in keys]
        failures = await store.get([room.item for room in rooms])
        assert [failure and failure.kind for failure in failures] == [None, "missing"] * 2500
        assert all(room.content == key.encode() for room, key in list(zip(rooms, keys, strict=True))[::2])
        assert await store.remove(keys, force=True) == [RemoveOutcome.REMOVED, RemoveOutcome.ABSENT] * 2500

    @pytest.mark.parametrize(
        "wrong",
        [memoryview(b"abcdef")[::2], memoryview(array("i", [1, 2, 3])), memoryview(b"constant")],
        ids=["strided", "wide", "read-only"],
    )
    async def test_memory_that_is_no_plain_bytes_is_refused(self, store: Store, prefix: str, wrong: memoryview) -> None:
        before = bytes(wrong)
        await store.put([value(prefix, b"new byte")])
        if not wrong.c_contiguous or wrong.itemsize > 1:
            with pytest.raises(InvalidBufferError):
                await store.put([PutItem(f"{prefix}-other", (wrong,))])
            assert await store.exists([f"{prefix}-other"]) == [False]
        with pytest.raises(InvalidBufferError):
            await store.get([GetItem(prefix, (wrong,))])
        assert bytes(wrong) == before

    async def test_parts_of_memory_are_enough(self, store: Store, prefix: str) -> None:
        memory = bytearray(b"0123456789")
        assert await store.put([PutItem(prefix, (memoryview(memory)[7:], memoryview(memory)[2:4]))]) == [None]
        memory[:] = bytes(10)  # the store has its own copy by now
        target = bytearray(b"..........")
        views = (memoryview(target)[1:3], memoryview(target)[6:9])
        assert await store.get([GetItem(prefix, views)]) == [None]
        assert target == b".78...923."

    async def test_a_removed_key_is_absent(self, store: Store, prefix: str) -> None:
        await store.put([value(prefix, b"first")])
        assert await store.remove([prefix, prefix + "other"]) == [RemoveOutcome.REMOVED, RemoveOutcome.ABSENT]
        assert await store.exists([prefix]) == [False]
        assert (await failure_of(store, prefix, 5)).kind == "missing"
        assert await store.remove([prefix]) == [RemoveOutcome.ABSENT]
        assert await store.put([value(prefix, b"again")]) == [None]
        assert await read(store, prefix, 5) == b"again"

    async def test_a_key_in_use_goes_by_force_alone_where_keys_are_leased(self, store: Store, prefix: str) -> None:
        await store.put([value(prefix, b"first")])
        assert await store.exists([prefix]) == [True]
        outcome = RemoveOutcome.LEASED if self.leases else RemoveOutcome.REMOVED
        assert await store.remove([prefix]) == [outcome]
        assert await store.exists([prefix]) == [self.leases]
        outcome = RemoveOutcome.REMOVED if self.leases else RemoveOutcome.ABSENT
        assert await store.remove([prefix], force=True) == [outcome]
        assert await store.exists([prefix]) == [False]

    @pytest.mark.parametrize(
        "name",
        [
            "plain",
            "a.b*c+?",
            "[x]{2}(y)|z^$\\d",
            "/",
            "zweiunddreißig-三十二-🌔",
            "line\nline\ttab\0",
            "m" * 2000,
            "." * 8000,
        ],
        ids=["plain", "signs", "brackets", "path", "unicode", "control", "long", "longest"],
    )
    async def test_all_keys_that_start_alike_go_and_no_others(self, store: Store, prefix: str, name: str) -> None:
        start = f"{prefix}-{name}@"
        gone = [start, *(f"{start}{number}" for number in range(40))]
        stay = [
            start[:-1],
            f"x{start}1",
            f"a\n{start}1",
            f"{prefix}-{name[:-1]}x@1",
            f"{prefix}-{name}x@1",
            f"{prefix}-" + "ab" * 5 + "@1",
        ]
        assert await store.put([value(key, b"bytes") for key in (*gone, *stay)]) == [None] * (len(gone) + len(stay))
        assert await store.remove_prefix(start) == len(gone)
        assert await store.exists([*gone, *stay]) == [False] * len(gone) + [True] * len(stay)
        assert await store.remove_prefix(start) == 0
        assert await store.remove(stay, force=True) == [RemoveOutcome.REMOVED] * len(stay)

    async def test_of_keys_that_start_alike_those_in_use_go_by_force_alone(self, store: Store, prefix: str) -> None:
        keys = [f"{prefix}-{number}" for number in range(3)]
        await store.put([value(key, b"first") for key in keys])
        await store.exists(keys[:1])
        left = int(self.leases)
        assert await store.remove_prefix(f"{prefix}-") == 3 - left
        assert await store.remove_prefix(f"{prefix}-", force=True) == left
        assert await store.exists(keys) == [False] * 3

    @pytest.mark.parametrize("wrong", ["", None, b"bytes", 1])
    async def test_a_prefix_is_text(self, store: Store, prefix: str, wrong: Any) -> None:
        await store.put([value(prefix, b"first")])
        with pytest.raises(InvalidRequestError, match="prefix"):
            await store.remove_prefix(wrong, force=True)
        assert await store.exists([prefix]) == [True]

    async def test_calls_may_run_side_by_side(self, store: Store, prefix: str) -> None:
        async def user(number: int) -> None:
            dice = random.Random(number)
            for turn in range(6):
                keys = [f"{prefix}-{number}-{turn}-{each}" for each in range(dice.randint(1, 9))]
                contents = [dice.randbytes(dice.randint(1, 20_000)) for _ in keys]
                assert await store.exists(keys) == [False] * len(keys)
                items = [value(key, content) for key, content in zip(keys, contents, strict=True)]
                assert await store.put(items) == [None] * len(keys)
                rooms = [Room(key, len(content)) for key, content in zip(keys, contents, strict=True)]
                failures, found = await asyncio.gather(store.get([room.item for room in rooms]), store.exists(keys))
                assert failures == [None] * len(keys)
                assert found == [True] * len(keys)
                assert [room.content for room in rooms] == contents
                assert await store.remove(keys, force=True) == [RemoveOutcome.REMOVED] * len(keys)

        await asyncio.gather(*(user(number) for number in range(16)))

    async def test_of_writers_at_the_same_time_one_wins(self, store: Store, prefix: str) -> None:
        contents = [bytes([number]) * 5000 for number in range(8)]
        answers = await asyncio.gather(*(store.put([value(prefix, content)]) for content in contents))
        # Who comes while another writes may be told so; nobody's bytes are mixed with another's.
        assert [None] in answers
        assert await read(store, prefix, 5000) in contents

    async def test_health_is_good(self, store: Store) -> None:
        assert await store.health() == Health(ok=True)

    async def test_after_closing_every_method_says_so(self, new_store: OpenStore, prefix: str) -> None:
        store = await new_store()
        assert await store.put([value(prefix, b"first")]) == [None]
        await store.aclose()
        await store.aclose()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.exists([prefix]),
            lambda: store.put([value(prefix, b"first")]),
            lambda: store.get([Room(prefix, 5).item]),
            lambda: store.remove([prefix]),
            lambda: store.exists([]),
            lambda: store.put([]),
            lambda: store.get([]),
            lambda: store.remove([]),
            lambda: store.remove_prefix(prefix),
            store.health,
        ]
        for call in calls:
            with pytest.raises(ClientClosedError):
                await call()
        await store.aclose()
