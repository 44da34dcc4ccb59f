"""The parts of the data plane, each by itself: lane, claims, batches cut in parts, headers in rows, columns of jobs."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_sparse_client import GetItem, Limits, MemoryStore, PutItem
from mooncake_sparse_client.core.framing import HEADER_SIZE, ValueFormat, payload_checksum, unpack_header
from mooncake_sparse_client.data_plane import pacing
from mooncake_sparse_client.data_plane.batches import cut_batches
from mooncake_sparse_client.data_plane.claims import Claim, Claims
from mooncake_sparse_client.data_plane.lane import Batch, Lane
from mooncake_sparse_client.data_plane.pacing import paced
from mooncake_sparse_client.data_plane.transfer import Jobs, chosen, listed, runs_of
from mooncake_sparse_client.errors import ClientClosedError, StoreAnswerError, StoreError
from mooncake_sparse_client.stores.base import Failure, PlacedGets, PlacedPuts
from mooncake_sparse_client.stores.native_calls import ask_in_parts, in_parts
from mooncake_sparse_client.stores.wrapping import WrappedStore

#: No deadline: a loaded machine is no failure. The same examples every time.
quick = settings(max_examples=60, deadline=None, derandomize=True)

Answers = list[Failure | None]


async def turns(count: int = 8) -> None:
    """Let whatever can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


# A store that answers when it is told to ----------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One request. It ends at ``go``; once it is cancelled, at ``let_go``."""

    batch: Batch
    outcome: Answers | Exception
    go: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    over: bool = False


