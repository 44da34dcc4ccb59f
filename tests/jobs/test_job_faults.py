"""Jobs over stores that fail, refuse and forget, and with producers that do not deliver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_ground import (
    LAYOUT,
    Leftovers,
    Told,
    Unhurried,
    a_corpus,
    by_definition,
    client_of,
    contents,
    run_job,
    same_contents,
    sums_hold,
)

from mooncake_sparse_client import (
    FullAttentionSpec,
    GetItem,
    KeySchema,
    KVCacheLayout,
    MemoryStore,
    PutItem,
    PutPlan,
    Resilience,
    SparseStoreClient,
    Tally,
    WrappedStore,
)
from mooncake_sparse_client.core.keys import KeyBuilder
from mooncake_sparse_client.errors import (
    ConfigError,
    InvalidRequestError,
    ProducerError,
    StoreRejectedError,
    StoreUnavailableError,
)
from mooncake_sparse_client.jobs import steady
from mooncake_sparse_client.jobs.job import PrecomputeJob
from mooncake_sparse_client.jobs.journal import Journal
from mooncake_sparse_client.jobs.numpy_producer import NumpyProducer
from mooncake_sparse_client.jobs.options import JobOptions
from mooncake_sparse_client.jobs.prompts import Prompt
from mooncake_sparse_client.jobs.putting import Putter
from mooncake_sparse_client.stores.base import Failure

PROMPTS = a_corpus(5, 40)
WANTED = by_definition(LAYOUT, PROMPTS, 0)
OPTIONS: dict[str, Any] = {"step_tokens": 16, "max_bytes_pending": 500}


class Troubled(WrappedStore):
    """From its call of number ``first`` on, for ``seconds``, it does what ``trouble`` says."""

    def __init__(self, inner: MemoryStore, first: int, seconds: float, trouble: Callable[[], object]) -> None:
        super().__init__(Unhurried(inner))
        self.calls, self._first, self._seconds, self._trouble = 0, first, seconds, trouble
        self._until: float | None = None

    async def _step(self) -> bool:
        """Whether there is trouble now."""
        self.calls += 1
        now = asyncio.get_running_loop().time()
        if self.calls == self._first:
            self._until = now + self._seconds
        return self._until is not None and now < self._until

    def _raise(self) -> None:
        trouble = self._trouble()
        if isinstance(trouble, Exception):
            raise trouble

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        if await self._step():
            self._raise()
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        if await self._step():
            self._raise()
            trouble = self._trouble()
            if isinstance(trouble, Failure):
                return [trouble for _ in items]
        return await super().put(items)

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        if await self._step():
            self._raise()
        return await super().get(items)


def unavailable() -> StoreUnavailableError:
    return StoreUnavailableError("the master does not answer")


def full() -> Failure:
    return Failure("full", True, "no room")


@pytest.mark.parametrize("first", [1, 7, 20, 40])
@pytest.mark.parametrize("resilience", [{}, {"resilience": Resilience(probe_seconds=0.05)}], ids=["once", "breaker"])
async def test_a_job_goes_on_after_an_outage(first: int, resilience: dict[str, Any]) -> None:
    store, told = MemoryStore(), Told()
    report = await run_job(Troubled(store, first, 0.3, unavailable), PROMPTS, client=resilience, watch=told, **OPTIONS)
    assert (report.status, report.chunks_written, report.rewritten.chunks) == ("done", len(WANTED), 0)
    sums_hold(report)
    assert report.seconds_waited > 0
    assert told.messages[0].endswith("; trying again for up to 600 s")
    assert "the master does not answer" in told.messages[0] or "down" in told.messages[0]
    assert told.messages[-1] == "going on"
    same_contents(await contents(store), WANTED)


@pytest.mark.parametrize("first", [1, 20])
def test_a_job_gives_up_on_a_longer_outage_and_is_resumed(first: int, tmp_path: Path) -> None:
    journal, leftovers = tmp_path / "journal", Leftovers()

    async def run() -> None:
        store = MemoryStore()
        down = Troubled(store, first, 60, unavailable)
        told = Told()
        report = await run_job(down, PROMPTS, patience_seconds=0.3, journal=journal, watch=told, **OPTIONS)
        assert [message for message in told.messages if message == "going on"] == []
        assert (report.status, report.message) == ("stopped", "the master does not answer")
        assert report.seconds_waited >= 0.3
        stored = len(store.keys())
        assert report.chunks_written <= stored  # what was written and could not be confirmed does not count
        rest = await run_job(store, PROMPTS, journal=journal, resume=True, **OPTIONS)
        assert (rest.status, rest.chunks_written) == ("done", len(WANTED) - stored)
        assert rest.rewritten.chunks == 0
        same_contents(await contents(store), WANTED)
        Leftovers.tasks()

    asyncio.run(run())
    leftovers.check()


async def test_a_store_that_is_full_for_a_while_is_waited_for() -> None:
    store, told = MemoryStore(), Told()
    troubled = Troubled(store, 15, 0.6, full)
    report = await run_job(troubled, PROMPTS, client={"timeout": 0.4}, watch=told, **OPTIONS)
    assert (report.status, report.chunks_written) == ("done", len(WANTED))
    assert report.seconds_waited > 0
    assert "it has no room; give it more memory, or let it evict" in told.messages[0]
    same_contents(await contents(store), WANTED)


async def test_a_store_that_stays_full_stops_a_job() -> None:
    store = MemoryStore()
    troubled = Troubled(store, 15, 60, full)
    report = await run_job(troubled, PROMPTS, client={"timeout": 0.2}, patience_seconds=0.2, **OPTIONS)
    assert report.status == "stopped"
    assert "it has no room" in report.message
    assert 0 < len(store.keys()) < len(WANTED)


async def test_a_store_that_refuses_for_good_stops_a_job_at_once() -> None:
    store, told = MemoryStore(), Told()
    troubled = Troubled(store, 15, 60, lambda: StoreRejectedError("it will never do"))
    report = await run_job(troubled, PROMPTS, watch=told, **OPTIONS)
    assert (report.status, report.message, report.seconds_waited) == ("stopped", "it will never do", 0)
    assert told.messages == []


def test_chunks_that_are_refused_for_good_are_missing_at_the_end(tmp_path: Path) -> None:
    some = set(random.Random(1).sample(sorted(WANTED), 5))
    options = {"journal": tmp_path / "journal", **OPTIONS}

    async def run() -> None:
        store = MemoryStore()
        report = await run_job(Refusing(store, some), PROMPTS, **options)
        assert (report.status, report.missing.chunks) == ("incomplete", 5)
        assert report.tokens_computed == report.tokens_distinct  # nothing was computed once more for them
        assert report.missing.bytes == sum(len(WANTED[key]) for key in some)
        same_contents(await contents(store), {key: value for key, value in WANTED.items() if key not in some})
        # They were never there: where another run finds room for them, nothing is written anew.
        rest = await run_job(store, PROMPTS, resume=True, **options)
        assert (rest.status, rest.chunks_written, rest.rewritten.chunks) == ("done", 5, 0)

    asyncio.run(run())


class Refusing(WrappedStore):
    """Takes all but some keys."""

    def __init__(self, inner: MemoryStore, refused: Collection[str]) -> None:
        super().__init__(inner)
        self._refused = refused

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        taken = [item for item in items if item.key not in self._refused]
        answers = iter(await super().put(taken))
        refusal = Failure("rejected", False, "not this one")
        return [refusal if item.key in self._refused else next(answers) for item in items]


async def test_a_stop_ends_the_wait_for_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "_FIRST_PAUSE", 600.0)
    store, told = MemoryStore(), Told()
    async with client_of(Troubled(store, 15, 60, unavailable)) as client:
        job = PrecomputeJob(client, NumpyProducer(LAYOUT), PROMPTS, JobOptions(**OPTIONS), watch=told)
        running = asyncio.create_task(job.run())
        while not told.messages:
            await asyncio.sleep(0.01)
        job.stop()
        assert (await running).status == "stopped"


class Slow(WrappedStore):
    """Its first calls take longer than a client waits."""

    def __init__(self, inner: MemoryStore, calls: int, seconds: float) -> None:
        super().__init__(inner)
        self._slow, self._seconds = calls, seconds

    async def _wait(self) -> None:
        self._slow -= 1
        if self._slow >= 0:
            await asyncio.sleep(self._seconds)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        await self._wait()
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        await self._wait()
        return await super().put(items)


@pytest.mark.parametrize("resilience", [{}, {"resilience": Resilience(probe_seconds=0.05)}], ids=["once", "breaker"])
async def test_calls_that_time_out_are_made_again(resilience: dict[str, Any]) -> None:
    store, told = MemoryStore(), Told()
    slow = Slow(store, 8, 0.3)
    report = await run_job(slow, PROMPTS, client={"timeout": 0.1, **resilience}, watch=told, **OPTIONS)
    assert (report.status, report.missing.chunks) == ("done", 0)
    assert report.seconds_waited > 0
    assert told.messages[-1] == "going on"
    same_contents(await contents(store), WANTED)


async def test_a_store_that_never_answers_stops_a_job() -> None:
    slow = Slow(MemoryStore(), 1 << 30, 60)
    report = await run_job(slow, PROMPTS, client={"timeout": 0.05}, patience_seconds=0.2, **OPTIONS)
    assert report.status == "stopped"
    assert "not done within 0.05 s" in report.message


# Stores that forget.


class Forgetful(WrappedStore):
    """At some of its puts it forgets some of what was there some puts ago."""

    def __init__(self, inner: MemoryStore, seed: int, puts: Collection[int]) -> None:
        super().__init__(inner)
        self._memory, self._dice, self._puts = inner, random.Random(seed), puts
        self._past: list[tuple[str, ...]] = []
        self.forgotten = 0

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self._past.append(self._memory.keys())
        if len(self._past) in self._puts:
            there = set(self._memory.keys())
            known = [key for key in self._past[-6] if key in there]
            gone = self._dice.sample(known, len(known) // 3)
            await self._memory.remove(gone)
            self.forgotten += len(gone)
        return await super().put(items)


@pytest.mark.parametrize("seed", range(4))
async def test_what_the_store_forgets_is_written_again(seed: int) -> None:
    memory = MemoryStore()
    store = Forgetful(memory, seed, {8, 10, 12})
    report = await run_job(store, PROMPTS, warm_states=seed)
    assert store.forgotten > 5
    assert (report.status, report.missing.chunks) == ("done", 0)
    sums_hold(report)
    assert report.chunks_written == len(WANTED) + store.forgotten
    assert report.rewritten.chunks == store.forgotten
    assert report.tokens_recomputed > 0
    assert report.passes >= 2
    same_contents(await contents(memory), WANTED)


class Sieve(WrappedStore):
    """Some keys are there once, when they are asked for, and then no more."""

    def __init__(self, inner: MemoryStore, doomed: Collection[str]) -> None:
        super().__init__(inner)
        self._doomed = doomed

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        answers = await super().exists(keys)
        await self.inner.remove([key for key in keys if key in self._doomed])
        return answers


async def test_what_the_store_always_loses_is_missing_at_the_end() -> None:
    memory = MemoryStore()
    doomed = set(random.Random(2).sample(sorted(WANTED), 6))
    report = await run_job(Sieve(memory, doomed), PROMPTS)
    assert (report.status, report.missing.chunks, report.passes) == ("incomplete", 6, 4)
    assert report.missing.bytes == sum(len(WANTED[key]) for key in doomed)
    assert report.message.startswith("6 chunks are still missing after 4 passes")
    assert report.rewritten.chunks >= 6
    same_contents(await contents(memory), {key: value for key, value in WANTED.items() if key not in doomed})


class LosingOnce(WrappedStore):
    """Loses a value as soon as it has said that it is there."""

    def __init__(self, inner: MemoryStore, key: str) -> None:
        super().__init__(inner)
        self._key = key

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        answers = await super().exists(keys)
        if self._key in keys:
            await self.inner.remove([self._key])
            self._key = ""
        return answers


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_what_is_lost_between_the_question_and_the_put_is_computed_too(lost: int) -> None:
    """The producer was not asked for it the first time: that is no reason to give it up."""
    store, ids = MemoryStore(), list(range(1, 41))
    await run_job(store, [ids])
    builder = KeyBuilder(LAYOUT, client_of(store).keys)
    keys = builder.own_keys(client_of(store).sequence(ids).block_hashes, 0, range(5))
    await store.remove([keys[0], keys[4]])
    report = await run_job(LosingOnce(store, keys[lost]), [ids])
    assert (report.status, report.chunks_written, report.passes) == ("done", 3, 4)
    sums_hold(report)
    same_contents(await contents(store), by_definition(LAYOUT, [Prompt(ids)], 0))


# Damage.


async def damage(store: MemoryStore, keys: Sequence[str]) -> None:
    """A byte of each, and the length of every third."""
    values = await contents(store, some=keys)
    for number, key in enumerate(keys):
        value = bytearray(64 + len(values[key]))
        await store.get([GetItem(key, (memoryview(value),))])
        value[-1 - number % 16] ^= 0x40
        changed = value[:-1] if number % 3 == 0 else value
        await store.put([PutItem(key, (memoryview(changed),), replace=True)])


def test_damage_is_found_by_reading_back_and_replaced(tmp_path: Path) -> None:
    store, journal = MemoryStore(), tmp_path / "journal"
    damaged = random.Random(3).sample(sorted(WANTED), 20)

    async def run() -> None:
        first = await run_job(store, PROMPTS, journal=journal)
        assert (first.status, first.chunks_written) == ("done", len(WANTED))
        clean = await run_job(store, PROMPTS, read_back=True)
        assert (clean.status, clean.tokens_computed, clean.chunks_written) == ("done", 0, 0)
        await damage(store, damaged)
        asked = await run_job(store, PROMPTS)
        assert (asked.status, asked.chunks_written) == ("done", 0)  # there it is, says the store
        report = await run_job(store, PROMPTS, journal=journal, resume=True, read_back=True)
        assert (report.status, report.chunks_written, report.rewritten.chunks) == ("done", 20, 20)
        sums_hold(report)
        same_contents(await contents(store), WANTED)

    asyncio.run(run())


# Producers that do not deliver.


class Clumsy(NumpyProducer):
    """Calls ``trip`` with each method's name and how often it has been called."""

    def __init__(self, trip: Callable[[str, int], object]) -> None:
        super().__init__(LAYOUT)
        self._trip, self._calls = trip, dict.fromkeys(("restore", "fork", "prefill"), 0)

    def _step(self, name: str) -> None:
        self._calls[name] += 1
        self._trip(name, self._calls[name])

    def restore(self, got: Any) -> Any:
        self._step("restore")
        return super().restore(got)

    def fork(self, state: Any) -> Any:
        self._step("fork")
        return super().fork(state)

    def prefill(self, state: Any, token_ids: Any, wanted: Any) -> Any:
        self._step("prefill")
        return super().prefill(state, token_ids, wanted)


