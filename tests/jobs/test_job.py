"""Whole jobs over stores in memory, against what a job must store by definition."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from job_ground import (
    LAYOUT,
    Contents,
    Ids,
    Leftovers,
    StrictProducer,
    Told,
    Unhurried,
    a_corpus,
    by_definition,
    can_restore,
    chunk_bytes,
    client_of,
    contents,
    distinct_tokens,
    group_of,
    prefix_sums,
    run_job,
    same_contents,
    sums_hold,
    undisturbed,
    with_pages,
)
from strategies import layouts, slower
from test_planning import random_corpus

from mooncake_sparse_client import (
    KVCacheLayout,
    MemoryStore,
    PutItem,
    SlidingWindowSpec,
    Tally,
    WrappedStore,
    layout_for,
    longest_usable_prefix,
    store_mask,
)
from mooncake_sparse_client.cli.trace import TRACE_BLOCK, Request, make_workload, read_trace
from mooncake_sparse_client.core.keys import KeyBuilder
from mooncake_sparse_client.errors import ConfigError, InvalidTokensError
from mooncake_sparse_client.jobs import visiting, walking
from mooncake_sparse_client.jobs.corpus import read_corpus
from mooncake_sparse_client.jobs.job import PrecomputeJob
from mooncake_sparse_client.jobs.journal import Journal
from mooncake_sparse_client.jobs.numpy_producer import NumpyProducer
from mooncake_sparse_client.jobs.options import JobOptions
from mooncake_sparse_client.jobs.planning import JobPlanner
from mooncake_sparse_client.jobs.prompts import Prompt, WrongLine
from mooncake_sparse_client.jobs.report import JobReport
from mooncake_sparse_client.jobs.running import JobRun
from mooncake_sparse_client.jobs.sharding import Shard
from mooncake_sparse_client.jobs.states import WarmStates
from mooncake_sparse_client.jobs.verifying import verify_corpus
from mooncake_sparse_client.stores.base import Failure

TRACES = os.environ.get("MOONCAKE_SPARSE_TRACES")  # now: a test's own environment has no such settings


@dataclasses.dataclass(frozen=True)
class Case:
    """One corpus, and how a job goes about it."""

    layout: KVCacheLayout
    prompts: list[Prompt]
    interval: int | None
    options: dict[str, Any]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = with_pages(draw(layouts()), draw(st.integers(0, 99)))
    assume(can_restore(layout))
    size, seed = layout.alignment, draw(st.integers(0, 2**32))
    dice = random.Random(seed)
    salted = draw(st.booleans())
    prompts = [
        Prompt(ids, cache_salt=dice.choice([None, "a", "b"]) if salted else None) for ids in random_corpus(dice, layout)
    ]
    options = {
        "step_tokens": draw(st.sampled_from([1, size, 2 * size, 4096])),
        "warm_states": draw(st.sampled_from([0, 1, 4])),
        "puts_at_once": draw(st.integers(1, 4)),
        "max_bytes_pending": draw(st.sampled_from([1, 64, 1000, 1 << 20])),
    }
    times = draw(st.sampled_from([0, 0, None, 1, 2, 5]))
    return Case(layout, prompts, None if times is None else times * size, options, seed)


async def hits_are_longest(store: MemoryStore, case: Case) -> None:
    """Every prompt, sent again, hits what it would if no chunk of its whole blocks had been left out."""
    layout = case.layout
    if any(spec.eagle and not spec.window_chunks for spec in layout.groups if isinstance(spec, SlidingWindowSpec)):
        return  # draft layers that need no chunk: puts keep a step back what hits do not need to
    async with client_of(store, layout, case.interval) as client:
        for prompt in case.prompts:
            tokens = len(prompt.token_ids)
            whole = [np.ones(layout.align(tokens) // spec.block_size, dtype=np.bool_) for spec in layout.groups]
            hit = await client.lookup(client.sequence(prompt.token_ids, cache_salt=prompt.cache_salt))
            assert hit.hit_length == longest_usable_prefix(layout, tokens, whole)


async def job(case: Case, store: MemoryStore) -> JobReport:
    unhurried = Unhurried(store, case.seed)
    return await run_job(unhurried, case.prompts, case.layout, case.interval, **case.options)


@given(cases())
@slower
def test_a_job_stores_what_its_prompts_want_and_computes_each_block_once(case: Case) -> None:
    async def run() -> None:
        store, layout, size = MemoryStore(), case.layout, case.layout.alignment
        wanted = by_definition(layout, case.prompts, case.interval)
        report = await job(case, store)
        same_contents(await contents(store, layout), wanted)

        assert (report.status, report.message, report.missing.chunks) == ("done", "", 0)
        sums_hold(report)
        lengths = [len(prompt.token_ids) for prompt in case.prompts]
        assert (report.prompts, report.tokens_total) == (len(lengths), sum(lengths))
        assert report.tokens_unstored == sum(length % size for length in lengths)
        assert report.tokens_distinct == distinct_tokens(layout, case.prompts)
        assert report.chunks_written == len(wanted)
        assert report.bytes_written == sum(map(len, wanted.values()))
        assert (report.rewritten.chunks, report.passes) == (0, 2 if wanted else 1)
        if not layout.use_eagle and case.options["warm_states"]:
            assert report.tokens_computed <= report.tokens_distinct
        await hits_are_longest(store, case)

        again = await job(case, store)
        assert (again.status, again.tokens_computed, again.chunks_written, again.passes) == ("done", 0, 0, 1)
        assert again.tokens_skipped == again.tokens_distinct == report.tokens_distinct
        same_contents(await contents(store, layout), wanted)

    asyncio.run(run())


def most_to_compute(case: Case, present: set[str], builder: Any) -> int:
    """Tokens from the first chunk that is missing in each stretch to its end."""
    layout, total = case.layout, 0
    with read_corpus(case.prompts, layout, builder.hasher) as corpus:
        planner = JobPlanner(corpus.tree, case.interval)
        for stretch in corpus.tree.stretches():
            hashes, firsts = corpus.sequence(stretch).block_hashes, []
            for group, mask in enumerate(planner.plan(stretch).store_masks):
                chunks = np.flatnonzero(mask).tolist()
                keys = KeyBuilder(layout, builder.keys).own_keys(hashes, group, chunks)
                firsts += [
                    layout.align(chunk * layout.groups[group].block_size)
                    for key, chunk in zip(keys, chunks, strict=True)
                    if key not in present
                ]
            total += stretch.end * layout.alignment - min(firsts) if firsts else 0
    return total


@given(cases(), st.floats(0, 1))
@slower
def test_what_is_there_already_is_not_computed(case: Case, share: float) -> None:
    store, layout = MemoryStore(), case.layout
    wanted = by_definition(layout, case.prompts, case.interval)
    gone = random.Random(case.seed).sample(sorted(wanted), round(share * len(wanted)))
    most = most_to_compute(case, wanted.keys() - set(gone), client_of(store, layout, case.interval))

    async def run() -> None:
        await job(case, store)
        await store.remove(gone)
        report = await job(case, store)
        same_contents(await contents(store, layout), wanted)
        assert (report.status, report.chunks_written) == ("done", len(gone))
        sums_hold(report)
        assert report.tokens_computed - report.tokens_recomputed <= report.tokens_distinct
        assert bool(report.tokens_computed) == bool(gone)
        if case.interval is None and not layout.use_eagle:
            assert report.tokens_computed == most
        await hits_are_longest(store, case)

    asyncio.run(run())


# A trace.


@dataclasses.dataclass(slots=True)
class Node:
    """A trie over a trace's own block ids."""

    behind: dict[int, Node] = dataclasses.field(default_factory=dict)


