"""Slots and budgets: who waits, in which order they go, and that a cancellation stops nobody else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_sparse_client.data_plane.staging import Budget, Slot, StagingPool
from mooncake_sparse_client.errors import ClientClosedError, ConfigError, InvalidRequestError
from mooncake_sparse_client.stores.regions import HeapMemory, anonymous_pool

#: No deadline: a loaded machine is no failure. The same examples every time.
quick = settings(max_examples=60, deadline=None, derandomize=True)


def pool_of(nbytes: int) -> StagingPool:
    return StagingPool(HeapMemory().allocate(nbytes))


async def turns(count: int = 5) -> None:
    """Let whatever can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_slot_is_a_part_of_the_region() -> None:
    region = HeapMemory().allocate(1000)
    pool = StagingPool(region)
    async with pool.slot(100) as first, pool.slot(200) as second:
        assert [slot.nbytes for slot in (first, second)] == [100, 200]
        assert [slot.address - region.address for slot in (first, second)] == [0, 128]
        first.view[:] = b"1" * 100
        second.array[:] = 50
        assert bytes(region.view[:100]) + bytes(region.view[128:328]) == b"1" * 100 + b"2" * 200
        assert pool.free_bytes == 1000 - 128 - 256
        assert not pool.idle
    assert pool.idle
    assert pool.free_bytes == 1000
    slot = await pool.take(1000)
    assert (slot.nbytes, pool.free_bytes) == (1000, 0)


async def test_a_slot_is_given_back_once_and_to_its_own_pool() -> None:
    pool, other = pool_of(1000), pool_of(1000)
    slot = await pool.take(500)
    with pytest.raises(ValueError, match=rf"500 bytes at {slot.address:#x}.*not of this pool"):
        other.give_back(slot)
    pool.give_back(slot)
    same_place = await pool.take(500)
    assert same_place.address == slot.address
    with pytest.raises(InvalidRequestError, match="given back before"):
        pool.give_back(slot)
    assert not pool.idle
    pool.give_back(same_place)
    assert pool.idle
    assert other.idle


async def test_a_block_that_raises_gives_its_slot_back() -> None:
    pool, budget = pool_of(1000), Budget(1000)
    with pytest.raises(ZeroDivisionError):
        async with pool.slot(1000), budget.held(1000):
            raise ZeroDivisionError
    assert pool.idle
    assert budget.in_flight == 0


async def test_more_than_the_pool_has_is_refused_at_once() -> None:
    pool = pool_of(1000)
    slot = await pool.take(1000)
    with pytest.raises(InvalidRequestError, match=r"1001 bytes.*1000 bytes of staging"):
        await pool.take(1001)
    pool.give_back(slot)
    assert pool.idle


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, "1"])
async def test_a_slot_has_a_whole_number_of_bytes(nbytes: Any) -> None:
    with pytest.raises(InvalidRequestError, match="nbytes"):
        await pool_of(1000).take(nbytes)


async def test_a_budget_may_be_asked_for_nothing_and_only_for_whole_bytes() -> None:
    budget = Budget(10)
    await budget.take(0)
    budget.give_back(0)
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(InvalidRequestError, match="nbytes"):
            await budget.take(wrong)  # type: ignore[arg-type]
    for none in (0, -1, 1.5, None):
        with pytest.raises(ConfigError, match="total"):
            Budget(none)  # type: ignore[arg-type]


async def test_no_more_comes_back_to_a_budget_than_was_taken() -> None:
    budget = Budget(10)
    await budget.take(4)
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=rf"{wrong} bytes cannot come back, 4 are in flight"):
            budget.give_back(wrong)
    budget.give_back(4)
    with pytest.raises(InvalidRequestError):
        budget.give_back(1)


async def test_what_is_larger_than_the_budget_goes_alone() -> None:
    budget = Budget(10)
    await budget.take(1)
    order: list[int] = []

    async def go(nbytes: int) -> None:
        async with budget.held(nbytes):
            order.append(nbytes)
            await turns()
            assert budget.in_flight == nbytes or nbytes <= 10

    tasks = [asyncio.create_task(go(nbytes)) for nbytes in (100, 3, 4, 50)]
    await turns()
    assert order == []
    budget.give_back(1)
    await turns(2)
    assert (order, budget.in_flight) == ([100], 100)
    await asyncio.gather(*tasks)
    assert (order, budget.in_flight) == ([100, 3, 4, 50], 0)