@pytest.mark.parametrize(
    ("method", "call"), [("restore", 1), ("restore", 3), ("fork", 2), ("prefill", 1), ("prefill", 12), ("prefill", 22)]
)
def test_a_producers_error_comes_out_and_the_job_can_be_resumed(method: str, call: int, tmp_path: Path) -> None:
    leftovers, options = Leftovers(), {"journal": tmp_path / "journal", **OPTIONS, "warm_states": 2}

    def trip(name: str, number: int) -> None:
        if (name, number) == (method, call):
            raise RuntimeError("out of memory")

    async def run() -> None:
        store = MemoryStore()
        with pytest.raises(ProducerError, match="out of memory"):
            await run_job(Unhurried(store), PROMPTS, producer=Clumsy(trip), **options)
        Leftovers.tasks()
        stored = len(store.keys())
        rest = await run_job(store, PROMPTS, resume=True, **options)
        assert (rest.status, rest.chunks_written) == ("done", len(WANTED) - stored)
        same_contents(await contents(store), WANTED)

    asyncio.run(run())
    leftovers.check()


class Sparing(NumpyProducer):
    """Has every seventh chunk at hand only as ``give`` says."""

    def __init__(self, give: Callable[[Any], Any], *, called: bool) -> None:
        super().__init__(LAYOUT)
        self._give, self._called = give, called

    def prefill(self, state: Any, token_ids: Any, wanted: Any) -> Any:
        state, made = super().prefill(state, token_ids, wanted)
        found = {
            where: self._give(chunk) if self.spares(chunk) else chunk
            for where, chunk in made.items()
            if not self.spares(chunk) or self._give(chunk) is not None
        }
        return state, (lambda group, chunk: found.get((group, chunk))) if self._called else found

    @staticmethod
    def spares(chunk: Any) -> bool:
        return sum(bytes(chunk)) % 7 == 0