def trie_of(requests: Sequence[Request]) -> tuple[Node, int]:
    """And how many blocks there are, each prefix once."""
    root, nodes = Node(), 0
    for request in requests:
        at = root
        for block in request.block_ids:
            nodes += block not in at.behind
            at = at.behind.setdefault(block, Node())
    return root, nodes


def partings(root: Node, request: Request) -> list[int]:
    """Tokens at which others part from the request."""
    found, at = [], root
    for depth, block in enumerate(request.block_ids, 1):
        at = at.behind[block]
        if len(at.behind) > 1:
            found.append(depth * TRACE_BLOCK)
    return found


def requests_of(source: str) -> list[Request]:
    if source == "made":
        return make_workload(60)
    if not TRACES:
        pytest.skip("MOONCAKE_SPARSE_TRACES does not name a folder with the public Mooncake traces")
    return read_trace(Path(TRACES, "conversation_trace.jsonl"), 2000)


def with_tails(requests: Sequence[Request], layout: KVCacheLayout) -> list[np.ndarray[Any, Any]]:
    """The requests' whole blocks; every third with a few tokens behind that make no block."""
    dice, found = np.random.default_rng(1), []
    for number, request in enumerate(requests):
        more = dice.integers(1, layout.alignment) if number % 3 == 0 or not request.block_ids else 0
        found.append(np.concatenate([request.token_ids(), dice.integers(0, 1 << 20, more)]))
    return found