class HeldStore(WrappedStore):
    """Notes its requests and holds them, each until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.calls: list[Call] = []

    async def put(self, items: Sequence[PutItem]) -> Answers:
        assert isinstance(items, PlacedPuts)
        return await self._hold(items)

    async def get(self, items: Sequence[GetItem]) -> Answers:
        assert isinstance(items, PlacedGets)
        return await self._hold(items)

    async def _hold(self, batch: Batch) -> Answers:
        call = Call(batch, answers_to(batch))
        self.calls.append(call)
        try:
            await call.go.wait()
        except asyncio.CancelledError:
            call.cancelled = True
            await call.let_go.wait()
            if not isinstance(call.outcome, Exception):
                raise
        finally:
            call.over = True
        if isinstance(call.outcome, Exception):
            raise call.outcome
        return call.outcome

    @property
    def under_way(self) -> list[Call]:
        return [call for call in self.calls if not call.over]

    @property
    def keys(self) -> list[str]:
        """The keys of each request, in one word."""
        return ["".join(call.batch.keys) for call in self.calls]


def answers_to(batch: Batch) -> Answers:
    """One answer a key, that no other key gets, so that a mix-up shows; None for keys in capitals."""
    kind = type(batch).__name__
    return [None if key.isupper() else Failure(kind, False, key) for key in batch.keys]


_addresses = itertools.count(1 << 20, 1 << 10)


def puts(keys: str, pieces: int | None = None, size: int = 10, replace: str = "") -> PlacedPuts:
    """A batch with a value for each letter, of ``size`` bytes a piece."""
    return PlacedPuts(*columns(keys, pieces, size), frozenset(replace))


def gets(keys: str, pieces: int | None = None, size: int = 10) -> PlacedGets:
    return PlacedGets(*columns(keys, pieces, size))


def columns(keys: str, pieces: int | None, size: int) -> tuple[list[str], list[int], list[int], int, list[int] | None]:
    count = len(keys) * (pieces or 1)
    addresses = list(itertools.islice(_addresses, count))
    return list(keys), addresses, [size] * count, size * count, None if pieces is None else [pieces] * len(keys)


def values(batches: Iterable[Batch]) -> list[tuple[str, list[int], list[int], bool]]:
    """Key, addresses, sizes of each value, and whether it is replaced."""
    return [
        (key, addresses, sizes, isinstance(batch, PlacedPuts) and key in batch.replace)
        for batch in batches
        for key, addresses, sizes in zip(
            batch.keys, batch.by_value(batch.addresses), batch.by_value(batch.sizes), strict=True
        )
    ]


def lane_of(store: HeldStore, **limits: int) -> Lane:
    return Lane(store, Limits(**{"concurrency": 1, **limits}))


async def sent(lane: Lane, *batches: Batch) -> list[asyncio.Task[Answers]]:
    """The batches on their way, in this order."""
    tasks = [asyncio.create_task(lane.carry(batch)) for batch in batches]
    await turns()
    return tasks


async def finish(*calls: Call) -> None:
    for call in calls:
        call.go.set()
    await turns()


# The lane -----------------------------------------------------------------------------------------------------


async def test_a_batch_goes_at_once_and_as_it_is() -> None:
    store = HeldStore()
    batch = puts("abC", replace="b")
    (task,) = await sent(lane_of(store), batch)
    assert store.calls[0].batch is batch
    await finish(*store.calls)
    assert await task == answers_to(batch)
    assert (await task)[2] is None


async def test_requests_go_in_order_and_no_more_at_once_than_allowed() -> None:
    store = HeldStore()
    lane = lane_of(store, concurrency=2, max_batch_chunks=2)
    tasks = await sent(lane, *(gets(keys) for keys in ("ab", "cd", "ef", "g", "h", "ij")))
    assert store.keys == ["ab", "cd"]
    await finish(store.calls[1])
    assert store.keys == ["ab", "cd", "ef"]
    await finish(store.calls[0])
    assert store.keys == ["ab", "cd", "ef", "gh"]
    assert [task.done() for task in tasks] == [True, True, False, False, False, False]
    await finish(*store.under_way)
    assert store.keys[4:] == ["ij"]
    await finish(*store.under_way)
    assert [[answer.detail for answer in await task if answer] for task in tasks] == [
        ["a", "b"],
        ["c", "d"],
        ["e", "f"],
        ["g"],
        ["h"],
        ["i", "j"],
    ]


@pytest.mark.parametrize(
    ("limits", "waiting", "requests"),
    [
        ({}, [gets("a"), gets("bc"), gets("d")], ["abcd"]),
        ({"max_batch_chunks": 3}, [gets("ab"), gets("c"), gets("d")], ["abc", "d"]),
        ({"max_batch_bytes": 30}, [gets("ab"), gets("c"), gets("d")], ["abc", "d"]),
        ({"max_batch_bytes": 29}, [gets("ab"), gets("c"), gets("d")], ["ab", "cd"]),
        ({"max_batch_pieces": 6}, [gets("a", 4), gets("b", 2), gets("c")], ["ab", "c"]),
        ({"max_batch_pieces": 6}, [gets("a", 4), gets("bcd"), gets("e")], ["a", "bcde"]),
        # What is too large by itself goes alone: it was cut as small as it can be.
        ({"max_batch_bytes": 15}, [gets("a"), gets("b", size=99), gets("c", size=5)], ["a", "b", "c"]),
        ({"max_batch_pieces": 3}, [gets("a", 9), gets("b"), gets("c")], ["a", "bc"]),
        # A key stands in a request once, and nobody overtakes.
        ({}, [gets("ab"), gets("b")], ["ab", "b"]),
        ({}, [gets("ab"), gets("cb"), gets("d")], ["ab", "cbd"]),
        ({}, [gets("a"), gets("b"), gets("a"), gets("b")], ["ab", "ab"]),
        ({}, [puts("a"), puts("b"), gets("c"), gets("d"), puts("e")], ["ab", "cd", "e"]),
    ],
)
async def test_what_waits_travels_together_where_it_fits(
    limits: dict[str, int], waiting: list[Batch], requests: list[str]
) -> None:
    store = HeldStore()
    tasks = await sent(lane_of(store, **limits), gets("x"), *waiting)
    while store.under_way:
        await finish(*store.under_way)
    assert store.keys == ["x", *requests]
    assert [await task for task in tasks[1:]] == [answers_to(batch) for batch in waiting]


@pytest.mark.parametrize(
    "waiting",
    [
        [puts("ab"), puts("c")],
        [puts("ab", replace="a"), puts("cd"), puts("ef", replace="ef")],
        [puts("ab", 3, replace="b"), puts("c", replace="c"), puts("de", 1)],
        [puts("a"), puts("bc", 2)],
        [gets("ab"), gets("c", 2), gets("d", 1)],
        [gets("ab", 2), gets("c", 3)],
    ],
)
async def test_a_shared_request_has_everybodys_values(waiting: list[Batch]) -> None:
    store = HeldStore()
    await sent(lane_of(store), gets("x"), *waiting)
    await finish(*store.calls)
    _, call = store.calls
    assert type(call.batch) is type(waiting[0])
    assert values([call.batch]) == values(waiting)
    assert call.batch.nbytes == sum(call.batch.sizes) == sum(batch.nbytes for batch in waiting)
    # Without counts a store needs not look at pieces.
    assert (call.batch.counts is None) == all(batch.counts is None for batch in waiting)
    await finish(call)


async def test_who_waits_and_is_cancelled_is_dropped_at_once() -> None:
    store = HeldStore()
    tasks = await sent(lane_of(store, max_batch_chunks=2), *(gets(keys) for keys in ("x", "ab", "c", "d")))
    tasks[1].cancel()
    await turns()
    assert tasks[1].cancelled()
    await finish(*store.calls)
    assert store.keys == ["x", "cd"]
    await finish(*store.under_way)
    assert [await task for task in tasks[2:]] == [answers_to(gets("c")), answers_to(gets("d"))]


async def test_nothing_is_left_to_send_when_all_who_waited_are_gone() -> None:
    store = HeldStore()
    lane = lane_of(store)
    tasks = await sent(lane, gets("x"), gets("a"), gets("b"))
    for task in tasks[1:]:
        task.cancel()
    await turns()
    await finish(*store.calls)
    assert store.keys == ["x"]
    (again,) = await sent(lane, gets("c"))
    assert store.keys == ["x", "c"]
    await finish(*store.under_way)
    assert again.done()


async def test_a_cancelled_call_returns_when_the_store_has_let_go() -> None:
    store = HeldStore()
    task, waiting = await sent(lane_of(store), gets("a"), gets("b"))
    (call,) = store.calls
    for _ in range(3):  # also if it is cancelled again
        task.cancel()
        await turns()
        assert call.cancelled
        assert not task.done()
        assert store.keys == ["a"]
    call.let_go.set()
    await turns()
    assert task.cancelled()
    assert store.keys == ["a", "b"]
    await finish(*store.under_way)
    assert await waiting == answers_to(gets("b"))


async def test_a_cancelled_call_does_not_take_its_companions_along() -> None:
    store = HeldStore()
    _, first, second = await sent(lane_of(store), gets("x"), gets("ab"), gets("cd"))
    await finish(*store.calls)
    first.cancel()
    await turns()
    first.cancel()
    await turns()
    (call,) = store.under_way
    assert not call.cancelled
    assert not first.done()  # its memory is still being written to
    await finish(call)
    assert first.cancelled()
    assert await second == answers_to(gets("cd"))


async def test_when_all_have_left_the_store_is_told() -> None:
    store = HeldStore()
    _, *tasks = await sent(lane_of(store), gets("x"), puts("a"), puts("b"), puts("c"))
    await finish(*store.calls)
    (call,) = store.under_way
    for task in tasks:
        assert not call.cancelled
        task.cancel()
        await turns()
    assert call.cancelled
    assert not any(task.done() for task in tasks)
    call.let_go.set()
    await turns()
    assert all(task.cancelled() for task in tasks)


async def test_a_ride_that_is_left_says_what_still_touches_its_memory() -> None:
    store = HeldStore()
    lane = lane_of(store)
    first, second = lane.enter(gets("a")), lane.enter(gets("b"))
    await turns()
    assert second.under_way is None
    lane.leave(second)
    assert second.answer.cancelled()
    lane.leave(first)
    await turns()
    assert store.calls[0].cancelled
    task = first.under_way
    assert task is not None
    store.calls[0].let_go.set()
    await turns()
    assert task.cancelled()
    assert first.under_way is None
    assert first.answer.cancelled()
    assert store.keys == ["a"]


async def test_an_error_reaches_all_in_its_request_and_nobody_else() -> None:
    """And one that nobody waits for any more is no complaint in the log."""
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    store = HeldStore()
    lane = lane_of(store, concurrency=2, max_batch_chunks=2)
    *others, first, second, gone, last = await sent(lane, *(gets(keys) for keys in ("xX", "yY", "a", "b", "cd", "e")))
    await finish(*store.calls)
    assert store.keys == ["xX", "yY", "ab", "cd"]
    together, alone = store.under_way
    together.outcome, alone.outcome = StoreError("no"), StoreError("nor this")
    gone.cancel()
    await turns()
    await finish(together)
    heard = [first.exception(), second.exception()]
    assert [(type(error), str(error)) for error in heard] == [(StoreError, "no")] * 2
    assert heard[0] is not heard[1]  # whoever raises one adds to its traceback
    assert store.keys[4:] == ["e"]
    await finish(*store.under_way)
    alone.let_go.set()
    await turns()
    assert gone.cancelled()
    assert [await task for task in (*others, last)] == [answers_to(gets(keys)) for keys in ("xX", "yY", "e")]
    del first, second, gone, alone, together, heard
    store.calls.clear()
    gc.collect()
    assert unheard == []


class OddError(StoreError):
    """One that cannot be copied."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@pytest.mark.parametrize("error", [StoreError("no"), OddError(7, "no")])
