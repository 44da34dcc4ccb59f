"""Existence questions of concurrent callers: what travels together, and who is told what."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mooncake_sparse_client import (
    FullAttentionSpec,
    KVCacheLayout,
    Limits,
    MemoryStore,
    Resilience,
    SlidingWindowSpec,
    SparseStoreClient,
)
from mooncake_sparse_client.data_plane.questions import Questions
from mooncake_sparse_client.errors import ClientClosedError, StoreAnswerError, StoreTimeoutError, StoreUnavailableError
from mooncake_sparse_client.stores.wrapping import WrappedStore

FS = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32)])


class HeldStore(WrappedStore):
    """Has the keys in capitals. Each request ends when the test lets it."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.asked: list[list[str]] = []
        self.gates: list[asyncio.Event] = []
        self.cancelled = 0
        self.error: Exception | None = None
        self.short = False

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(list(keys))
        gate = asyncio.Event()
        self.gates.append(gate)
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [key.isupper() for key in keys][self.short :]

    @property
    def words(self) -> list[str]:
        return ["".join(keys) for keys in self.asked]


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def ask(questions: Questions, keys: str) -> asyncio.Task[Any]:
    return asyncio.create_task(questions.ask(list(keys)))


def said(answer: Any) -> str:
    return "".join("01"[bool(each)] for each in answer)


async def test_what_is_asked_at_one_moment_travels_together_each_key_once() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    tasks = [ask(questions, keys) for keys in ("aB", "Bc", "D")]
    await turns()
    assert store.words == ["aBcD"]
    store.gates[0].set()
    assert [said(answer) for answer in await asyncio.gather(*tasks)] == ["01", "10", "1"]


async def test_while_one_request_is_on_the_wire_the_next_gathers() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    first = ask(questions, "aB")
    await turns()
    later = [ask(questions, keys) for keys in ("aC", "Ca", "dE")]
    await turns()
    assert store.words == ["aB"]
    store.gates[0].set()
    assert said(await first) == "01"
    await turns()
    # What was on the wire when they came is asked again: it may have been written in between.
    assert store.words == ["aB", "aCdE"]
    store.gates[1].set()
    assert [said(answer) for answer in await asyncio.gather(*later)] == ["01", "10", "01"]


async def test_many_keys_travel_in_requests_side_by_side_and_in_order() -> None:
    store = HeldStore()
    questions = Questions(store, Limits(max_batch_keys=2000))
    letters = [f"{'K' if number % 3 else 'k'}{number}" for number in range(10_000)]
    task = asyncio.create_task(questions.ask(letters))
    await turns()
    assert [len(keys) for keys in store.asked] == [2000] * 4
    store.gates[2].set()
    await turns()
    assert [len(keys) for keys in store.asked] == [2000] * 5
    for gate in store.gates:
        gate.set()
    assert (await task).tolist() == [number % 3 > 0 for number in range(10_000)]
    assert [key for keys in store.asked for key in keys] == letters


async def test_a_slow_request_does_not_hold_up_the_next_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_sparse_client.data_plane.questions._PATIENCE", 0.001)
    store = HeldStore()
    questions = Questions(store, Limits())
    slow = ask(questions, "a")
    await turns()
    tasks = [ask(questions, keys) for keys in ("B", "Bc")]
    await turns()
    await asyncio.sleep(0.01)
    assert store.words == ["a", "Bc"]
    store.gates[1].set()
    assert [said(answer) for answer in await asyncio.gather(*tasks)] == ["1", "10"]
    assert not slow.done()
    for number in range(8):  # however many are slow, some wait
        tasks.append(ask(questions, "dEfGhIjK"[number]))
        await asyncio.sleep(0.005)
    assert store.words == ["a", "Bc", "d", "E", "f"]
    for _ in range(8):
        for gate in store.gates:
            gate.set()
        await turns()
    assert store.words == ["a", "Bc", "d", "E", "f", "GhIjK"]
    assert [said(answer) for answer in await asyncio.gather(slow, *tasks[2:])] == list("001010101")


async def test_small_questions_do_not_wait_for_large_ones() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    large = asyncio.create_task(questions.ask([f"k{number}" for number in range(1025)]))
    await turns()
    small = ask(questions, "aB")
    await turns()
    assert [len(keys) for keys in store.asked] == [1024, 1, 2]
    store.gates[2].set()
    assert said(await small) == "01"
    store.gates[0].set()
    store.gates[1].set()
    assert not (await large).any()


async def test_no_more_gathers_than_travels_in_a_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_sparse_client.data_plane.questions._MOST_KEYS", 3)
    monkeypatch.setattr("mooncake_sparse_client.data_plane.questions._BREATH", 2)
    store = HeldStore()
    questions = Questions(store, Limits())
    tasks = [ask(questions, keys) for keys in ("aB", "aB", "cD", "e")]
    for _ in range(4):
        await turns()
        for gate in store.gates:
            gate.set()
    assert [said(answer) for answer in await asyncio.gather(*tasks)] == ["01", "01", "01", "0"]
    assert store.words == ["aBcD", "e"]