@pytest.mark.parametrize("source", ["made", "conversation"])
def test_a_trace_is_computed_once_and_hit_as_far_as_may_be(source: str) -> None:
    layout, requests = layout_for("deepseek-v4", scale=1 / 4096), requests_of(source)
    assert TRACE_BLOCK % layout.alignment == 0
    root, blocks = trie_of(requests)
    prompts = with_tails(requests, layout)

    async def run() -> None:
        store = MemoryStore()
        report = await run_job(store, prompts, layout)
        assert report.status == "done"
        sums_hold(report)
        assert report.tokens_distinct == report.tokens_computed == blocks * TRACE_BLOCK
        assert report.prompts == len(prompts)
        async with client_of(store, layout) as client:
            builder = KeyBuilder(layout, client.keys)
            wanted: list[set[str]] = [set() for _ in layout.groups]
            checked = Contents()
            for number, (request, ids) in enumerate(zip(requests, prompts, strict=True)):
                sequence = client.sequence(ids)
                hit = await client.lookup(sequence)
                assert hit.hit_length == layout.hit_cap(len(ids))
                masks = store_mask(
                    layout,
                    layout.align(len(ids)),
                    retention_interval=0,
                    num_prompt_tokens=len(ids),
                    boundaries=partings(root, request),
                )
                sums = prefix_sums(ids.tolist()) if number % 100 == 0 else []
                for group, mask in enumerate(masks):
                    chunks = np.flatnonzero(mask).tolist()
                    keys = builder.own_keys(sequence.block_hashes, group, chunks)
                    wanted[group].update(keys)
                    if sums:
                        checked |= {
                            key: chunk_bytes(layout, sums, group, chunk)
                            for key, chunk in zip(keys, chunks, strict=True)
                        }
        assert set(store.keys()) == set().union(*wanted)
        for group, keys in enumerate(wanted):
            written = report.groups[group].written.values()
            assert sum(tally.chunks for tally in written) == len(keys)
            assert sum(tally.bytes for tally in written) == len(keys) * layout.page_sizes[group]
        found = await contents(store, layout, checked)
        same_contents(found, checked)

    asyncio.run(run())


# Parts.


async def together(
    store: MemoryStore,
    prompts: Sequence[Prompt],
    shards: Sequence[Shard],
    layout: KVCacheLayout = LAYOUT,
    interval: int | None = 0,
    **options: Any,
) -> JobReport:
    reports = await asyncio.gather(
        *(
            run_job(Unhurried(store, number), prompts, layout, interval, shard=shard, **options)
            for number, shard in enumerate(shards)
        )
    )
    for report in reports:
        assert report.status == "done"
        sums_hold(report)
    return JobReport.of_parts(reports)


SUMMED = ("prompts", "tokens_total", "tokens_distinct", "tokens_reused", "tokens_unstored", "bytes_written")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("warm_states", [0, 4])
async def test_parts_that_run_together_do_what_one_job_does(seed: int, warm_states: int) -> None:
    prompts = a_corpus(seed, 25)
    alone, wanted = await undisturbed(prompts)
    store = MemoryStore()
    shards = [Shard(number, 3) for number in (1, 2, 3)]
    report = await together(store, prompts, shards, warm_states=warm_states, step_tokens=16)
    same_contents(await contents(store), wanted)
    sums_hold(report)
    assert [getattr(report, name) for name in SUMMED] == [getattr(alone, name) for name in SUMMED]
    assert report.chunks_written == len(wanted)
    if warm_states:
        assert report.tokens_computed == report.tokens_distinct


@given(cases(), st.integers(1, 4), st.booleans())
@slower
def test_parts_of_any_corpus_add_up_to_all_of_it(case: Case, count: int, apart: bool) -> None:
    async def run() -> None:
        store, layout = MemoryStore(), case.layout
        shards = [Shard(number, count, trunk_apart=apart) for number in range(0 if apart else 1, count + 1)]
        async with asyncio.timeout(60):  # nobody waits for what never comes
            report = await together(store, case.prompts, shards, layout, case.interval, **case.options)
        same_contents(await contents(store, layout), by_definition(layout, case.prompts, case.interval))
        sums_hold(report)
        lengths = [len(prompt.token_ids) for prompt in case.prompts]
        assert (report.prompts, report.tokens_total) == (len(lengths), sum(lengths))
        assert report.tokens_distinct == distinct_tokens(layout, case.prompts)
        if not layout.use_eagle and case.options["warm_states"]:
            assert report.tokens_computed <= report.tokens_distinct

    asyncio.run(run())