async def test_a_budget_may_be_used_to_its_last_byte() -> None:
    budget = Budget(10)
    for nbytes in (4, 5, 1):
        await asyncio.wait_for(budget.take(nbytes), 5)
    assert budget.in_flight == 10
    eleventh = asyncio.create_task(budget.take(1))
    await turns()
    assert not eleventh.done()
    budget.give_back(5)
    await eleventh
    assert budget.in_flight == 6


class Room:
    """A pool or a budget of 1000 bytes as one thing to test, and who is in it."""

    def __init__(self, enter: Callable[[int], AbstractAsyncContextManager[object]], idle: Callable[[], bool]) -> None:
        self._enter = enter
        self.idle = idle
        self.order: list[object] = []
        self.inside: dict[object, int] = {}

    def task(self, name: object, nbytes: int, until: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
        async def go() -> None:
            async with self._enter(nbytes):
                self.order.append(name)
                self.inside[name] = nbytes
                assert sum(self.inside.values()) <= 1000
                try:
                    await until()
                finally:
                    del self.inside[name]

        return asyncio.create_task(go())


def staging_room() -> Room:
    pool = pool_of(1000)
    return Room(pool.slot, lambda: pool.idle)


def budget_room() -> Room:
    budget = Budget(1000)
    return Room(budget.held, lambda: budget.in_flight == 0)


each_room = pytest.mark.parametrize("make", [staging_room, budget_room])


@each_room
async def test_small_ones_do_not_overtake_a_large_one(make: Callable[[], Room]) -> None:
    room, leave = make(), asyncio.Event()
    first = room.task("first", 500, leave.wait)
    large = room.task("large", 600, turns)
    small = [room.task(number, 10, turns) for number in range(5)]
    await turns()
    late = room.task("late", 10, turns)
    await turns()
    assert room.order == ["first"]  # though there is room for all the small ones
    leave.set()
    await asyncio.gather(first, large, *small, late)
    assert room.order == ["first", "large", 0, 1, 2, 3, 4, "late"]
    assert room.idle()


@each_room
async def test_one_that_goes_lets_in_as_many_as_fit(make: Callable[[], Room]) -> None:
    room, leave, stay = make(), asyncio.Event(), asyncio.Event()
    tasks = [room.task("first", 1000, leave.wait)]
    tasks += [room.task(number, 192, stay.wait) for number in range(7)]
    await turns()
    leave.set()
    await turns(20)
    assert room.order == ["first", 0, 1, 2, 3, 4]
    stay.set()
    await asyncio.gather(*tasks)
    assert room.order == ["first", *range(7)]


@each_room
async def test_a_large_one_that_is_cancelled_lets_the_next_go(make: Callable[[], Room]) -> None:
    room, leave = make(), asyncio.Event()
    first = room.task("first", 500, leave.wait)
    large = room.task("large", 600, turns)
    small = room.task("small", 10, turns)
    await turns()
    large.cancel()
    await small
    assert room.order == ["first", "small"]
    assert large.cancelled()
    leave.set()
    await first
    assert room.idle()


@each_room
async def test_one_in_the_middle_that_is_cancelled_leaves_the_others(make: Callable[[], Room]) -> None:
    room, leave = make(), asyncio.Event()
    tasks = [room.task("first", 1000, leave.wait)] + [room.task(number, 1000, turns) for number in range(4)]
    await turns()
    tasks[2].cancel()
    await turns()
    assert room.order == ["first"]
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert room.order == ["first", 0, 2, 3]
    assert room.idle()


@each_room
async def test_one_cancelled_when_its_turn_has_come_passes_it_on(make: Callable[[], Room]) -> None:
    room, leave = make(), asyncio.Event()
    first = room.task("first", 1000, leave.wait)
    second = room.task("second", 1000, turns)
    third = room.task("third", 1000, turns)
    await turns()
    leave.set()
    while not first.done():
        await asyncio.sleep(0)
        if not room.inside and not second.done():
            second.cancel()  # it has its place, and does not know yet
    await third
    assert second.cancelled()
    assert room.order == ["first", "third"]
    assert room.idle()


@each_room
async def test_one_cancelled_in_the_moment_that_room_is_made(make: Callable[[], Room]) -> None:
    room, leave = make(), asyncio.Event()
    first = room.task("first", 1000, leave.wait)
    await turns()
    second, third = room.task("second", 1000, turns), room.task("third", 1000, turns)
    await turns()
    second.cancel()  # before it hears of that, ...
    first.cancel()  # ... the first one goes
    await third
    assert room.order == ["first", "third"]
    assert room.idle()


@each_room
async def test_who_waits_too_long_leaves_nothing(make: Callable[[], Room]) -> None:
    room, leave = make(), asyncio.Event()
    first = room.task("first", 1000, leave.wait)
    await turns()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.gather(*(room.task(number, 1000, turns) for number in range(3)))
    leave.set()
    await first
    assert room.order == ["first"]
    assert room.idle()


@each_room
@quick
@given(seed=st.integers(0, 1 << 30), crowd=st.integers(2, 60), loss=st.sampled_from([0.0, 0.2, 0.6]))
def test_any_crowd_gets_through_in_order(make: Callable[[], Room], seed: int, crowd: int, loss: float) -> None:
    """Random sizes, stays and cancellations: nobody is forgotten, nobody overtakes, and all comes back."""
    dice = random.Random(seed)

    async def scenario() -> None:
        room = make()
        tasks: list[asyncio.Task[None]] = []
        rounds = 0
        while len(tasks) < crowd or not all(task.done() for task in tasks):
            rounds += 1
            assert rounds < 100 * crowd, "somebody waits for ever"
            if len(tasks) < crowd and dice.random() < 0.6:
                nbytes = dice.choice([dice.randint(1, 1000), dice.randint(1, 100), 1000])
                stay = dice.randint(0, 6)
                tasks.append(room.task(len(tasks), nbytes, partial(turns, stay)))
            if tasks and dice.random() < loss:
                dice.choice(tasks).cancel()
            await asyncio.sleep(0)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(answer is None or isinstance(answer, asyncio.CancelledError) for answer in answers)
        assert room.order == [number for number in range(crowd) if number in room.order]
        assert set(room.order) >= {number for number, answer in enumerate(answers) if answer is None}
        assert room.idle()

    asyncio.run(scenario())


@quick
@given(seed=st.integers(0, 1 << 30))
def test_slots_never_overlap(seed: int) -> None:
    dice = random.Random(seed)
    region = HeapMemory().allocate(2000)

    async def scenario() -> None:
        pool = StagingPool(region)
        out: set[Slot] = set()

        async def use(nbytes: int, mark: int) -> None:
            async with pool.slot(nbytes) as slot:
                assert not any(
                    slot.address < other.address + other.nbytes and other.address < slot.address + slot.nbytes
                    for other in out
                )
                assert region.address <= slot.address <= slot.address + slot.nbytes <= region.address + 2000
                out.add(slot)
                slot.array[:] = mark
                await turns(dice.randint(0, 5))
                assert slot.array.tolist() == [mark] * nbytes
                out.remove(slot)

        await asyncio.gather(*(use(dice.randint(1, 900), number) for number in range(40)))
        assert pool.idle

    asyncio.run(scenario())


@each_room
def test_it_serves_one_event_loop_after_another(make: Callable[[], Room]) -> None:
    room = make()

    async def crowd() -> None:
        leave = asyncio.Event()
        tasks = [room.task(number, 700, leave.wait) for number in range(4)]
        await turns()
        tasks[2].cancel()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    for _ in range(3):
        asyncio.run(crowd())
        assert room.idle()
    assert room.order == [0, 1, 3] * 3


@each_room
async def test_room_that_is_there_is_had_without_waiting(make: Callable[[], Room]) -> None:
    room = make()
    task = room.task("first", 1000, turns)
    await asyncio.sleep(0)
    assert room.order == ["first"]
    await task


async def test_memory_that_was_let_go_of_is_free_once_the_last_slot_is_back() -> None:
    memory = anonymous_pool(1 << 16)
    pool = StagingPool(memory.allocate(1 << 15))
    slot = await pool.take(100)
    waiting = asyncio.create_task(pool.take(1 << 15))
    await asyncio.sleep(0)
    pool.close()
    assert memory.free_bytes == 1 << 15
    pool.give_back(slot)
    with pytest.raises(ClientClosedError):
        await waiting
    with pytest.raises(ClientClosedError):
        await pool.take(1)
    assert pool.idle
    del slot
    assert memory.free_bytes == 1 << 16