async def test_an_error_comes_whole(error: StoreError) -> None:
    error.__cause__ = OSError("why")
    store = HeldStore()
    _, *tasks, last = await sent(lane_of(store, max_batch_chunks=2), gets("x"), gets("a"), gets("b"), gets("c"))
    await finish(*store.calls)
    store.calls[1].outcome = error
    await finish(store.calls[1])
    for task in tasks:
        with pytest.raises(type(error), match=r"^no$") as caught:
            await task
        assert caught.value.__cause__ is error.__cause__
        assert vars(caught.value) == vars(error)
        assert "_hold" in [entry.name for entry in caught.traceback]  # where the store raised it
    await finish(*store.under_way)
    assert await last == answers_to(gets("c"))


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_a_wrong_number_of_answers_is_nobodys(count: int) -> None:
    store = HeldStore()
    _, *tasks, last = await sent(lane_of(store, max_batch_chunks=3), gets("x"), gets("ab"), gets("c"), gets("d"))
    await finish(*store.calls)
    store.calls[1].outcome = [None] * count
    await finish(store.calls[1])
    for task in tasks:
        with pytest.raises(StoreAnswerError, match=f"{count} answers.*3 keys"):
            await task
    await finish(store.calls[2])
    assert await last == answers_to(gets("d"))