#: Eight branches on one trunk; part 1 of two has the trunk and three of them, since that is half of all tokens.
BRANCHES = [Prompt([1] * 64 + [number] * 32) for number in range(2, 10)]


async def test_a_part_counts_what_is_its_own_and_waits_for_the_trunk_that_is_not() -> None:
    store, told = MemoryStore(), Told()
    running = asyncio.create_task(run_job(store, BRANCHES, shard=Shard(2, 2), watch=told))
    while not told.messages:
        await asyncio.sleep(0.01)
    assert told.messages == ["waiting for part 1 to store what the parts share"]
    assert store.keys() == ()
    first = await run_job(store, BRANCHES, shard=Shard(1, 2))
    second = await running
    assert (first.tokens_computed, second.tokens_computed) == (64 + 3 * 32, 5 * 32)
    assert (first.part, second.part) == ("1/2", "2/2")
    assert (first.prompts, second.prompts) == (3, 5)
    assert second.tokens_restored == 64  # once, for five branches
    assert told.total == second.tokens_distinct == 5 * 32
    same_contents(await contents(store), (await undisturbed(BRANCHES))[1])


async def test_with_the_trunk_apart_no_part_computes_it() -> None:
    alone, wanted = await undisturbed(BRANCHES)
    store = MemoryStore()
    shards = [Shard(number, 2, trunk_apart=True) for number in (0, 1, 2)]
    report = await together(store, BRANCHES, shards)
    same_contents(await contents(store), wanted)
    assert [getattr(report, name) for name in SUMMED] == [getattr(alone, name) for name in SUMMED]
    assert report.tokens_computed == alone.tokens_distinct
    # The trunk is counted with none of them, so that both are as large.
    parts = [await run_job(MemoryStore(), BRANCHES, shard=shard, trunk_seconds=0) for shard in shards[1:]]
    assert [(part.prompts, part.tokens_distinct) for part in parts] == [(4, 4 * 32), (4, 4 * 32)]
    trunk = await run_job(MemoryStore(), BRANCHES, shard=shards[0])
    assert trunk.tokens_distinct == trunk.tokens_computed == 64
    assert (trunk.part, trunk.prompts) == ("trunk/2", 0)


async def test_a_part_whose_trunk_never_comes_computes_it_itself() -> None:
    wanted = (await undisturbed(BRANCHES))[1]
    store, told = MemoryStore(), Told()
    report = await run_job(store, BRANCHES, shard=Shard(2, 2), trunk_seconds=0.05, watch=told)
    assert (report.status, report.tokens_distinct) == ("done", 5 * 32)
    assert report.tokens_computed == 64 + 5 * 32
    assert report.tokens_recomputed == 64  # another part's
    assert report.tokens_restored == 0  # what was computed stayed warm
    sums_hold(report)
    own = await contents(store)
    same_contents(own, {key: wanted[key] for key in own})
    rest = await run_job(store, BRANCHES, shard=Shard(1, 2))
    assert rest.tokens_computed == 3 * 32
    same_contents(await contents(store), wanted)


async def test_a_trunk_that_does_not_come_is_waited_for_once() -> None:
    """There are two; whoever gives the first up has given up the other part."""
    prompts = [*BRANCHES, *(Prompt(prompt.token_ids, cache_salt="a") for prompt in BRANCHES)]
    store, told = MemoryStore(), Told()
    report = await run_job(store, prompts, shard=Shard(2, 2), trunk_seconds=0.05, watch=told)
    assert (report.status, report.tokens_recomputed) == ("done", 2 * 64)
    assert told.messages == [
        "waiting for part 1 to store what the parts share",
        "part 1 did not store it in time: from now on this part computes what it lacks by itself",
    ]


async def test_of_another_parts_trunk_only_what_is_missing_is_asked_of_the_producer() -> None:
    store, producer = MemoryStore(), Asked()
    await run_job(store, BRANCHES)
    before = len(store.keys())
    await store.remove([*keys_of([1] * 64, 0, [3]), *(key for prompt in BRANCHES for key in own_keys(prompt, 64))])
    lacking = before - len(store.keys())
    first = await run_job(MemoryStore(), BRANCHES, shard=Shard(1, 2))
    report = await run_job(store, BRANCHES, shard=Shard(2, 2), trunk_seconds=0.05, producer=producer)
    assert report.status == "done"
    assert 0 < report.chunks_written < lacking < before
    assert producer.chunks == report.chunks_written
    assert first.chunks_written > 0


# What is computed, and what is gone on from.