async def test_where_requests_are_counted_there_are_few() -> None:
    store = HeldStore()
    questions = Questions(store, Limits(requests_per_second=5))
    task = asyncio.create_task(questions.ask([f"k{number}" for number in range(8192)]))
    await turns()
    assert [len(keys) for keys in store.asked] == [8192]
    store.gates[0].set()
    assert not (await task).any()


async def test_nothing_is_asked_for_nothing() -> None:
    store = HeldStore()
    assert (await Questions(store, Limits()).ask([])).tolist() == []
    await turns()
    assert store.asked == []


async def test_who_leaves_before_the_request_takes_their_keys_along() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    first, gone, stays = ask(questions, "A"), ask(questions, "xy"), ask(questions, "yZ")
    gone.cancel()
    await turns()
    assert store.words == ["AyZ"]
    store.gates[0].set()
    assert (said(await first), said(await stays)) == ("1", "01")
    assert gone.cancelled()


async def test_who_leaves_a_request_on_the_wire_does_not_disturb_the_others() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    gone, stays = ask(questions, "xY"), ask(questions, "Yz")
    await turns()
    gone.cancel()
    await turns()
    assert store.cancelled == 0
    store.gates[0].set()
    assert said(await stays) == "10"


async def test_what_nobody_waits_for_is_given_up_and_the_next_goes_on() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    first = [ask(questions, "xY"), ask(questions, "Yz")]
    await turns()
    later = ask(questions, "Qr")
    await turns()
    for task in first:
        task.cancel()
    await turns()
    assert (store.cancelled, store.words) == (1, ["xYz", "Qr"])
    store.gates[1].set()
    assert said(await later) == "10"


async def test_an_error_is_told_to_all_who_asked_each_its_own() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    tasks = [ask(questions, "a"), ask(questions, "b")]
    await turns()
    store.error = StoreUnavailableError("no master at 1.2.3.4")
    store.gates[0].set()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, StoreUnavailableError) for error in errors)
    assert [str(error) for error in errors] == ["no master at 1.2.3.4"] * 2
    assert errors[0] is not errors[1]
    store.error = None
    again = ask(questions, "A")
    await turns()
    store.gates[1].set()
    assert said(await again) == "1"


@pytest.mark.parametrize("count", [3, 3000])
async def test_too_few_answers_are_none(count: int) -> None:
    store = HeldStore()
    store.short = True
    task = asyncio.create_task(Questions(store, Limits()).ask([f"k{number}" for number in range(count)]))
    for _ in range(4):
        await turns()
        for gate in store.gates:
            gate.set()
    with pytest.raises(StoreAnswerError, match="answers came back for"):
        await task


async def test_closing_refuses_what_waits_and_waits_for_what_is_on_the_wire() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    first = ask(questions, "A")
    await turns()
    second = ask(questions, "B")
    await turns()
    closing = asyncio.create_task(questions.settle(30))
    await turns()
    assert not closing.done()
    with pytest.raises(ClientClosedError):
        await second
    with pytest.raises(ClientClosedError):
        await questions.ask(["c"])
    store.gates[0].set()
    assert said(await first) == "1"
    await closing
    assert store.words == ["A"]


async def test_closing_does_not_wait_for_ever() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    task = ask(questions, "A")
    await turns()
    await questions.settle(0.01)
    task.cancel()
    await turns()
    assert store.cancelled == 1


async def test_what_has_failed_is_let_go_of_without_a_garbage_collection() -> None:
    """An error that knew the question it answers would keep the caller's frames, and with them a client's memory."""

    class Anchor:
        pass

    async def ask_and_fail(questions: Questions, anchor: Anchor) -> None:
        with pytest.raises((StoreUnavailableError, ClientClosedError)):
            await questions.ask([str(anchor)])

    store = HeldStore()
    store.error = StoreUnavailableError("no master")
    gc.collect()
    gc.disable()
    try:
        questions = Questions(store, Limits())
        anchors = [Anchor() for _ in range(3)]
        alive = [weakref.ref(anchor) for anchor in anchors]
        tasks = [asyncio.create_task(ask_and_fail(questions, anchor)) for anchor in anchors[:2]]
        await turns()
        tasks.append(asyncio.create_task(ask_and_fail(questions, anchors[2])))  # which is refused when it is closed
        await turns(2)
        closing = asyncio.create_task(questions.settle(30))
        await turns()
        store.gates[0].set()
        await asyncio.gather(*tasks, closing)
        del tasks, anchors, closing
        await turns()
        alive.append(weakref.ref(questions))
        del questions
        assert [anchor() for anchor in alive] == [None] * 4
    finally:
        gc.enable()