async def test_closing_refuses_what_waits_and_awaits_what_is_under_way() -> None:
    store = HeldStore()
    lane = lane_of(store)
    under_way, waiting, gone, also = await sent(lane, gets("a"), gets("b"), gets("c"), gets("d"))
    gone.cancel()
    closing = asyncio.create_task(lane.settle(60))
    await turns()
    for task in (waiting, also):
        with pytest.raises(ClientClosedError, match="closed during this call"):
            await task
    assert gone.cancelled()
    assert not closing.done()
    with pytest.raises(ClientClosedError, match="closed during this call"):
        await lane.carry(gets("e"))
    await finish(*store.calls)
    await closing
    assert await under_way == answers_to(gets("a"))
    assert store.keys == ["a"]


async def test_closing_waits_no_longer_than_it_may() -> None:
    store = HeldStore()
    lane = lane_of(store)
    (task,) = await sent(lane, gets("a"))
    await lane.settle(0)
    assert not task.done()
    assert not lane.idle
    await finish(*store.calls)
    assert await task == answers_to(gets("a"))
    assert lane.idle


async def test_an_idle_lane_is_closed_at_once() -> None:
    lane = lane_of(HeldStore())
    assert lane.idle
    await lane.settle(60)
    assert lane.idle


LIMITS = {"max_batch_bytes": 60, "max_batch_chunks": 4, "max_batch_pieces": 6}


def fit_together(batches: Sequence[Batch]) -> bool:
    keys = [key for batch in batches for key in batch.keys]
    return (
        len({type(batch) for batch in batches}) == 1
        and len(set(keys)) == len(keys) <= 4
        and sum(sum(batch.sizes) for batch in batches) <= 60
        and sum(len(batch.addresses) for batch in batches) <= 6
    )