@pytest.mark.parametrize("called", [True, False])
async def test_chunks_that_a_producer_has_not_got_are_missing_at_the_end(called: bool) -> None:
    store = MemoryStore()
    report = await run_job(store, PROMPTS, producer=Sparing(lambda chunk: None, called=called), **OPTIONS)
    kept = {key: value for key, value in WANTED.items() if not Sparing.spares(value)}
    assert len(WANTED) - len(kept) > 5
    assert (report.status, report.missing.chunks) == ("incomplete", len(WANTED) - len(kept))
    assert "the producer does not deliver them" in report.message
    assert (report.chunks_written, report.rewritten.chunks) == (len(kept), 0)
    assert report.tokens_computed == report.tokens_distinct  # nothing was computed once more for them
    same_contents(await contents(store), kept)


@pytest.mark.parametrize("wrong", [lambda chunk: chunk[:-1], lambda chunk: np.append(chunk, chunk)])
def test_chunks_of_a_wrong_size_end_a_job(wrong: Callable[[Any], Any], tmp_path: Path) -> None:
    leftovers, options = Leftovers(), {"journal": tmp_path / "journal", **OPTIONS}

    async def run() -> None:
        store = MemoryStore()
        with pytest.raises(ProducerError):
            await run_job(store, PROMPTS, producer=Sparing(wrong, called=False), **options)
        Leftovers.tasks()
        assert (await run_job(store, PROMPTS, resume=True, **options)).status == "done"
        same_contents(await contents(store), WANTED)

    asyncio.run(run())
    leftovers.check()