async def test_very_many_may_leave_at_once() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    tasks = [ask(questions, letter) for letter in "abcdefghij" * 200]
    await turns()
    for task in tasks:
        task.cancel()
    await turns()
    assert all(task.cancelled() for task in tasks)
    assert (store.cancelled, len(store.asked)) == (1, 1)
    again = ask(questions, "A")
    await turns()
    store.gates[-1].set()
    assert said(await again) == "1"


async def test_where_requests_are_counted_patience_makes_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_sparse_client.data_plane.questions._PATIENCE", 0.001)
    store = HeldStore()
    questions = Questions(store, Limits(requests_per_second=5))
    tasks = [ask(questions, "a")]
    for letter in "bCd":
        await asyncio.sleep(0.005)
        tasks.append(ask(questions, letter))
    tasks.append(asyncio.create_task(questions.ask([f"k{number}" for number in range(2000)])))
    await turns()
    assert store.words == ["a"]
    store.gates[0].set()
    await turns()
    assert [len(keys) for keys in store.asked] == [1, 2003]
    store.gates[1].set()
    assert ["".join(said(answer))[:1] for answer in await asyncio.gather(*tasks)] == list("00100")


async def test_closing_takes_back_what_was_about_to_be_sent() -> None:
    store = HeldStore()
    questions = Questions(store, Limits())
    before = asyncio.all_tasks()
    task = ask(questions, "a")
    await asyncio.sleep(0)
    await questions.settle(1)
    with pytest.raises(ClientClosedError):
        await task
    await turns()
    assert store.asked == []
    assert asyncio.all_tasks() == before


# Through a client ---------------------------------------------------------------------------------------------


class SlowStore(WrappedStore):
    """Counts the keys that it is asked for, and takes a turn of the loop to answer."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.asked: list[list[str]] = []
        self.seconds = 0.0

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(list(keys))
        await asyncio.sleep(self.seconds)
        return await super().exists(keys)


def page(group: int, chunk: int) -> bytes:
    return random.Random(f"{group}/{chunk}").randbytes(FS.page_sizes[group])


async def test_many_lookups_of_shared_prefixes_cost_few_requests() -> None:
    store = SlowStore()
    async with SparseStoreClient(store, FS, model_name="m", retention_interval=None) as client:
        documents = [range(1000 * number, 1000 * number + 640) for number in range(5)]
        for document in documents:
            await client.put(client.sequence(document), page)
        store.asked.clear()
        prompts = [[*documents[number % 5], *range(10_000 + number, 10_100 + number)] for number in range(200)]
        hits = await asyncio.gather(*(client.lookup(client.sequence(prompt)) for prompt in prompts))
        assert {hit.hit_length for hit in hits} == {640}
        assert len(store.asked) <= 200 // 20
        assert max(Counter(key for keys in store.asked for key in keys).values()) == 1
        assert sum(hit.keys_asked for hit in hits) >= 10 * sum(map(len, store.asked))


async def test_what_was_put_is_found_whoever_asks_for_it_meanwhile() -> None:
    """A question that was sent before the put must not answer one that came after it."""
    store = SlowStore()
    store.seconds = 0.002
    async with SparseStoreClient(store, FS, model_name="m", retention_interval=None) as client:
        stop = False

        async def keep_asking() -> None:
            while not stop:
                await client.lookup(client.sequence(range(129)))

        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        for number in range(10):
            sequence = client.sequence(range(129), cache_salt=str(number))
            question = asyncio.create_task(client.lookup(sequence))
            await asyncio.sleep(0.001)
            await client.put(sequence, page)
            assert (await client.lookup(sequence)).hit_length == 128
            await question
        stop = True
        await asyncio.gather(*asking)


async def test_a_store_that_hangs_holds_up_nobody_beyond_their_own_time() -> None:
    store = HeldStore()
    patient = Resilience(breaker=False)
    async with SparseStoreClient(store, FS, model_name="m", timeout=0.05, resilience=patient) as client:
        with pytest.raises(StoreTimeoutError):
            await client.lookup(client.sequence(range(100)))
        await turns()
        assert store.cancelled == 1
        lookup = asyncio.create_task(client.lookup(client.sequence(range(100))))
        await turns()
        store.gates[-1].set()
        assert (await lookup).hit_length == 0


async def test_answers_of_a_question_are_its_own() -> None:
    store = SlowStore()
    questions = Questions(store, Limits(max_batch_keys=100))
    present = {f"k{number}" for number in range(0, 5000, 7)}

    async def exists(keys: Sequence[str]) -> list[bool]:
        await asyncio.sleep(0)
        return [key in present for key in keys]

    store.exists = exists  # type: ignore[method-assign]
    dice = random.Random(3)

    async def one() -> None:
        keys = [f"k{number}" for number in dice.sample(range(5000), dice.randrange(1, 1500))]
        answer = await questions.ask(keys)
        assert answer.dtype == np.bool_
        assert answer.tolist() == [key in present for key in keys]

    await asyncio.gather(*(one() for _ in range(60)))