class LaneModel:
    """What a lane does, said with lists."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.waiting: list[Batch] = []
        self.under_way: list[list[Batch]] = []
        self.requests: list[list[Batch]] = []
        self.left: list[Batch] = []

    def start(self) -> None:
        while self.waiting and len(self.under_way) < self.concurrency:
            riders = [self.waiting.pop(0)]
            while self.waiting and fit_together([*riders, self.waiting[0]]):
                riders.append(self.waiting.pop(0))
            self.under_way.append(riders)
            self.requests.append(riders)

    def enter(self, batch: Batch) -> None:
        self.waiting.append(batch)
        self.start()

    def finish(self, riders: list[Batch]) -> None:
        self.under_way.remove(riders)
        self.start()

    def leave(self, batch: Batch) -> None:
        self.left.append(batch)
        if batch in self.waiting:
            self.waiting.remove(batch)
        for riders in [riders for riders in self.under_way if all(rider in self.left for rider in riders)]:
            self.finish(riders)


batches = st.builds(
    lambda kind, keys, pieces, size: kind("".join(keys), pieces, size),
    st.sampled_from([puts, gets]),
    st.lists(st.sampled_from("abcdeFGH"), min_size=1, max_size=3, unique=True),
    st.sampled_from([None, None, 1, 2, 3]),
    st.integers(1, 12),
)
steps = st.one_of(batches, st.tuples(st.sampled_from(["finish", "leave"]), st.integers(0, 9)))


@settings(quick, max_examples=200)
@given(st.lists(steps, max_size=30), st.integers(1, 3))
def test_a_lane_does_what_its_model_does(steps: list[Batch | tuple[str, int]], concurrency: int) -> None:
    async def run() -> None:
        store, model = HeldStore(), LaneModel(concurrency)
        lane = lane_of(store, concurrency=concurrency, **LIMITS)
        tasks: dict[Batch, asyncio.Task[Answers]] = {}

        async def finish_one(number: int) -> None:
            call = store.under_way[number % len(store.under_way)]
            model.finish(next(riders for riders in model.under_way if values(riders) == values([call.batch])))
            await finish(call)

        for step in steps:
            if not isinstance(step, tuple):
                model.enter(step)
                (tasks[step],) = await sent(lane, step)
            elif step[0] == "finish" and store.under_way:
                await finish_one(step[1])
            elif step[0] == "leave" and (open_ones := [batch for batch, task in tasks.items() if not task.done()]):
                leaving = open_ones[step[1] % len(open_ones)]
                if leaving in model.left:
                    continue
                model.leave(leaving)
                tasks[leaving].cancel()
                await turns()
                for call in store.under_way:
                    if call.cancelled:
                        call.let_go.set()
                await turns()
            assert [values([call.batch]) for call in store.calls] == [values(riders) for riders in model.requests]
            assert len(store.under_way) == len(model.under_way) <= concurrency
        while store.under_way:
            await finish_one(0)
        for batch, task in tasks.items():
            assert task.cancelled() or await task == answers_to(batch)
        await lane.settle(0)

    asyncio.run(run())


# Claims -------------------------------------------------------------------------------------------------------


async def test_those_who_wait_for_a_key_are_told_key_by_key() -> None:
    claims: Claims = {}
    claim, other = Claim(claims, ["a", "b", "c"]), Claim(claims, ["x"])
    assert claims == {"a": claim, "b": claim, "c": claim, "x": other}
    one, two, three = (asyncio.create_task(claim.stored(keys)) for keys in (["a"], ["b", "a"], ["a", "b", "c"]))
    await turns()
    assert not one.done()
    claim.settle(["a", "x"], stored=True)  # the other's key is none of this claim's
    assert claims == {"b": claim, "c": claim, "x": other}
    await turns()
    assert await one == {"a"}
    assert not two.done()
    claim.settle(["b"], stored=False)
    await turns()
    assert await two == {"a"}
    assert not three.done()
    claim.settle(["c"], stored=True)
    assert await three == {"a", "c"}
    assert await claim.stored(["b", "c"]) == {"c"}  # without waiting
    other.settle(["x"], stored=True)
    assert claims == {}


async def test_what_is_given_up_was_not_stored() -> None:
    claims: Claims = {}
    claim = Claim(claims, ["a", "b", "c"])
    waiting = [asyncio.create_task(claim.stored(keys)) for keys in (["b"], ["a", "b", "c"], ["c"])]
    await turns()
    waiting[2].cancel()
    claim.settle(["a"], stored=True)
    await turns()
    claim.give_up()
    assert claims == {}
    assert [await task for task in waiting[:2]] == [set(), {"a"}]
    assert waiting[2].cancelled()


async def test_a_settled_key_is_another_claims_by_now() -> None:
    claims: Claims = {}
    first = Claim(claims, ["a", "b"])
    first.settle(["a"], stored=True)
    second = Claim(claims, ["a"])
    first.settle(["a"], stored=False)
    first.give_up()
    assert claims == {"a": second}
    assert await first.stored(["a", "b"]) == {"a"}
    second.give_up()
    second.give_up()
    assert claims == {}
    assert await second.stored(["a"]) == set()
    Claim(claims, []).give_up()
    assert claims == {}


# Batches in parts ---------------------------------------------------------------------------------------------


@st.composite
def placed(draw: st.DrawFn) -> PlacedPuts | PlacedGets:
    counts = draw(st.lists(st.integers(1, 6), max_size=12))
    single = draw(st.booleans())
    keys = [f"key{number}" for number in range(len(counts))]
    pieces = len(keys) if single else sum(counts)
    sizes = draw(st.lists(st.integers(0, 99), min_size=pieces, max_size=pieces))
    addresses = list(range(1000, 1000 + pieces))
    places = keys, addresses, sizes, sum(sizes), None if single else counts
    if draw(st.booleans()):
        return PlacedGets(*places)
    return PlacedPuts(*places, frozenset(draw(st.lists(st.sampled_from(keys)))) if keys else frozenset())


@quick
@given(placed(), st.integers(1, 12))
def test_a_batch_is_cut_into_parts_of_so_many_pieces(batch: PlacedPuts | PlacedGets, most: int) -> None:
    parts: list[PlacedPuts | PlacedGets] = list(in_parts(batch, most))  # type: ignore[type-var]
    assert values(parts) == values([batch])
    assert len(parts) == 1 or all(len(part) for part in parts)
    for part in parts:
        assert type(part) is type(batch)
        assert part.nbytes == sum(part.sizes)
        assert (part.counts is None) == (batch.counts is None)
        assert sum(part.counts or [1] * len(part)) == len(part.sizes) == len(part.addresses)
        assert len(part.sizes) <= most or len(part) == 1
    for part, following in itertools.pairwise(parts):
        assert len(part.sizes) + (following.counts or [1])[0] > most  # no part could have been larger
    if isinstance(batch, PlacedPuts):
        assert {part.replace for part in parts} == {batch.replace}  # type: ignore[union-attr]


def test_a_batch_that_need_not_be_cut_is_itself() -> None:
    batch = puts("abc", 2)
    for most in (None, 6, 7):
        (part,) = in_parts(batch, most)
        assert part is batch
    assert [part.keys for part in in_parts(batch, 5)] == [["a", "b"], ["c"]]


def test_a_value_of_more_pieces_than_allowed_goes_alone() -> None:
    batch = PlacedGets(list("abcd"), list(range(1, 10)), [1] * 9, 9, [1, 6, 1, 1])
    assert [(part.keys, part.addresses) for part in in_parts(batch, 3)] == [
        (["a"], [1]),
        (["b"], [2, 3, 4, 5, 6, 7]),
        (["c", "d"], [8, 9]),
    ]


@quick
@given(st.lists(st.integers(0, 6)), st.integers(1, 15), st.integers(1, 9), st.booleans(), st.sampled_from([1, 1 << 40]))
def test_batches_are_cut_as_one_would_by_hand(
    sizes: list[int], max_bytes: int, max_count: int, column: bool, unit: int
) -> None:
    sizes, max_bytes = [size * unit for size in sizes], max_bytes * unit
    expected: list[list[int]] = []
    for number, size in enumerate(sizes):
        last = expected[-1] if expected else []
        if last and len(last) < max_count and sum(sizes[each] for each in last) + size <= max_bytes:
            last.append(number)
        else:
            expected.append([number])
    cut = cut_batches(np.array(sizes, dtype=np.int64) if column else sizes, max_bytes=max_bytes, max_count=max_count)
    assert [list(batch) for batch in cut] == expected


# Headers in rows ----------------------------------------------------------------------------------------------

FRAMED = ValueFormat("framed", "0123456789abcdef")
NAMES = ["abcd.0", "abcd.1", "ef.7"]
SUMS = [0, (1 << 64) - 1, 0x0102030405060708]


@quick
@given(
    st.lists(st.tuples(st.text(), st.binary(min_size=24, max_size=24))),
    st.integers(0, 9),
    st.integers(0, (1 << 32) - 1),
)
def test_headers_are_the_header_row_by_row(chunks: list[tuple[str, bytes]], cut: int, group: int) -> None:
    payloads = [(memoryview(content)[:cut], memoryview(content)[cut:]) for _, content in chunks]
    rows = FRAMED.headers(group, [name for name, _ in chunks], list(map(payload_checksum, payloads)), 24)
    assert rows.shape == (len(chunks), HEADER_SIZE)
    for row, (name, _), payload in zip(rows, chunks, payloads, strict=True):
        assert row.tobytes() == FRAMED.header(group, name, payload)


def heads() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The headers of NAMES as they stand in memory: in front of payloads."""
    rows = np.full((len(NAMES), HEADER_SIZE + 40), 0xEE, dtype=np.uint8)
    rows[:, :HEADER_SIZE] = FRAMED.headers(3, NAMES, SUMS, 40)
    return rows[:, :HEADER_SIZE]