class Partly(WrappedStore):
    """Goes away in the midst of its first puts: the first item is taken."""

    def __init__(self, inner: MemoryStore, puts: int) -> None:
        super().__init__(inner)
        self.puts = puts

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self.puts -= 1
        if self.puts < 0:
            return await super().put(items)
        await super().put(items[:1])
        raise unavailable()


async def test_what_an_earlier_attempt_has_written_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "_FIRST_PAUSE", 0.01)
    store, told = MemoryStore(), Told()
    report = await run_job(Partly(store, 4), PROMPTS, watch=told, **OPTIONS)
    assert told.messages[0].startswith("the master does not answer")
    assert (report.status, report.chunks_written, report.rewritten.chunks) == ("done", len(WANTED), 0)
    assert report.existing == Tally()  # it was empty when the job began
    sums_hold(report)
    same_contents(await contents(store), WANTED)


async def test_what_was_known_to_be_there_is_not_offered() -> None:
    """What lies between chunks that are missing."""
    store, ids = MemoryStore(), list(range(1, 41))
    await run_job(store, [ids])
    builder = KeyBuilder(LAYOUT, client_of(store).keys)
    keys = builder.own_keys(client_of(store).sequence(ids).block_hashes, 0, range(5))
    some = {keys[0], keys[2]}
    await store.remove(some)
    report = await run_job(Refusing(store, {keys[0]}), [ids])
    assert (report.status, report.missing.chunks, report.chunks_written) == ("incomplete", 1, 1)
    assert report.existing == Tally()