def keys_of(ids: Ids, group: int, chunks: Iterable[int]) -> list[str]:
    client = client_of(MemoryStore())
    return KeyBuilder(LAYOUT, client.keys).own_keys(client.sequence(ids).block_hashes, group, list(chunks))


def own_keys(prompt: Prompt, start: int, end: int | None = None) -> list[str]:
    """Of all chunks of a prompt's tokens ``[start, end)``, whether they are kept or not."""
    ids = [int(token) for token in prompt.token_ids]
    stop = len(ids) if end is None else end
    return [
        key
        for group, spec in enumerate(LAYOUT.groups)
        for key in keys_of(ids, group, range(start // spec.block_size, stop // spec.block_size))
    ]


class Asked(StrictProducer):
    """Counts the chunks that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = 0

    def prefill(self, state: Any, token_ids: Any, wanted: Any) -> Any:
        self.chunks += sum(int(np.count_nonzero(mask)) for mask in wanted)
        return super().prefill(state, token_ids, wanted)


async def test_nothing_is_computed_behind_the_last_chunk_that_is_missing() -> None:
    store, ids = MemoryStore(), list(range(1, 81))
    await run_job(store, [ids])
    await store.remove(keys_of(ids, 0, [1]))
    report = await run_job(store, [ids])
    assert (report.status, report.chunks_written) == ("done", 1)
    assert (report.tokens_computed, report.tokens_recomputed, report.tokens_skipped) == (16, 0, 64)
    sums_hold(report)


#: Two prompts that share 64 tokens.
PAIR = [Prompt([1] * 64 + [2] * 64), Prompt([1] * 64 + [3] * 64)]


async def pair_without(*gone: tuple[int, int, int], interval: int = 0) -> MemoryStore:
    """A store with ``PAIR`` but for tokens ``[start, end)`` of its prompts of those numbers."""
    store = MemoryStore()
    await run_job(store, PAIR, interval=interval)
    for number, start, end in gone:
        await store.remove(own_keys(PAIR[number], start, end))
    return store


async def test_a_warm_state_is_gone_on_from_where_the_store_has_no_longer_hit() -> None:
    """The second prompt's first chunk is there, but no boundary behind it."""
    store = await pair_without((0, 0, 64), (1, 72, 128))
    report = await run_job(store, PAIR)
    assert (report.status, report.tokens_computed, report.tokens_restored) == ("done", 128, 0)
    same_contents(await contents(store), by_definition(LAYOUT, PAIR, 0))


async def test_a_longer_hit_is_gone_on_from_in_place_of_a_warm_state() -> None:
    store = await pair_without((0, 0, 64), (1, 96, 128), interval=8)
    report = await run_job(store, PAIR, interval=8)
    assert (report.status, report.tokens_computed, report.tokens_restored) == ("done", 64 + 32, 96)
    same_contents(await contents(store), by_definition(LAYOUT, PAIR, 8))


async def test_a_stop_is_noticed_within_a_stretch() -> None:
    told = Told()
    async with client_of(MemoryStore()) as client:
        job = PrecomputeJob(client, StrictProducer(), [list(range(800))], JobOptions(step_tokens=80), watch=told)
        told.on_update = job.stop  # behind the first part
        report = await job.run()
    assert (report.status, report.message, report.tokens_computed) == ("stopped", "it was asked to stop", 80)


@pytest.mark.parametrize(
    ("mended", "left", "passes"),
    [
        ([9], [0], "ml"),
        ([9, 0], [9], "mlm"),
        ([9, 8], [8, 5], "mlml"),  # hardly fewer than before: there is no end to it
        ([9, 8], [8, 0], "mlml"),
        ([9, 8, 4], [8, 4, 1], "mlmlml"),
        ([9, 8, 4], [8, 4, 0], "mlmlml"),
    ],
)
async def test_what_is_missing_is_mended_while_that_helps(
    mended: list[int], left: list[int], passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mended``, ``left``: how many chunks each pass that mends, and each that looks, came to that were missing."""
    seen, answers = "", {True: iter(mended), False: iter(left)}

    async def walk(_: object, crew: object, *, mend: bool) -> Tally:
        nonlocal seen
        seen += "m" if mend else "l"
        chunks = next(answers[mend])
        return Tally(chunks, chunks)

    monkeypatch.setattr(JobRun, "_walk", walk)
    report = await run_job(MemoryStore(), PAIR)
    missing = 0 if seen[-1] == "m" else left[-1]
    assert (seen, report.missing.chunks) == (passes, missing)
    assert report.status == ("incomplete" if missing else "done")


def test_what_a_journal_knows_is_not_noted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, append = list[bytes](), Journal.append_done

    def note(journal: Journal, stretch: bytes, **figures: int) -> None:
        noted.append(stretch)
        append(journal, stretch, **figures)

    monkeypatch.setattr(Journal, "append_done", note)
    store, journal = MemoryStore(), tmp_path / "journal"

    async def run() -> None:
        await run_job(store, PAIR, journal=journal)
        assert len(noted) == len(set(noted)) == 3
        await run_job(store, PAIR, journal=journal, resume=True)
        assert len(noted) == 3
        # Another retention is other work.
        await run_job(store, PAIR, interval=8, journal=journal, resume=True)
        assert len(noted) == len(set(noted)) == 6

    asyncio.run(run())


async def test_parts_are_cut_by_bytes_too() -> None:
    class Steps(StrictProducer):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = list[int]()

        def prefill(self, state: Any, token_ids: Any, wanted: Any) -> Any:
            self.tokens.append(len(token_ids))
            return super().prefill(state, token_ids, wanted)

    producer = Steps()
    # With every chunk kept a block of 8 has 40 + 2 * 24 + 33 bytes: four are put at a time, of which there is room for
    # eight.
    report = await run_job(
        MemoryStore(), [[1] * 128], interval=None, producer=producer, max_bytes_pending=8 * 121, step_tokens=64
    )
    assert report.status == "done"
    assert producer.tokens == [32] * 4


# Stopping, cancelling, resuming.


class Countdown(WrappedStore):
    """Does something once so many calls have been made."""

    def __init__(self, inner: MemoryStore, calls: int, then: Any) -> None:
        super().__init__(Unhurried(inner, calls))
        self._left, self._then = calls, then

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        self._count()
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        self._count()
        return await super().put(items)


@pytest.mark.parametrize("calls", [1, 2, 9, 17, 30, 55, 90])
def test_a_job_that_was_stopped_is_resumed_where_it_was(calls: int, tmp_path: Path) -> None:
    prompts, journal, leftovers = a_corpus(1, 40), tmp_path / "journal", Leftovers()
    options = {"step_tokens": 16, "journal": journal, "max_bytes_pending": 200}

    async def run() -> None:
        alone, wanted = await undisturbed(prompts)
        store = MemoryStore()
        async with client_of(Countdown(store, calls, lambda: job.stop())) as client:
            job = PrecomputeJob(client, StrictProducer(), prompts, JobOptions(**options))
            report = await job.run()
            assert (report.status, report.message) == ("stopped", "it was asked to stop")
            assert report.tokens_computed < alone.tokens_computed
            assert report.chunks_written == len(store.keys())  # what was computed has been stored
            Leftovers.tasks()
        if calls > 2:  # before that nothing is done that could be resumed
            with pytest.raises(ConfigError, match="unfinished job"):
                await run_job(store, prompts, **options)
        rest = await run_job(store, prompts, resume=True, **options)
        assert rest.status == "done"
        sums_hold(rest)
        # The stretch that was being computed may be computed in parts: it goes on from a boundary that was kept.
        assert rest.earlier.runs == 1
        assert rest.earlier.chunks_written <= report.chunks_written
        assert rest.chunks_written + report.chunks_written == alone.chunks_written
        assert rest.rewritten.chunks == 0
        same_contents(await contents(store), wanted)
        Leftovers.tasks()

    asyncio.run(run())
    leftovers.check()


async def test_a_stop_before_the_corpus_is_read_ends_the_reading() -> None:
    async with client_of(MemoryStore()) as client:
        job = PrecomputeJob(client, StrictProducer(), a_corpus(1), JobOptions(shard=Shard(2, 3)))
        job.stop()
        report = await job.run()
        assert (report.status, report.prompts) == ("stopped", 0)
        assert (report.cache_id, report.part) == (client.keys.cache_id, "2/3")


def long_corpus(read: list[int]) -> Iterator[Ids]:
    """Longer than anybody reads who is told to end."""
    for number in range(100_000):
        read.append(number)
        yield [number % 1000] * 16
    raise AssertionError("nobody ended it")


async def test_a_stop_ends_the_reading_of_a_corpus() -> None:
    read = list[int]()
    async with client_of(MemoryStore()) as client:
        job = PrecomputeJob(client, StrictProducer(), long_corpus(read))
        running = asyncio.create_task(job.run())
        while not read:
            await asyncio.sleep(0.001)
        job.stop()
        report = await running
    assert (report.status, report.tokens_computed) == ("stopped", 0)
    assert "while it read the corpus" in report.message


async def test_a_stop_ends_the_wait_for_a_trunk_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walking, "_TRUNK_PAUSE", 600.0)
    async with client_of(MemoryStore()) as client:
        job = PrecomputeJob(
            client, StrictProducer(), BRANCHES, JobOptions(shard=Shard(2, 2)), watch=lambda _: StopsAtAWord(job)
        )
        report = await job.run()
    assert (report.status, report.tokens_computed) == ("stopped", 0)


class StopsAtAWord(Told):
    def __init__(self, job: PrecomputeJob[Any]) -> None:
        super().__init__()
        self._job = job

    def message(self, text: str) -> None:
        self._job.stop()


#: After so many turns of the event loop, while the corpus is read; or at the so manieth call of the store.
@pytest.mark.parametrize(
    ("turns", "calls"), [(0, 0), (1, 0), (2, 0), (5, 0), *((-1, calls) for calls in (1, 2, 4, 8, 16, 32, 64, 100))]
)
def test_a_cancelled_job_leaves_nothing_behind(turns: int, calls: int, tmp_path: Path) -> None:
    prompts, leftovers = a_corpus(1, 40), Leftovers()
    options = {"step_tokens": 16, "journal": tmp_path / "journal", "resume": True, "max_bytes_pending": 200}

    async def run() -> None:
        wanted = (await undisturbed(prompts))[1]
        store = MemoryStore()
        async with client_of(Countdown(store, calls, lambda: running.cancel())) as client:
            job = PrecomputeJob(client, StrictProducer(), prompts, JobOptions(**options))
            running = asyncio.create_task(job.run())
            if not calls:
                for _ in range(turns):
                    await asyncio.sleep(0)
                running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            Leftovers.tasks()
            held = len(store.keys())
            await asyncio.sleep(0.01)
            assert len(store.keys()) == held < len(wanted)
            # The same client, the same journal.
            again = PrecomputeJob(client, StrictProducer(), prompts, JobOptions(**options))
            rest = await again.run()
            assert (rest.status, rest.chunks_written) == ("done", len(wanted) - held)
            same_contents(await contents(store), wanted)
            Leftovers.tasks()

    asyncio.run(run())
    leftovers.check()


@pytest.mark.parametrize(
    "call",
    [lambda client, corpus: PrecomputeJob(client, StrictProducer(), corpus).run(), verify_corpus],
    ids=["job", "verification"],
)
def test_a_cancellation_ends_the_reading_of_a_corpus(call: Callable[[Any, Any], Any]) -> None:
    read, leftovers = list[int](), Leftovers()

    async def run() -> None:
        async with client_of(MemoryStore()) as client:
            running = asyncio.create_task(call(client, long_corpus(read)))
            while not read:
                await asyncio.sleep(0.001)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(run())
    assert len(read) < 100_000
    leftovers.check()


def test_a_journal_is_in_use_until_its_job_is_over(tmp_path: Path) -> None:
    journal, leftovers, prompts = tmp_path / "journal", Leftovers(), a_corpus(1)

    async def run() -> None:
        store = MemoryStore()
        async with client_of(Unhurried(store)) as client:
            running = asyncio.create_task(
                PrecomputeJob(client, StrictProducer(), prompts, JobOptions(journal=journal)).run()
            )
            while not store.keys():
                await asyncio.sleep(0)
            with pytest.raises(ConfigError, match="another process is using the journal"):
                await run_job(store, prompts, journal=journal, resume=True)
            assert (await running).status == "done"

    asyncio.run(run())
    leftovers.check()


# Wrong lines, memory.


WRONG: list[Any] = [[1] * 16, [1, -2], Prompt([], line=17), WrongLine(20, "no JSON"), [2] * 16]


async def test_wrong_lines_are_left_out_and_reported() -> None:
    store, told = MemoryStore(), Told()
    report = await run_job(store, WRONG, watch=told)
    assert (report.status, report.prompts, report.wrong_lines) == ("done", 2, 3)
    assert [wrong.line for wrong in report.wrong] == [2, 17, 20]
    assert [text.split(":")[0] for text in told.messages] == ["line 2", "line 17", "line 20"]
    same_contents(await contents(store), by_definition(LAYOUT, [Prompt([1] * 16), Prompt([2] * 16)], 0))


def test_a_wrong_line_stops_a_job_that_is_to_stop(tmp_path: Path) -> None:
    store, leftovers = MemoryStore(), Leftovers()
    with pytest.raises(InvalidTokensError, match="line 2: token_ids"):
        asyncio.run(run_job(store, WRONG, on_wrong="stop", journal=tmp_path / "journal"))
    assert store.keys() == ()
    leftovers.check()


async def test_an_empty_corpus_is_done() -> None:
    report = await run_job(MemoryStore(), [])
    assert (report.status, report.prompts, report.tokens_total, report.passes) == ("done", 0, 0, 1)


class Measured(WrappedStore):
    """A slow store that notes how many bytes of chunks have been computed and not yet put, at most."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        #: The one counted on the job's thread, the other on the loop.
        self.bytes_computed = self.bytes_put = 0
        self.most = self.largest = 0

    def computed(self, nbytes: int) -> None:
        self.bytes_computed += nbytes
        self.most, self.largest = max(self.most, self.bytes_computed - self.bytes_put), max(self.largest, nbytes)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        await asyncio.sleep(0.002)
        answers = await super().put(items)
        self.bytes_put += sum(LAYOUT.page_sizes[group_of(item.key)] for item in items)
        return answers


class Counting(NumpyProducer):
    """Tells what it computes."""

    def __init__(self, store: Measured) -> None:
        super().__init__(LAYOUT)
        self._store = store

    def prefill(self, state: Any, token_ids: Any, wanted: Any) -> Any:
        answer = super().prefill(state, token_ids, wanted)
        self._store.computed(sum(chunk.nbytes for chunk in answer[1].values()))
        return answer


@pytest.mark.parametrize("most", [1, 300, 1000, 3000])
async def test_what_waits_to_be_put_is_bounded(most: int) -> None:
    prompts = [Prompt([number, *range(200)]) for number in range(12)]
    store = Measured(MemoryStore())
    report = await run_job(
        store,
        prompts,
        interval=None,
        producer=Counting(store),
        step_tokens=16,
        puts_at_once=2,
        max_bytes_pending=most,
    )
    assert report.status == "done"
    assert store.bytes_put == store.bytes_computed
    assert store.most <= max(most, store.largest)
    assert store.most >= min(most // 2, 1000)  # it was put to the test


@pytest.mark.parametrize("warm_states", [0, 1, 2, 4])
async def test_few_states_are_kept(warm_states: int) -> None:
    """Those that are kept warm, the one that is gone on from, and the one that comes of it."""
    prompts = [Prompt(list(digits)) for digits in itertools.product((1, 2), repeat=6)]
    prompts = [Prompt([token for digit in prompt.token_ids for token in [digit] * 8]) for prompt in prompts]
    producer = StrictProducer()
    report = await run_job(MemoryStore(), prompts, producer=producer, warm_states=warm_states, step_tokens=8)
    assert report.tokens_computed == report.tokens_distinct == (2**7 - 2) * 8
    assert producer.most_states <= warm_states + 2


def test_warm_states_are_the_deepest_that_are_gone_on_from() -> None:
    with read_corpus(
        [[1] * 8, [1] * 16 + [2] * 8, [1] * 16 + [3] * 8, [1] * 8 + [4] * 8, [1] * 8 + [5] * 8],
        LAYOUT,
        client_of(MemoryStore()).hasher,
    ) as corpus:
        walk = list(corpus.tree.stretches())
        top, middle, first, *_ = walk
        assert [len(top.children), len(middle.children)] == [3, 2]
        states = WarmStates[str](1, walk)
        states.passed(top)
        states.keep(top, "top")
        states.keep(middle, "middle")
        assert [states.has(top), states.has(middle)] == [False, True]  # there is room for one
        states.keep(first, "first")
        assert not states.has(first)  # nothing goes on from it
        assert states.has(middle)
        assert states.wants(middle)
        assert states.take(middle) == ("middle", True)
        states.passed(first)
        assert not states.wants(middle)  # but for the one that is at work now
        assert states.take(middle) == ("middle", False)
        assert not states.has(middle)
        assert not WarmStates[str](0, walk).wants(top)


def test_stretches_are_asked_for_together_up_to_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all of their paths: what is read and hashed for them at a time is bounded."""
    monkeypatch.setattr(visiting, "_TOGETHER", 3)
    monkeypatch.setattr(visiting, "_TOKENS_TOGETHER", 100)
    hasher = client_of(MemoryStore()).hasher
    with read_corpus(
        [[number] * 8 * blocks for number, blocks in enumerate((1, 1, 1, 1, 12, 1, 13, 1))], LAYOUT, hasher
    ) as corpus:
        found = list(visiting._batches(list(corpus.tree.stretches()), 8))
    assert [[stretch.blocks for stretch in batch] for batch in found] == [[1, 1, 1], [1, 12], [1, 13], [1]]