def checksum_field() -> list[int]:
    """Where a header differs from one of another checksum."""
    none, full = FRAMED.headers(3, [NAMES[0]] * 2, [0, (1 << 64) - 1], 40)
    return np.flatnonzero(none != full).tolist()


def test_intact_headers_promise_their_checksums() -> None:
    assert FRAMED.promised(heads(), 3, NAMES, 40) == SUMS
    assert [found and found.checksum for found in map(unpack_header, map(bytes, heads()))] == SUMS
    assert FRAMED.promised(heads()[:0], 3, [], 40) == []


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_header_with_one_changed_byte_promises_nothing(flip: int) -> None:
    field = checksum_field()
    assert len(field) == 8
    for position in range(HEADER_SIZE):
        rows = heads()
        rows[1, position] ^= flip
        promised = FRAMED.promised(rows, 3, NAMES, 40)
        changed = int.from_bytes(rows[1, field].tobytes(), "big") if position in field else None
        assert promised == [SUMS[0], changed, SUMS[2]], position


def test_headers_of_other_chunks_promise_nothing() -> None:
    nothing = [None, None, None]
    assert FRAMED.promised(heads(), 2, NAMES, 40) == nothing
    assert FRAMED.promised(heads(), 3, NAMES, 41) == nothing
    assert FRAMED.promised(heads(), 3, [NAMES[1], NAMES[0], NAMES[2]], 40) == [None, None, SUMS[2]]
    assert ValueFormat("framed", "ff" * 8).promised(heads(), 3, NAMES, 40) == nothing