class Shared(WrappedStore):
    """Somebody else stores these values, right behind the first question."""

    def __init__(self, inner: MemoryStore, values: dict[str, bytes]) -> None:
        super().__init__(inner)
        self._values = dict(values)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        found = await super().exists(keys)
        for key, value in self._values.items():
            await self.inner.put([PutItem(key, (memoryview(value),))])
        self._values = {}
        return found


async def test_what_others_have_stored_meanwhile_counts_as_existing() -> None:
    first = MemoryStore()
    await run_job(first, PROMPTS)
    some = dict(list(first._values.items())[:5])
    report = await run_job(Shared(MemoryStore(), some), PROMPTS)
    sizes = [LAYOUT.page_sizes[int(key.partition("@group:")[2].partition("@")[0])] for key in some]
    assert (report.status, report.existing) == ("done", Tally(5, sum(sizes)))
    assert report.chunks_written == len(WANTED) - 5


async def test_a_store_that_takes_nothing_is_tried_by_few_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more wait for their turn, and would each lose patience by themselves."""
    monkeypatch.setattr(steady, "_FIRST_PAUSE", 0.01)

    tried, attempt = set(), Putter._attempt

    def noted(putter: Putter, sequence: Any, plan: PutPlan, offered: Any) -> Any:
        tried.add(plan.start_token)
        return attempt(putter, sequence, plan, offered)

    monkeypatch.setattr(Putter, "_attempt", noted)
    store = Troubled(MemoryStore(), 2, 60, full)  # from behind the first question on
    options = {"step_tokens": 16, "puts_at_once": 2, "patience_seconds": 0.1}
    report = await run_job(store, [list(range(160))], client={"timeout": 0.1}, **options)
    assert (report.status, report.tokens_computed) == ("stopped", 160)
    assert "it has no room" in report.message
    assert tried == {0, 16}


async def test_a_producers_error_leaves_what_was_computed_stored() -> None:
    """The store is slow, and all puts but the first are still waiting when the producer fails."""

    def trip(name: str, number: int) -> None:
        if (name, number) == ("prefill", 6):
            raise RuntimeError("out of memory")

    store = MemoryStore()
    with pytest.raises(ProducerError, match="out of memory"):
        await run_job(
            Slow(store, 1 << 30, 0.02), [[1] * 160], interval=None, producer=Clumsy(trip), step_tokens=8, puts_at_once=1
        )
    assert len(store.keys()) == 5 * 4  # one chunk of the full group, two of the window, a state


async def test_the_first_of_two_errors_of_a_producer_comes_out() -> None:
    class Wrong(Clumsy):
        def prefill(self, state: Any, token_ids: Any, wanted: Any) -> Any:
            state, found = super().prefill(state, token_ids, wanted)
            return state, {where: chunk[:-1] for where, chunk in found.items()}

    def trip(name: str, number: int) -> None:
        if (name, number) == ("prefill", 2):
            raise RuntimeError("out of memory")

    slow = Slow(MemoryStore(), 1 << 30, 0.02)
    with pytest.raises(ProducerError, match="out of memory"):
        await run_job(slow, [[1] * 160], interval=None, producer=Wrong(trip), step_tokens=8)


async def test_a_few_stretches_are_read_back_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each call has its time."""
    under_way, verify = list[int](), SparseStoreClient.verify
    most = 0

    async def counted(client: SparseStoreClient, *given: Any, **named: Any) -> Any:
        nonlocal most
        under_way.append(1)
        most = max(most, len(under_way))
        try:
            for _ in range(20):
                await asyncio.sleep(0)
            return await verify(client, *given, **named)
        finally:
            under_way.pop()

    monkeypatch.setattr(SparseStoreClient, "verify", counted)
    store, prompts = MemoryStore(), [[number] * 16 for number in range(1, 31)]
    await run_job(store, prompts)
    report = await run_job(store, prompts, read_back=True)
    assert (report.status, report.tokens_computed, most) == ("done", 0, 4)


def test_a_journal_that_is_gone_for_good_ends_a_job_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn record that cannot be taken back closes the journal."""
    leftovers, appended = Leftovers(), []
    append = Journal.append_done

    def close_at_the_second(journal: Journal, stretch: bytes, **figures: int) -> None:
        appended.append(stretch)
        if len(appended) == 2:
            journal.close()
            raise ConfigError("the disk is gone")
        append(journal, stretch, **figures)

    monkeypatch.setattr(Journal, "append_done", close_at_the_second)
    told = Told()
    report = asyncio.run(run_job(MemoryStore(), PROMPTS, journal=tmp_path / "journal", watch=told, **OPTIONS))
    assert (report.status, report.message) == ("stopped", "the disk is gone")
    assert "is closed" in told.messages[-1]
    leftovers.check()


# What is refused.


async def test_a_client_that_asks_for_other_ranks_keys_is_refused() -> None:
    """Those are never written, and the job would never be done."""
    keys = KeySchema("m", key_ranks=((0, 0, 0, 0), (1, 0, 0, 0)))
    with pytest.raises(ConfigError, match="make the client without key_ranks"):
        await run_job(MemoryStore(), PROMPTS, client={"keys": keys})


async def test_a_job_runs_once() -> None:
    async with client_of(MemoryStore()) as client:
        job = PrecomputeJob(client, NumpyProducer(LAYOUT), PROMPTS)
        await job.run()
        with pytest.raises(InvalidRequestError, match="a job runs once"):
            await job.run()


async def test_a_client_that_takes_an_outage_for_a_miss_is_refused() -> None:
    with pytest.raises(ConfigError, match="when_down='miss'"):
        await run_job(MemoryStore(), PROMPTS, client={"when_down": "miss"})


class Lending(SparseStoreClient):
    @property
    def lends_memory(self) -> bool:
        return True


async def test_memory_of_this_process_is_refused_unless_it_is_wanted() -> None:
    async with Lending(MemoryStore(), LAYOUT, model_name="m", retention_interval=0) as client:
        with pytest.raises(ConfigError, match="keep_in_process"):
            await PrecomputeJob(client, NumpyProducer(LAYOUT), PROMPTS).run()
        options = JobOptions(keep_in_process=True)
        assert (await PrecomputeJob(client, NumpyProducer(LAYOUT), PROMPTS, options).run()).status == "done"


async def test_another_layout_than_the_clients_is_refused() -> None:
    other = KVCacheLayout([FullAttentionSpec(8, page_size_bytes=48)])
    with pytest.raises(ConfigError, match="make the client with the producer's layout"):
        await run_job(MemoryStore(), PROMPTS, producer=NumpyProducer(other))


@pytest.mark.parametrize(("place", "says"), [("absent/journal", "cannot be opened"), (".", "is no file|directory")])
def test_a_journal_that_cannot_be_made_is_told_before_anything_is_done(place: str, says: str, tmp_path: Path) -> None:
    store, leftovers = MemoryStore(), Leftovers()
    with pytest.raises(ConfigError, match=says):
        asyncio.run(run_job(store, PROMPTS, journal=tmp_path / place))
    assert store.keys() == ()
    leftovers.check()


def test_a_journal_that_cannot_be_written_ends_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers, options, appended = Leftovers(), {"journal": tmp_path / "journal", **OPTIONS}, []
    append = Journal.append_done

    def fail_at_the_third(journal: Journal, stretch: bytes, **figures: int) -> None:
        appended.append(stretch)
        if len(appended) == 3:
            raise ConfigError("the disk is full")
        append(journal, stretch, **figures)

    monkeypatch.setattr(Journal, "append_done", fail_at_the_third)

    async def run() -> None:
        store = MemoryStore()
        report = await run_job(store, PROMPTS, **options)
        assert (report.status, report.message) == ("stopped", "the disk is full")
        assert len(store.keys()) < len(WANTED)  # not all of it was done in vain
        Leftovers.tasks()
        assert (await run_job(store, PROMPTS, resume=True, **options)).status == "done"
        same_contents(await contents(store), WANTED)

    asyncio.run(run())
    leftovers.check()


@pytest.mark.parametrize("resume", [True, False])
def test_the_journal_of_another_job_that_is_not_done_is_refused(resume: bool, tmp_path: Path) -> None:
    options, store = {"journal": tmp_path / "journal", **OPTIONS}, MemoryStore()

    async def run() -> None:
        rejecting = Troubled(store, 20, 60, lambda: StoreRejectedError("no"))
        assert (await run_job(rejecting, PROMPTS, **options)).status == "stopped"
        stored = store.keys()
        with pytest.raises(ConfigError, match="journal"):
            await run_job(store, PROMPTS, resume=resume, client={"model_name": "other"}, **options)
        assert set(store.keys()) == set(stored)
        assert (await run_job(store, PROMPTS, resume=True, **options)).status == "done"

    asyncio.run(run())


def test_what_the_store_lost_since_is_not_believed_to_be_there(tmp_path: Path) -> None:
    """A journal says what was stored, and the store what is."""
    store, journal = MemoryStore(), tmp_path / "journal"
    gone = random.Random(4).sample(sorted(WANTED), 30)

    async def run() -> None:
        await run_job(store, PROMPTS, journal=journal)
        await store.remove(gone)
        report = await run_job(store, PROMPTS, journal=journal, resume=True)
        assert (report.status, report.chunks_written, report.rewritten.chunks) == ("done", 30, 30)
        assert report.rewritten.bytes == sum(len(WANTED[key]) for key in gone)
        assert report.earlier.chunks_written == len(WANTED)
        same_contents(await contents(store), WANTED)

    asyncio.run(run())


async def test_damage_that_is_met_on_the_way_is_mended() -> None:
    store, beginning = MemoryStore(), list(range(1, 81))
    ids = [*beginning, *[91] * 24]
    await run_job(store, [beginning])
    await damage(store, store.keys())
    held = len(store.keys())
    report = await run_job(store, [beginning, ids])
    assert report.status == "done"
    sums_hold(report)
    # New are the longer prompt's own; what else was written stood there, as the job itself had seen.
    assert report.rewritten.chunks == report.chunks_written - (len(store.keys()) - held) > 0
    async with client_of(store) as client:
        assert (await client.get(client.sequence(ids))).hit_length == LAYOUT.hit_cap(len(ids))
    wanted = by_definition(LAYOUT, [Prompt(ids)], 0)
    same_contents(await contents(store, some=wanted), wanted)