# Columns of jobs ----------------------------------------------------------------------------------------------


def column(numbers: Iterable[int]) -> np.ndarray[Any, np.dtype[np.intp]]:
    return np.array(list(numbers), dtype=np.intp)


def jobs_of(groups: Sequence[int]) -> Jobs:
    """A job for each entry; chunks and keys tell them apart."""
    numbers = range(len(groups))
    return Jobs(column(groups), column(10 * n for n in numbers), [f"key{n}" for n in numbers], runs_of(column(groups)))


def rows_of(jobs: Jobs) -> list[tuple[int, int, str]]:
    """``(group, chunk, key)``, once its runs are seen to be right."""
    covered = [(group, number) for group, run in jobs.runs for number in range(len(jobs))[run]]
    assert covered == [(group, number) for number, group in enumerate(jobs.groups.tolist())]
    assert len(jobs.runs) == len(set(jobs.groups.tolist()))
    assert all(type(group) is int for group, _ in jobs.runs)
    return [(*where, key) for where, key in zip(jobs.where(), jobs.keys, strict=True)]


sorted_groups = st.lists(st.integers(0, 4), max_size=12).map(sorted)


@quick
@given(sorted_groups)
def test_runs_are_the_stretches_of_one_group(groups: list[int]) -> None:
    expected = []
    for group, run in itertools.groupby(range(len(groups)), groups.__getitem__):
        numbers = list(run)
        expected.append((group, slice(numbers[0], numbers[-1] + 1)))
    assert runs_of(column(groups)) == expected


@quick
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4))
def test_masks_choose_groups_and_chunks(choices: list[list[bool]]) -> None:
    masks = [np.array(mask, dtype=np.bool_) for mask in choices]
    expected = [(group, chunk) for group, mask in enumerate(choices) for chunk, take in enumerate(mask) if take]
    groups, chunks = chosen(masks)
    assert (groups.dtype, chunks.dtype) == (np.dtype(np.intp), np.dtype(np.intp))
    assert list(zip(groups.tolist(), chunks.tolist(), strict=True)) == expected
    assert listed(masks) == expected
    assert all(type(number) is int for where in listed(masks) for number in where)


@quick
@given(sorted_groups, st.data())
def test_some_of_the_jobs(groups: list[int], data: st.DataObject) -> None:
    jobs = jobs_of(groups)
    rows = rows_of(jobs)
    assert len(jobs) == len(rows) == len(groups)
    taken = [number for number in range(len(groups)) if data.draw(st.booleans())]
    assert rows_of(jobs.pick(column(taken))) == [rows[number] for number in taken]
    first = data.draw(st.integers(0, len(groups)))
    part = slice(first, data.draw(st.integers(first, len(groups))))
    assert rows_of(jobs.cut(part)) == rows[part]
    assert rows_of(jobs) == rows


def test_all_of_the_jobs_are_themselves() -> None:
    jobs = jobs_of([0, 0, 2])
    assert jobs.pick(column(range(3))) is jobs


# Turns --------------------------------------------------------------------------------------------------------


def test_paced_yields_everything_as_it_is_asked_for() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(5):
            taken.append(number)
            yield number

    work = paced(items())
    assert taken == []
    assert next(work) == 0
    assert taken == [0]
    assert list(work) == [1, 2, 3, 4]
    assert list(paced([])) == []


def test_others_get_the_interpreter_after_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test's own: an item takes two units of time, and a turn five."""
    clock = SimpleNamespace(now=0)
    pauses: list[int] = []
    seen: list[int] = []

    def sleep(seconds: float) -> None:
        assert seconds > 0
        pauses.append(len(seen))

    monkeypatch.setattr(pacing, "_TURN", 5)
    monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    for item in paced(range(10)):
        seen.append(item)
        clock.now += 2
    assert seen == list(range(10))
    assert pauses == [3, 6, 9]


class Answering:
    """A native store that answers a question for so many keys with these codes, call by call."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.asked: list[list[str]] = []

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.asked.append(keys)
        return [self.codes[len(self.asked) - 1]] * len(keys)


def test_a_long_question_goes_in_calls_of_some_60_kilobytes() -> None:
    keys = [f"{number:0600}" for number in range(250)]
    native = Answering(1, 0, 1)
    assert ask_in_parts(native, keys) == [1] * 100 + [0] * 100 + [1] * 50  # type: ignore[arg-type]
    assert [key for part in native.asked for key in part] == keys
    assert ask_in_parts(Answering(), []) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [-900, -901, -1])
def test_a_call_that_fails_is_the_last_of_its_question(code: int) -> None:
    """Each of the others would take as long: minutes, where a master is gone."""
    keys = [f"{number:0600}" for number in range(450)]
    native = Answering(1, code)
    assert ask_in_parts(native, keys) == [1] * 100 + [code] * 350  # type: ignore[arg-type]
    assert len(native.asked) == 2
    missing = Answering(-704, 0, -800, 1, 1)  # which is an answer for a key
    assert len(ask_in_parts(missing, keys)) == 450  # type: ignore[arg-type]
    assert len(missing.asked) == 5
