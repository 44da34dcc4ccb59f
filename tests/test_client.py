"""SparseStoreClient over a MemoryStore: what its calls ask, write, read and answer, and where they fail."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from store_contract import Room

from mooncake_sparse_client import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    GetItem,
    KeySchema,
    KVCacheLayout,
    Limits,
    MambaSpec,
    MemoryStore,
    PutItem,
    Resilience,
    SlidingWindowSpec,
    SparseStoreClient,
    Tally,
    store_mask,
)
from mooncake_sparse_client.config import RETENTION_VARIABLES
from mooncake_sparse_client.core.framing import HEADER_SIZE
from mooncake_sparse_client.core.results import ChunkFailure, Health
from mooncake_sparse_client.errors import (
    ClientClosedError,
    ConfigError,
    InvalidBufferError,
    InvalidHasherError,
    InvalidKeyError,
    InvalidLayoutError,
    InvalidRequestError,
    InvalidRetentionError,
    InvalidTokensError,
    SparseStoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from mooncake_sparse_client.stores.base import Failure, RemoveOutcome
from mooncake_sparse_client.stores.wrapping import WrappedStore

#: Full attention in blocks of 32 beside a window of 8 in blocks of 8: the alignment is 32, a boundary at T
#: needs the full chunks below it and the window chunk T/8 - 1.
FS = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32)])
F16 = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48)])
ALL_KINDS = KVCacheLayout(
    [
        FullAttentionSpec(32, page_size_bytes=64),
        SlidingWindowSpec(8, 20, page_size_bytes=32),
        ChunkedLocalAttentionSpec(16, 64, page_size_bytes=40),
        MambaSpec(32, page_size_bytes=100),
    ]
)


#: Nothing is asked again, and nothing left alone.
PLAIN = Resilience(attempts=1, breaker=False)


def page(group: int, chunk: int, nbytes: int) -> bytes:
    """Bytes that no other chunk has."""
    return random.Random(f"{group}/{chunk}").randbytes(nbytes)


class Pages:
    """A source that has every chunk, and notes what it is asked for."""

    def __init__(self, layout: KVCacheLayout, *, lacks: Sequence[tuple[int, int]] = ()) -> None:
        self.layout = layout
        self.lacks = lacks
        self.asked: list[tuple[int, int]] = []

    def __call__(self, group: int, chunk: int) -> bytes | None:
        self.asked.append((group, chunk))
        return None if (group, chunk) in self.lacks else page(group, chunk, self.layout.page_sizes[group])


class Spy(WrappedStore):
    """Notes every call, and does what a test tells it to with chosen keys."""

    def __init__(self, inner: MemoryStore | None = None, *, lease: float | None = None) -> None:
        self.kept = inner or MemoryStore()
        super().__init__(self.kept)
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.replaced: list[str] = []
        self.lease = lease
        #: Raised by every method but ``health``.
        self.down: SparseStoreError | None = None
        #: Failures in store for a key, used up one by one.
        self.bad_puts: dict[str, list[Failure]] = {}
        self.bad_gets: dict[str, list[Failure]] = {}
        #: Keys whose writing is reported and does not happen.
        self.swallows: set[str] = set()
        #: Every call waits for it.
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def lease_seconds(self) -> float | None:
        return self.lease

    def keys_of(self, method: str) -> list[str]:
        return [key for name, keys in self.calls if name == method for key in keys]

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)

    async def _note(self, method: str, keys: Sequence[str]) -> None:
        self.calls.append((method, tuple(keys)))
        if self.down is not None:
            raise self.down
        await self.gate.wait()

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        await self._note("exists", keys)
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
        await self._note("put", [item.key for item in items])
        self.replaced += [item.key for item in items if item.replace]
        failures: dict[str, Failure | None] = {
            item.key: self.bad_puts[item.key].pop(0) for item in items if self.bad_puts.get(item.key)
        }
        good = [item for item in items if item.key not in failures and item.key not in self.swallows]
        answers = await super().put(good)
        failures |= {item.key: answer for item, answer in zip(good, answers, strict=True)}
        return [failures.get(item.key) for item in items]

    async def get(self, items: Sequence[GetItem]) -> list[Failure | None]:
        await self._note("get", [item.key for item in items])
        failures: dict[str, Failure | None] = {
            item.key: self.bad_gets[item.key].pop(0) for item in items if self.bad_gets.get(item.key)
        }
        good = [item for item in items if item.key not in failures]
        answers = await super().get(good)
        failures |= {item.key: answer for item, answer in zip(good, answers, strict=True)}
        return [failures[item.key] for item in items]

    async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
        await self._note("force" if force else "remove", keys)
        return await super().remove(keys, force=force)


def client_of(store: Any, layout: KVCacheLayout = FS, **settings: Any) -> SparseStoreClient:
    return SparseStoreClient(store, layout, **{"model_name": "m", "retention_interval": None, **settings})


def key_of(client: SparseStoreClient, sequence: Any, group: int, chunk: int) -> str:
    """The own rank's key, from the published parts."""
    from mooncake_sparse_client import chunk_name

    name = chunk_name(client.layout, sequence.block_hashes, group, chunk)
    assert name is not None
    return client.keys.key(group, name)


def indices(masks: Sequence[np.ndarray]) -> list[list[int]]:
    return [np.flatnonzero(mask).tolist() for mask in masks]


def intact(got: Any, layout: KVCacheLayout) -> bool:
    return all(
        bytes(view) == page(where[0], where[1], layout.page_sizes[where[0]]) for where, view in got.chunks.items()
    )


def flip(store: MemoryStore, key: str, offset: int) -> None:
    """One bit of a stored value."""
    damaged = bytearray(store._values[key])
    damaged[offset] ^= 0x10
    store._values[key] = bytes(damaged)


def full() -> Failure:
    return Failure("full", True, "no room")


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


# Lookup, put and get


async def test_a_miss_asks_the_first_group_alone() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        hit = await client.lookup(client.sequence(range(100)))
        assert (hit.hit_length, hit.shared_length, hit.keys_asked) == (0, 0, 3)
        assert indices(hit.load_masks) == [[], []]
        assert hit.report.limited_by == (0,)
        assert len(spy.keys_of("exists")) == 3
        assert all("@group:0@" in key for key in spy.keys_of("exists"))
        got = await client.get(hit)
        assert (got.hit_length, got.chunks, got.failures, got.loaded) == (0, {}, (), Tally())
        assert spy.count("get") == 0


async def test_what_was_put_is_found_and_read() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence, source = client.sequence(range(100)), Pages(FS)
        put = await client.put(sequence, source)
        assert put.end_token == 96
        assert put.written == Tally(6, 3 * 64 + 3 * 32)
        assert put.unreachable == Tally(9, 9 * 32)
        assert (put.existing, put.unavailable, put.failed, put.failures) == (Tally(), Tally(), Tally(), ())
        assert sorted(source.asked) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 7), (1, 11)]
        assert set(spy.kept.keys()) == {key_of(client, sequence, *where) for where in source.asked}
        assert spy.kept.nbytes == 3 * 64 + 3 * 32 + 6 * HEADER_SIZE
        hit = await client.lookup(sequence)
        assert (hit.hit_length, hit.shared_length) == (96, 96)
        assert hit.report.limited_by == ()
        assert indices(hit.load_masks) == [[0, 1, 2], [11]]
        got = await client.get(hit)
        assert (got.hit_length, got.failures, got.loaded) == (96, (), Tally(4, 3 * 64 + 32))
        assert set(got.chunks) == {(0, 0), (0, 1), (0, 2), (1, 11)}
        assert intact(got, FS)
        assert spy.kept.nbytes == 3 * 64 + 3 * 32 + 6 * HEADER_SIZE  # reading writes nothing


@pytest.mark.parametrize(("tokens", "expected"), [(31, 0), (32, 0), (33, 32), (96, 64), (97, 96), (150, 96)])
async def test_the_last_token_is_always_recomputed(tokens: int, expected: int) -> None:
    async with client_of(MemoryStore()) as client:
        await client.put(client.sequence(range(100)), Pages(FS))
        sequence = client.sequence(range(tokens))
        assert (await client.lookup(sequence)).hit_length == expected
        got = await client.get(sequence)
        assert got.hit_length == expected
        assert intact(got, FS)


async def test_bytes_go_where_the_caller_wants_them() -> None:
    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(range(100))
        # Keys and values of a layer are two pieces of one chunk, here as there.
        memory: dict[tuple[int, int], Any] = {
            (0, chunk): [bytearray(page(0, chunk, 64)[:20]), np.frombuffer(page(0, chunk, 64)[20:], np.uint16)]
            for chunk in range(3)
        }
        await client.put(sequence, lambda group, chunk: memory[0, chunk] if group == 0 else page(1, chunk, 32))
        room = np.zeros((3, 64), np.uint8)
        target: dict[tuple[int, int], Any] = {
            (0, chunk): [room[chunk, :30], room[chunk, 30:].view(np.int16)] for chunk in range(3)
        }
        windows = bytearray(34)
        got = await client.get(sequence, into={**target, (1, 11): memoryview(windows)[1:33]})
        assert (got.hit_length, got.chunks, got.loaded) == (96, {}, Tally(4, 224))
        assert [row.tobytes() for row in room] == [page(0, chunk, 64) for chunk in range(3)]
        assert windows == b"\0" + page(1, 11, 32) + b"\0"


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        ({(0, 0): bytearray(64)}, "missing"),
        (lambda _group, _chunk: bytearray(63), "63"),
        (lambda group, _: bytes([64, 32][group]), "read-only"),
        (lambda _group, _chunk: np.zeros(128, np.uint8)[::2], "contiguous"),
        (lambda _group, _chunk: 64, "no buffer"),
        (17, "callable"),
    ],
)
async def test_a_sink_that_does_not_fit_is_refused(sink: Any, words: str) -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        with pytest.raises(InvalidBufferError, match=words):
            await client.get(sequence, into=sink)
        assert spy.count("get") == 0
        assert (await client.get(sequence)).hit_length == 96


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda _group, _chunk: bytes(63), "63"),
        (lambda _group, _chunk: [bytes(32), bytes(33)], "65"),
        (lambda _group, _chunk: "text", "no buffer"),
        (lambda _group, _chunk: np.zeros((64, 2), np.uint8)[:, 0], "contiguous"),
        (None, "callable"),
    ],
)
async def test_a_source_that_does_not_fit_is_refused(source: Any, words: str) -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        with pytest.raises(InvalidBufferError, match=words):
            await client.put(sequence, source)
        assert spy.count("put") == 0
        assert (await client.put(sequence, Pages(FS))).written.chunks == 6


async def test_an_error_of_the_source_is_the_callers() -> None:
    class MineError(Exception):
        pass

    def source(group: int, chunk: int) -> bytes:
        raise MineError

    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(range(100))
        with pytest.raises(MineError):
            await client.put(sequence, source)
        assert (await client.put(sequence, Pages(FS))).written.chunks == 6


async def test_a_second_put_writes_nothing() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        source = Pages(FS)
        again = await client.put(sequence, source)
        assert (again.written, again.existing, again.unreachable) == (Tally(), Tally(6, 288), Tally(9, 288))
        assert source.asked == []
        assert spy.count("put") == 1
        longer = await client.put(client.sequence(range(128)), source)
        assert (longer.written.chunks, longer.existing.chunks) == (2, 6)
        assert sorted(source.asked) == [(0, 3), (1, 15)]


async def test_what_the_source_lacks_is_unavailable_and_no_failure() -> None:
    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(range(100))
        put = await client.put(sequence, Pages(FS, lacks=[(1, 3), (1, 7)]))
        assert (put.written, put.unavailable, put.failed) == (Tally(4, 224), Tally(2, 64), Tally())
        assert (await client.lookup(sequence)).hit_length == 96
        assert (await client.lookup(client.sequence(range(65)))).hit_length == 0
        mapping = {(1, 3): page(1, 3, 32)}  # a mapping lacks what it has no key for
        put = await client.put(sequence, mapping)
        assert (put.written, put.unavailable, put.existing) == (Tally(1, 32), Tally(1, 32), Tally(4, 224))


async def test_what_is_unreachable_is_never_offered() -> None:
    spy = Spy()
    async with client_of(spy, retention_interval=0) as client:
        sequence, source = client.sequence(range(100)), Pages(FS)
        put = await client.put(sequence, source)
        assert (put.written, put.unreachable) == (Tally(4, 224), Tally(11, 352))
        assert sorted(source.asked) == [(0, 0), (0, 1), (0, 2), (1, 11)]
        kept = {key_of(client, sequence, *where) for where in source.asked}
        assert set(spy.keys_of("exists")) == set(spy.keys_of("put")) == kept
        plan = client.plan_put(sequence)
        assert indices(plan.store_masks) == [[0, 1, 2], [11]]
        assert sum((tally.chunks for tally in plan.unreachable), 0) == 11
        assert plan.boundaries == (96,)


async def test_the_plan_of_a_put_asks_nothing() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        plan = client.plan_put(client.sequence(range(100)), num_tokens=64)
        assert (plan.start_token, plan.end_token) == (0, 64)
        assert indices(plan.store_masks) == [[0, 1], [3, 7]]
        assert plan.reachable == (Tally(2, 128), Tally(2, 64))
        assert plan.unreachable == (Tally(), Tally(6, 192))
        assert spy.calls == []


async def test_what_the_own_lookup_saw_is_not_asked_again() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        await client.put(client.sequence(range(70)), Pages(FS))  # full 0 and 1, window 3 and 7
        sequence = client.sequence(range(130))
        hit = await client.lookup(sequence)
        assert hit.hit_length == 64
        spy.calls.clear()
        put = await client.put(sequence, Pages(FS), hit=hit)
        assert (put.existing.chunks, put.written.chunks) == (4, 4)
        new = {key_of(client, sequence, *where) for where in [(0, 2), (0, 3), (1, 11), (1, 15)]}
        assert Counter(spy.keys_of("exists")) == Counter(new)
        assert Counter(spy.keys_of("put")) == Counter(new)


async def test_a_read_that_found_less_is_believed_more_than_the_hit() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence)
        gone = key_of(client, sequence, 0, 1)
        await spy.kept.remove([gone])
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (32, (ChunkFailure(0, 1, "missing"),))
        put = await client.put(sequence, Pages(FS), hit=hit)
        assert (put.existing.chunks, put.written) == (5, Tally(1, 64))
        assert gone in set(spy.kept.keys())
        assert (await client.get(hit)).hit_length == 96


async def test_a_learned_junction_serves_the_third_prompt() -> None:
    """Two prompts part at 70: the second one's lookup sees it, its put keeps it, the third one hits it."""
    prompts = [[*range(70), *range(1000 * number, 1000 * number + 130)] for number in (1, 2, 3)]
    async with client_of(MemoryStore(), retention_interval=0) as client:
        first, second, third = map(client.sequence, prompts)
        await client.put(first, Pages(FS))
        hit = await client.lookup(second)
        assert (hit.hit_length, hit.shared_length) == (0, 64)
        assert hit.report.limited_by == (1,)
        put = await client.put(second, Pages(FS), hit=hit)
        assert client.plan_put(second, hit=hit).boundaries == (64, 192)
        assert put.existing.chunks == 2
        assert (await client.lookup(third)).hit_length == 64
        # Without its hit the second put would have kept its own end alone.
        assert client.plan_put(second).boundaries == (192,)


async def test_without_the_hit_no_junction_is_learned() -> None:
    async with client_of(MemoryStore(), retention_interval=0) as client:
        for number in (1, 2):
            await client.put(client.sequence([*range(70), *range(1000 * number, 1000 * number + 130)]), Pages(FS))
        hit = await client.lookup(client.sequence(range(90)))
        assert (hit.hit_length, hit.shared_length) == (0, 64)


async def test_given_boundaries_are_kept() -> None:
    async with client_of(MemoryStore(), retention_interval=0) as client:
        await client.put(client.sequence(range(100)), Pages(FS), boundaries=[75])
        assert (await client.lookup(client.sequence(range(80)))).hit_length == 64
        assert (await client.lookup(client.sequence(range(50)))).hit_length == 0


@pytest.mark.parametrize("retention", [None, 0, 64])
@pytest.mark.parametrize("layout", [FS, F16, ALL_KINDS], ids=["FS", "F16", "all kinds"])
async def test_putting_in_steps_is_putting_at_once(layout: KVCacheLayout, retention: int | None) -> None:
    at_once, in_steps = MemoryStore(), Spy()
    tokens = range(230)
    async with client_of(at_once, layout, retention_interval=retention) as client:
        whole = await client.put(client.sequence(tokens), Pages(layout), boundaries=[100])
    async with client_of(in_steps, layout, retention_interval=retention) as client:
        sequence, results, start = client.sequence(tokens), [], 0
        for reached in (40, 41, 130, 199, 230):
            results.append(
                await client.put(sequence, Pages(layout), num_tokens=reached, start_token=start, boundaries=[100])
            )
            assert start <= results[-1].end_token <= reached
            start = results[-1].end_token
    assert set(in_steps.kept.keys()) == set(at_once.keys())
    assert Counter(in_steps.keys_of("put")) == Counter(at_once.keys())
    assert start == whole.end_token
    for name in ("written", "existing", "unreachable"):
        assert sum((getattr(result, name) for result in results), Tally()) == getattr(whole, name)


async def test_steps_of_a_growing_sequence() -> None:
    """A turn's answer grows the sequence; the prompt's length stays what it was."""
    async with client_of(MemoryStore(), retention_interval=0) as client:
        sequence = client.sequence(range(70))
        first = await client.put(sequence, Pages(FS), num_prompt_tokens=70)
        sequence.extend(range(70, 140))
        second = await client.put(
            sequence, Pages(FS), start_token=first.end_token, num_prompt_tokens=70, num_tokens=139
        )
        assert (first.end_token, second.end_token) == (64, 128)
        assert first.written.chunks == 2 + 1
        assert second.written.chunks == 2  # generated windows are no boundary of the prompt
        assert (await client.lookup(client.sequence(range(80)))).hit_length == 64


@pytest.mark.parametrize(
    "settings",
    [
        {"num_tokens": 101},
        {"num_tokens": -1},
        {"num_tokens": 1.5},
        {"start_token": 128},
        {"start_token": 96, "num_tokens": 64},
        {"start_token": -32},
        {"num_prompt_tokens": -1},
        {"boundaries": [-1]},
        {"boundaries": ["64"]},
    ],
)
async def test_counts_that_contradict_are_errors_before_anything_is_written(settings: dict[str, Any]) -> None:
    spy, source = Spy(), Pages(FS)
    async with client_of(spy) as client:
        with pytest.raises(InvalidRequestError):
            await client.put(client.sequence(range(100)), source, **settings)
        with pytest.raises(InvalidRequestError):
            client.plan_put(client.sequence(range(100)), **settings)
        assert (spy.calls, source.asked) == ([], [])


async def test_a_sequence_may_grow_while_it_is_put() -> None:
    """What was there when the call began is put; the rest is for the next call."""
    spy = Spy()
    async with client_of(spy, KVCacheLayout([FullAttentionSpec(1024, page_size_bytes=16)])) as client:
        sequence = client.sequence(range(8192))  # long enough to be hashed on a thread
        running = asyncio.create_task(client.put(sequence, lambda _group, _chunk: bytes(16)))
        await asyncio.sleep(0)
        sequence.extend(range(2048))
        put = await running
        assert put.written.chunks in (8, 10)
        assert put.end_token == put.written.chunks * 1024
        assert len(spy.kept.keys()) == put.written.chunks
        assert (await client.put(sequence, lambda _group, _chunk: bytes(16))).end_token == 10240


async def test_a_sequence_may_grow_while_it_is_looked_up() -> None:
    async with client_of(MemoryStore(), KVCacheLayout([FullAttentionSpec(1024, page_size_bytes=16)])) as client:
        await client.put(client.sequence(range(10_000)), lambda _group, _chunk: bytes(16))
        sequence = client.sequence(range(8193))
        running = asyncio.create_task(client.lookup(sequence))
        await asyncio.sleep(0)
        sequence.extend(range(8193, 10_000))
        hit = await running
        assert hit.num_tokens in (8193, 10_000)
        assert hit.hit_length in (8192, 9216)
        assert (await client.get(hit)).hit_length == hit.hit_length


async def test_other_things_than_sequences_and_hits_are_refused() -> None:
    async with client_of(MemoryStore()) as client:
        calls: list[Callable[[Any], Awaitable[object]]] = [client.lookup, client.exists, client.remove]
        for call in calls:
            with pytest.raises(InvalidRequestError, match="sequence"):
                await call([1, 2, 3])
        with pytest.raises(InvalidRequestError, match="sequence"):
            await client.put([1, 2, 3], Pages(FS))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="PrefixHit"):
            await client.get("hit")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="PrefixHit"):
            await client.put(client.sequence(range(100)), Pages(FS), hit=96)  # type: ignore[arg-type]
        with pytest.raises(InvalidTokensError):
            client.sequence([-1])


# Calls side by side


async def test_two_puts_of_one_sequence_write_each_key_once() -> None:
    spy = Spy()
    spy.gate.clear()
    async with client_of(spy) as client:
        puts = [asyncio.create_task(client.put(client.sequence(range(100)), Pages(FS))) for _ in range(3)]
        await settled(lambda: spy.count("exists") >= 1)
        spy.gate.set()
        results = await asyncio.gather(*puts)
        assert sorted(result.written.chunks for result in results) == [0, 0, 6]
        assert all(result.written + result.existing == Tally(6, 288) for result in results)
        assert max(Counter(spy.keys_of("put")).values()) == 1


async def test_of_two_puts_that_overlap_each_writes_its_own_part() -> None:
    spy = Spy()
    spy.gate.clear()
    async with client_of(spy) as client:
        short = asyncio.create_task(client.put(client.sequence(range(64)), Pages(FS)))
        long = asyncio.create_task(client.put(client.sequence(range(128)), Pages(FS)))
        await settled(lambda: spy.count("exists") >= 1)
        spy.gate.set()
        first, second = await asyncio.gather(short, long)
        assert (first.written.chunks, second.written.chunks, second.existing.chunks) == (4, 4, 4)
        assert max(Counter(spy.keys_of("put")).values()) == 1
        assert len(spy.kept.keys()) == 8


async def test_where_the_racing_put_is_refused_the_other_tries() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        key = key_of(client, sequence, 0, 1)
        spy.bad_puts[key] = [Failure("rejected", False, "not this time")]
        spy.gate.clear()
        puts = [asyncio.create_task(client.put(sequence, Pages(FS))) for _ in range(2)]
        await settled(lambda: spy.count("exists") >= 1)
        spy.gate.set()
        refused, other = await asyncio.gather(*puts)
        assert refused.failures == (ChunkFailure(0, 1, "rejected"),)
        assert (refused.written.chunks, refused.failed) == (5, Tally(1, 64))
        assert (other.written, other.existing.chunks, other.failed) == (Tally(1, 64), 5, Tally())
        assert Counter(spy.keys_of("put"))[key] == 2
        assert (await client.get(sequence)).hit_length == 96


async def test_where_the_racing_put_raises_the_other_writes() -> None:
    class MineError(Exception):
        pass

    def broken(group: int, chunk: int) -> bytes:
        raise MineError

    spy = Spy()
    spy.gate.clear()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        first = asyncio.create_task(client.put(sequence, broken))
        second = asyncio.create_task(client.put(sequence, Pages(FS)))
        await settled(lambda: spy.count("exists") >= 1)
        spy.gate.set()
        with pytest.raises(MineError):
            await first
        assert (await second).written.chunks == 6


async def test_where_the_racing_put_has_no_bytes_the_other_writes() -> None:
    spy = Spy()
    spy.gate.clear()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        first = asyncio.create_task(client.put(sequence, lambda _group, _chunk: None))
        second = asyncio.create_task(client.put(sequence, Pages(FS)))
        await settled(lambda: spy.count("exists") >= 1)
        spy.gate.set()
        assert (await first).unavailable == Tally(6, 288)
        assert (await second).written == Tally(6, 288)


async def test_many_callers_at_once() -> None:
    spy = Spy()
    async with client_of(spy, ALL_KINDS, limits=Limits(max_batch_chunks=3, max_batch_keys=7)) as client:

        async def user(number: int) -> None:
            length = 40 + 17 * (number % 9)
            sequence = client.sequence([*range(40), *([number % 3] * length)])
            hit = await client.lookup(sequence)
            put = await client.put(sequence, Pages(ALL_KINDS), hit=hit)
            assert not put.failures
            got = await client.get(sequence)
            assert got.hit_length == (len(sequence) - 1) // 32 * 32
            assert intact(got, ALL_KINDS)

        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(user(number))
        assert max(Counter(spy.keys_of("put")).values()) == 1


async def test_an_old_hit_that_the_engine_holds_itself_asks_for_nothing() -> None:
    """With a draft margin the chunk behind it has no name yet: it is not to be asked for."""
    spy = Spy(lease=0.0)
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48, eagle=True)])
    async with client_of(spy, layout) as client:
        hit = await client.lookup(client.sequence(range(58)), local_tokens=48)
        assert (hit.hit_length, hit.keys_asked) == (48, 0)
        got = await client.get(hit)
        assert (got.hit_length, got.failures, got.loaded) == (48, (), Tally())
        assert spy.calls == []


async def test_requests_are_cut_to_the_limits() -> None:
    spy = Spy()
    limits = Limits(max_batch_bytes=4 * (48 + HEADER_SIZE) + 1, max_batch_keys=10, concurrency=2)
    async with client_of(spy, F16, limits=limits) as client:
        sequence = client.sequence(range(16 * 33))
        await client.put(sequence, Pages(F16))
        await client.get(sequence)
        assert {len(keys) for name, keys in spy.calls if name == "exists"} == {10, 3, 2}
        assert max(len(keys) for name, keys in spy.calls if name in ("put", "get")) == 4
        assert spy.count("put") == 9  # 33 chunks
        assert spy.count("get") == 8  # 32 of them: the last token is recomputed
    spy = Spy()
    async with client_of(spy, F16, limits=Limits(max_batch_bytes=1)) as client:
        await client.put(client.sequence(range(64)), Pages(F16))
        assert [len(keys) for name, keys in spy.calls if name == "put"] == [1, 1, 1, 1]


async def test_no_more_requests_run_at_once_than_allowed() -> None:
    class Busy(MemoryStore):
        running = most = 0

        async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
            Busy.running += 1
            Busy.most = max(Busy.most, Busy.running)
            for _ in range(5):
                await asyncio.sleep(0)
            Busy.running -= 1
            return await super().put(items)

    async with client_of(Busy(), F16, limits=Limits(max_batch_chunks=1, concurrency=3)) as client:
        await asyncio.gather(*(client.put(client.sequence([number] * 160), Pages(F16)) for number in range(4)))
        assert Busy.most == 3


# What can be wrong with a value


async def test_a_swallowed_write_shows_when_it_is_confirmed() -> None:
    spy = Spy()
    async with client_of(spy, timeout=0.5) as client:
        sequence = client.sequence(range(100))
        spy.swallows = {key_of(client, sequence, 0, 1)}
        put = await client.put(sequence, Pages(FS), confirm=True)
        assert put.failures == (ChunkFailure(0, 1, "unconfirmed"),)
        assert (put.written.chunks, put.failed) == (5, Tally(1, 64))
        put = await client.put(sequence, Pages(FS))
        assert (put.written, put.failures) == (Tally(1, 64), ())  # nobody asked again
        spy.swallows = set()
        spy.calls.clear()
        put = await client.put(sequence, Pages(FS), confirm=True)
        assert (put.written, put.failures) == (Tally(1, 64), ())
        assert spy.keys_of("exists").count(key_of(client, sequence, 0, 1)) == 2


@pytest.mark.parametrize("offset", [HEADER_SIZE, HEADER_SIZE + 31, -1, -20])
@pytest.mark.parametrize("where", [(0, 0), (0, 2), (1, 11)])
async def test_a_flipped_bit_is_a_miss_until_the_next_put_heals_it(where: tuple[int, int], offset: int) -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        hit, key = await client.lookup(sequence), key_of(client, sequence, *where)
        flip(spy.kept, key, offset)
        shorter = {(0, 0): 0, (0, 2): 64, (1, 11): 64}[where]
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (shorter, (ChunkFailure(*where, "checksum"),))
        assert where not in got.chunks
        assert intact(got, FS)
        # It counts as absent from now on, for lookups, questions and an older hit alike.
        assert (await client.lookup(sequence)).hit_length == shorter
        assert not (await client.exists(sequence))[where[0]][where[1]]
        assert (await client.get(hit)).hit_length == shorter
        spy.calls.clear()
        put = await client.put(sequence, Pages(FS), hit=hit)
        assert (put.written.chunks, put.existing.chunks) == (1, 5)
        assert spy.keys_of("put") == spy.replaced == [key]
        assert (await client.lookup(sequence)).hit_length == 96
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (96, ())
        assert intact(got, FS)
        # Healed is healed: nothing is replaced twice.
        assert (await client.put(sequence, Pages(FS))).existing.chunks == 6
        assert spy.replaced == [key]


async def test_two_puts_heal_a_value_once() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        flip(spy.kept, key_of(client, sequence, 0, 1), -1)
        assert (await client.get(sequence)).hit_length == 32
        first, second = await asyncio.gather(*(client.put(sequence, Pages(FS)) for _ in range(2)))
        assert sorted([first.written.chunks, second.written.chunks]) == [0, 1]
        assert len(spy.replaced) == 1
        assert (await client.get(sequence)).hit_length == 96


async def test_no_flipped_bit_anywhere_gets_through() -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(40))
        await client.put(sequence, Pages(FS))
        key, reasons = key_of(client, sequence, 0, 0), set()
        good = store._values[key]
        for offset in range(len(good)):
            flip(store, key, offset)
            async with client_of(store) as reader:  # without what the other one learned
                got = await reader.get(reader.sequence(range(40)))
            if got.failures:
                assert got.hit_length == 0
                reasons |= {failure.reason for failure in got.failures}
            else:  # filling between header and bytes
                assert offset < HEADER_SIZE
                assert intact(got, FS)
            store._values[key] = good
        assert reasons == {"header", "version", "fingerprint", "group", "length", "name", "checksum"}


@pytest.mark.parametrize(
    ("taken_from", "reason"), [((0, 1), "name"), ((1, 3), "length"), ("other sequence", "name"), ("empty", "length")]
)
async def test_an_intact_value_of_another_chunk_is_told(taken_from: Any, reason: str) -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence, other = client.sequence(range(100)), client.sequence(range(1, 101))
        await client.put(sequence, Pages(FS))
        await client.put(other, Pages(FS))
        key = key_of(client, sequence, 0, 2)
        if taken_from == "other sequence":
            store._values[key] = store._values[key_of(client, other, 0, 2)]
        elif taken_from == "empty":
            store._values[key] = b"?"
        else:
            store._values[key] = store._values[key_of(client, sequence, *taken_from)]
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (64, (ChunkFailure(0, 2, reason),))
        assert intact(got, FS)
        assert (await client.put(sequence, Pages(FS))).written.chunks == 1
        assert (await client.get(sequence)).hit_length == 96


async def test_a_value_of_another_group_of_the_same_size_is_told() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48), SlidingWindowSpec(16, 16, page_size_bytes=48)])
    store = MemoryStore()
    async with client_of(store, layout) as client:
        sequence = client.sequence(range(50))
        await client.put(sequence, Pages(layout))
        store._values[key_of(client, sequence, 0, 1)] = store._values[key_of(client, sequence, 1, 1)]
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (16, (ChunkFailure(0, 1, "group"),))


async def test_only_what_a_full_store_refused_is_put_again() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        once, twice = key_of(client, sequence, 0, 1), key_of(client, sequence, 1, 7)
        spy.bad_puts = {once: [full()], twice: [full(), full()]}
        put = await client.put(sequence, Pages(FS))
        assert (put.written.chunks, put.failed) == (6, Tally())
        puts = [set(keys) for method, keys in spy.calls if method == "put"]
        assert len(puts[0]) == 6
        assert puts[1:] == [{once, twice}, {twice}]


async def test_a_store_that_stays_full_is_a_failure_within_the_deadline() -> None:
    spy = Spy()
    async with client_of(spy, timeout=1.0) as client:
        sequence = client.sequence(range(100))
        key = key_of(client, sequence, 1, 7)
        spy.bad_puts = {key: [full()] * 10_000}
        put = await client.put(sequence, Pages(FS))
        assert (put.written.chunks, put.failures) == (5, (ChunkFailure(1, 7, "full"),))
        assert spy.count("put") > 3
        spy.bad_puts.clear()
        # The pause that is left may be longer than such a short call's patience.
        while (put := await client.put(sequence, Pages(FS))).failed.chunks:
            assert put.written.chunks == 0
        assert put.written.chunks == 1


async def test_a_put_takes_the_sequence_as_it_is_when_called() -> None:
    """A task may start late: tokens that were appended meanwhile have no cache yet."""
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(64))
        late = asyncio.create_task(client.put(sequence, Pages(FS)))
        sequence.extend(range(64, 160))
        assert (await late).end_token == 64
        assert (await client.lookup(sequence)).hit_length == 64


async def test_a_store_that_fails_leaves_the_callers_timeout_alone() -> None:
    spy = Spy()
    spy.down = down()
    async with client_of(spy, when_down="miss", limits=Limits(max_batch_keys=1)) as client:

        async def late() -> None:
            async with asyncio.timeout(0.05):
                assert (await client.lookup(client.sequence(range(100)))).hit_length == 0
                await asyncio.sleep(5)

        with pytest.raises(TimeoutError):
            await late()


async def test_an_error_of_the_source_arrives_as_it_is() -> None:
    async with client_of(MemoryStore(), limits=Limits(max_batch_chunks=1)) as client:
        error = RuntimeError("no pages")
        error.__cause__ = OSError("disk")

        def broken(group: int, chunk: int) -> bytes:
            raise error

        with pytest.raises(RuntimeError) as caught:
            await client.put(client.sequence(range(100)), broken)
        assert caught.value is error
        assert isinstance(error.__cause__, OSError)

        def slow(group: int, chunk: int) -> bytes:
            raise TimeoutError("the source's own")

        with pytest.raises(TimeoutError, match="the source's own") as own:
            await client.put(client.sequence(range(100)), slow)
        assert not isinstance(own.value, StoreTimeoutError)


async def test_chunks_may_not_share_a_sinks_memory() -> None:
    shared = bytearray(48)
    for limits in (Limits(), Limits(max_batch_chunks=1)):
        async with client_of(MemoryStore(), F16, limits=limits) as client:
            sequence = client.sequence(range(100))
            await client.put(sequence, Pages(F16))
            with pytest.raises(InvalidBufferError, match="overlap"):
                await client.get(sequence, into=lambda group, chunk: shared)
            assert (await client.get(sequence)).hit_length == 96  # nothing counts as damaged


async def test_pieces_that_meet_only_in_part_are_refused_too() -> None:
    room = memoryview(bytearray(1000))
    for limits in (Limits(), Limits(max_batch_chunks=1, concurrency=1)):
        async with client_of(MemoryStore(), F16, limits=limits) as client:
            sequence = client.sequence(range(100))
            await client.put(sequence, Pages(F16))
            with pytest.raises(InvalidBufferError, match="overlap"):
                await client.get(sequence, into=lambda group, chunk: room[40 * chunk : 40 * chunk + 48])


async def test_a_shortened_hit_may_use_memory_again() -> None:
    """One slot for the state of a request, whichever it is: a natural layout."""
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48), MambaSpec(16, page_size_bytes=32)])
    async with client_of(MemoryStore(), layout) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(layout))
        hit = await client.lookup(sequence)
        await client._transport.store.remove([key_of(client, sequence, 0, 3)])
        state, pages = bytearray(32), bytearray(48 * 6)
        got = await client.get(
            hit, into=lambda group, chunk: state if group else memoryview(pages)[48 * chunk : 48 * chunk + 48]
        )
        assert got.hit_length == 48
        assert state == page(1, 2, 32)
        assert pages[: 48 * 3] == b"".join(page(0, chunk, 48) for chunk in range(3))


async def test_a_sink_may_make_its_memory_on_the_spot() -> None:
    async with client_of(MemoryStore(), F16, limits=Limits(max_batch_chunks=1, concurrency=1)) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(F16))
        assert (await client.get(sequence, into=lambda group, chunk: bytearray(48))).hit_length == 96


async def test_damage_found_while_a_put_asks_is_replaced_by_it() -> None:
    spy = Spy()
    async with client_of(spy, F16) as client:
        sequence = client.sequence(range(20))
        await client.put(sequence, Pages(F16))
        hit, key = await client.lookup(sequence), key_of(client, sequence, 0, 0)
        spy.kept._values[key] = bytes(len(spy.kept._values[key]))
        asking = asyncio.Event()
        real = spy.exists

        async def held_up(keys: Sequence[str]) -> list[bool]:
            asking.set()
            found = await real(keys)
            await asyncio.sleep(0.05)
            return found

        spy.exists = held_up  # type: ignore[method-assign]
        put = asyncio.create_task(client.put(sequence, Pages(F16)))
        await asking.wait()
        assert (await client.get(hit)).failures == (ChunkFailure(0, 0, "header"),)
        assert (await put).written.chunks == 1
        assert spy.replaced == [key]
        assert (await client.get(sequence)).hit_length == 16


async def test_what_was_removed_is_damaged_no_more() -> None:
    store = MemoryStore()
    async with client_of(store) as client, client_of(store) as other:
        sequence = client.sequence(range(64))
        await client.put(sequence, Pages(FS))
        key = key_of(client, sequence, 0, 0)
        store._values[key] = bytes(len(store._values[key]))
        assert (await client.get(sequence)).hit_length == 0
        await client.remove(sequence, force=True)
        await other.put(other.sequence(range(64)), Pages(FS))
        assert (await client.lookup(sequence)).hit_length == 32
        assert (await client.get(sequence)).hit_length == 32


async def test_chunked_attention_alone_shows_no_junction() -> None:
    layout = KVCacheLayout(
        [ChunkedLocalAttentionSpec(16, 64, page_size_bytes=8), SlidingWindowSpec(16, 16, page_size_bytes=8)]
    )
    async with client_of(MemoryStore(), layout, retention_interval=0) as client:
        sequence = client.sequence(range(200))
        hit = await client.lookup(sequence)
        assert client.plan_put(sequence, hit=hit).boundaries == client.plan_put(sequence).boundaries == (192,)


def test_a_client_may_go_on_in_the_next_event_loop() -> None:
    client = client_of(MemoryStore(), limits=Limits(concurrency=1, max_batch_chunks=1, requests_per_second=1000))
    asyncio.run(put_and_find(client))
    asyncio.run(put_and_find(client))


async def put_and_find(client: SparseStoreClient) -> None:
    await asyncio.gather(*(client.put(client.sequence(range(first, first + 100)), Pages(FS)) for first in range(5)))
    assert (await client.lookup(client.sequence(range(100)))).hit_length == 96


async def test_a_client_is_refused_on_a_second_event_loop_at_once() -> None:
    client = client_of(MemoryStore())
    await client.lookup(client.sequence(range(100)))
    with pytest.raises(InvalidRequestError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(client.lookup(client.sequence(range(100)))))
    await client.aclose()


async def test_hits_and_plans_are_short_when_printed() -> None:
    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(range(100_000))
        hit = await client.lookup(sequence)
        for value in (hit, client.plan_put(sequence, hit=hit)):
            assert len(repr(value)) < 1500


async def test_a_value_that_can_never_fit_is_not_put_again() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        spy.bad_puts = {key_of(client, sequence, 0, 0): [Failure("full", False, "larger than the store")]}
        assert (await client.put(sequence, Pages(FS))).failures == (ChunkFailure(0, 0, "full"),)
        assert spy.count("put") == 1


async def test_damage_in_keys_shared_with_others_is_not_overwritten() -> None:
    spy = Spy()
    async with client_of(spy, profile="vllm") as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        key = key_of(client, sequence, 0, 1)
        spy.kept._values[key] = b"somebody's own idea of it"
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (32, (ChunkFailure(0, 1, "length"),))
        assert (await client.lookup(sequence)).hit_length == 96  # whoever wrote it may have mended it
        await client.put(sequence, Pages(FS))
        assert spy.replaced == []
        assert spy.kept._values[key] == b"somebody's own idea of it"


@pytest.mark.parametrize(("gone", "expected"), [((0, 3), 96), ((0, 0), 0), ((0, 1), 32), ((1, 15), 96)])
async def test_a_chunk_that_is_gone_shortens_the_prefix(gone: tuple[int, int], expected: int) -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(129))
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence)
        assert hit.hit_length == 128
        await store.remove([key_of(client, sequence, *gone)])
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (expected, (ChunkFailure(*gone, "missing"),))
        boundary = [*((0, chunk) for chunk in range(expected // 32)), (1, expected // 8 - 1)] if expected else []
        assert sorted(got.chunks) == sorted(boundary)
        assert intact(got, FS)
        assert got.loaded.chunks == len(boundary)


@pytest.mark.parametrize(("losses", "expected"), [(1, 96), (2, 64), (3, 0), (4, 0)])
@pytest.mark.parametrize("local", [0, 32])
async def test_a_get_reads_three_times_at_most(losses: int, expected: int, local: int) -> None:
    """Each round the window chunk that the new, shorter prefix needs is gone as well."""
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(160))
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence, local_tokens=local)
        assert hit.hit_length == 128
        gone = [(1, 15), (1, 11), (1, 7), (1, 3)][:losses]
        for where in gone:
            await spy.kept.remove([key_of(client, sequence, *where)])
        got = await client.get(hit)
        assert got.hit_length == max(expected, local)
        assert spy.count("get") == min(losses + 1, 3)
        assert got.failures == tuple(ChunkFailure(*where, "missing") for where in gone[:3])
        assert intact(got, FS)


async def test_a_retriable_failure_is_tried_once_more_and_then_a_miss() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        key = key_of(client, sequence, 0, 2)
        late = Failure("lease_expired", True, "too late")
        spy.bad_gets[key] = [late]
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (96, ())
        assert intact(got, FS)
        spy.bad_gets[key] = [late, late]
        spy.calls.clear()
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (64, (ChunkFailure(0, 2, "lease_expired"),))
        assert Counter(spy.keys_of("get"))[key] == 2
        assert intact(got, FS)


async def test_a_failure_for_good_is_not_tried_again() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        key = key_of(client, sequence, 0, 2)
        spy.bad_gets[key] = [Failure("rejected", False, "no")]
        got = await client.get(sequence)
        assert got.failures == (ChunkFailure(0, 2, "rejected"),)
        assert Counter(spy.keys_of("get"))[key] == 1


async def test_a_refused_chunk_is_counted_and_the_others_are_written() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        spy.bad_puts[key_of(client, sequence, 1, 7)] = [Failure("rejected", False, "no")] * 9
        put = await client.put(sequence, Pages(FS))
        assert put.failures == (ChunkFailure(1, 7, "rejected"),)
        assert (put.written, put.failed) == (Tally(5, 256), Tally(1, 32))
        assert (await client.get(sequence)).hit_length == 96


# The draft margin and what the engine holds


async def test_a_draft_margin_is_needed_and_not_loaded() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48)], use_eagle=True)
    store = MemoryStore()
    async with client_of(store, layout) as client:
        sequence = client.sequence(range(64))
        assert (await client.put(sequence, Pages(layout))).written.chunks == 4
        hit = await client.lookup(sequence)
        assert hit.hit_length == 48
        assert indices(hit.load_masks) == [[0, 1, 2]]
        # One more block of tokens changes nothing: the margin behind 64 is not there.
        assert (await client.lookup(client.sequence(range(80)))).hit_length == 48
        await store.remove([key_of(client, sequence, 0, 3)])
        assert (await client.get(hit)).hit_length == 48  # the margin was there when it was asked for
        assert (await client.lookup(sequence)).hit_length == 32


async def test_a_resend_of_an_aligned_prompt_hits_under_a_draft_margin() -> None:
    layout = KVCacheLayout(
        [FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32)], use_eagle=True
    )
    async with client_of(MemoryStore(), layout, retention_interval=0) as client:
        sequence = client.sequence(range(128))
        await client.put(sequence, Pages(layout))
        assert client.plan_put(sequence).boundaries == (64, 96)
        assert (await client.lookup(sequence)).hit_length == 96
        got = await client.get(client.sequence([*range(128), *range(900, 940)]))
        assert got.hit_length == 96
        assert intact(got, layout)


async def test_a_margin_chunk_does_not_depend_on_later_tokens() -> None:
    """Prompts that part behind the margin share it."""
    layout = KVCacheLayout(
        [FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 8, page_size_bytes=32, eagle=True)]
    )
    assert layout.hash_block_size == 8
    async with client_of(MemoryStore(), layout) as client:
        await client.put(client.sequence(range(128)), Pages(layout))
        parted = client.sequence([*range(72), *range(500, 560)])  # the margin chunk of 64 ends at 72
        assert (await client.lookup(parted)).hit_length == 64


@pytest.mark.parametrize(
    ("local", "asked", "hit_length", "loads"),
    [
        (0, 3 + 3, 96, [[0, 1, 2], [11]]),
        (31, 3 + 3, 96, [[0, 1, 2], [11]]),
        (32, 2 + 2, 96, [[1, 2], [11]]),
        (70, 1 + 1, 96, [[2], [11]]),
        (96, 0, 96, [[], []]),
        (1000, 0, 96, [[], []]),
    ],
)
async def test_what_the_engine_holds_is_neither_asked_for_nor_loaded(
    local: int, asked: int, hit_length: int, loads: list[list[int]]
) -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        spy.calls.clear()
        hit = await client.lookup(sequence, local_tokens=local)
        assert (hit.hit_length, hit.keys_asked, indices(hit.load_masks)) == (hit_length, asked, loads)
        assert len(spy.keys_of("exists")) == asked
        got = await client.get(hit)
        assert got.hit_length == hit_length
        assert sorted(got.chunks) == [(group, chunk) for group, chunks in enumerate(loads) for chunk in chunks]


async def test_what_the_engine_holds_is_the_least_hit() -> None:
    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(range(100))
        for local, expected in ((0, 0), (33, 32), (95, 64), (100, 96)):
            hit = await client.lookup(sequence, local_tokens=local)
            assert (hit.hit_length, hit.local_tokens) == (expected, expected)
            assert (await client.get(hit)).hit_length == expected
        with pytest.raises(InvalidRequestError, match="local_tokens"):
            await client.lookup(sequence, local_tokens=-1)


async def test_what_the_engine_holds_makes_up_for_what_the_store_lost() -> None:
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        await store.remove([key_of(client, sequence, 0, 0)])
        assert (await client.lookup(sequence)).hit_length == 0
        hit = await client.lookup(sequence, local_tokens=32)
        assert hit.hit_length == 96
        await store.remove([key_of(client, sequence, 0, 2), key_of(client, sequence, 1, 7)])
        assert (await client.get(hit)).hit_length == 32


# Ranks, existence, removal


async def test_a_chunk_is_present_if_every_ranks_is() -> None:
    store = MemoryStore()
    ranks = [(0, 0, 0, 0), (1, 0, 0, 0)]

    def of_rank(tp: int) -> SparseStoreClient:
        return client_of(store, keys=KeySchema("m", tp_rank=tp, key_ranks=tuple(ranks)))

    async with of_rank(0) as zero, of_rank(1) as one, of_rank(7) as scheduler:
        tokens = range(100)
        put = await zero.put(zero.sequence(tokens), Pages(FS))
        assert put.written.chunks == 6
        assert all("@tp_rank:0@" in key for key in set(store.keys()))
        for client in (zero, one, scheduler):
            assert (await client.lookup(client.sequence(tokens))).hit_length == 0
            assert not any(mask.any() for mask in await client.exists(client.sequence(tokens)))
        assert (await zero.put(zero.sequence(tokens), Pages(FS))).existing.chunks == 6  # its own are there
        await one.put(one.sequence(tokens), Pages(FS))
        for client in (zero, one, scheduler):
            hit = await client.lookup(client.sequence(tokens))
            assert (hit.hit_length, hit.keys_asked) == (96, 12)
        assert (await one.get(one.sequence(tokens))).hit_length == 96
        # A scheduler's client has no chunks of its own: it may look up, and not get.
        with pytest.raises(InvalidRequestError, match="key_ranks"):
            await scheduler.get(hit)
        with pytest.raises(InvalidRequestError, match="key_ranks"):
            await scheduler.get(scheduler.sequence(tokens))
        # Nor does what it saw say anything of its own rank's keys.
        assert (await scheduler.put(scheduler.sequence(tokens), Pages(FS), hit=hit)).written.chunks == 6
        assert (await one.remove(one.sequence(tokens))).removed == 6
        assert (await zero.lookup(zero.sequence(tokens))).hit_length == 0
        assert sum("@tp_rank:0@" in key for key in set(store.keys())) == 6


async def test_the_chunks_that_exist_are_shown() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS, lacks=[(1, 7), (0, 1)]))
        spy.calls.clear()
        present = await client.exists(sequence)
        assert [len(mask) for mask in present] == [3, 12]
        assert all(mask.dtype == np.bool_ for mask in present)
        assert indices(present) == [[0, 2], [3, 11]]
        assert len(spy.keys_of("exists")) == 6
        odd = key_of(client, sequence, 1, 5)
        await spy.kept.put([PutItem(odd, (memoryview(b"what no boundary needs"),))])
        assert indices(await client.exists(sequence)) == [[0, 2], [3, 11]]
        spy.calls.clear()
        assert indices(await client.exists(sequence, all_chunks=True)) == [[0, 2], [3, 5, 11]]
        assert len(spy.keys_of("exists")) == 15
        assert [len(mask) for mask in await client.exists(client.sequence(range(5)))] == [0, 0]


async def test_removing_says_what_went() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        sequence, other = client.sequence(range(100)), client.sequence([*range(40), *range(500, 560)])
        await client.put(sequence, Pages(FS))
        await client.put(other, Pages(FS))
        removed = await client.remove(sequence)
        assert (removed.removed, removed.absent, removed.leased) == (6, 9, 0)
        # A shared prefix went with it: full 0 and window 3.
        assert indices(await client.exists(other)) == [[1, 2], [7, 11]]
        assert spy.count("force") == 0
        removed = await client.remove(other, force=True)
        assert (removed.removed, removed.absent) == (4, 11)
        assert spy.count("force") == 1
        assert spy.kept.keys() == ()
        again = await client.put(sequence, Pages(FS))
        assert again.written.chunks == 6


async def test_removing_tells_the_leased_ones() -> None:
    class Leasing(MemoryStore):
        async def remove(self, keys: Sequence[str], *, force: bool = False) -> list[RemoveOutcome]:
            there = await self.exists(keys)
            if force:
                return await super().remove(keys, force=True)
            return [RemoveOutcome.LEASED if found else RemoveOutcome.ABSENT for found in there]

    async with client_of(Leasing()) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        removed = await client.remove(sequence)
        assert (removed.removed, removed.absent, removed.leased) == (0, 9, 6)
        removed = await client.remove(sequence, force=True)
        assert (removed.removed, removed.absent, removed.leased) == (6, 9, 0)


# Keys and caches


async def test_a_fleet_running_vllm_can_read_what_was_put() -> None:
    """Keys and values from the published parts alone: no header, no namespace, one hash a common block."""
    store = MemoryStore()
    async with client_of(store, model_name="org/model", profile="vllm") as client:
        assert (client.hasher.algorithm, client.hasher.block_size) == ("sha256", 8)
        tokens = list(range(100))
        sequence = client.sequence(tokens, cache_salt="tenant")
        await client.put(sequence, Pages(FS))
        hashes = BlockHasher(8, "sha256").hash_blocks(tokens, extra_keys=[(("cache_salt", "tenant"),), *[None] * 11])
        schema = KeySchema.vllm("org/model")
        expected = {
            schema.key(group, hashes[(chunk + 1) * FS.groups[group].block_size // 8 - 1].hex()): page(
                group, chunk, FS.page_sizes[group]
            )
            for group, chunks in enumerate([[0, 1, 2], [3, 7, 11]])
            for chunk in chunks
        }
        assert dict(store._values) == expected
        some = schema.key(1, hashes[3].hex())
        assert some == f"org/model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:1@{hashes[3].hex()}"
        got = await client.get(sequence)
        assert got.hit_length == 96
        assert intact(got, FS)


async def test_what_vllm_wrote_is_found() -> None:
    store = MemoryStore()
    tokens = list(range(64))
    hashes = BlockHasher(16, "sha256").hash_blocks(tokens)
    for chunk, digest in enumerate(hashes):
        key = f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{digest.hex()}"
        await store.put([PutItem(key, (memoryview(page(0, chunk, 48)),))])
    async with client_of(store, F16, profile="vllm") as client:
        got = await client.get(client.sequence([*tokens, 1]))
        assert got.hit_length == 64
        assert intact(got, F16)


def two_clients(store: MemoryStore, layout: KVCacheLayout, ours: Any, theirs: Any) -> list[SparseStoreClient]:
    return [client_of(store, layout, **ours), client_of(store, layout, **theirs)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"dtype": "float8_e4m3fn"}),
        ({}, {"revision": "2"}),
        ({}, {"model_name": "n"}),
        ({}, {"value_format": "raw"}),
        ({}, {"hasher": BlockHasher(32, seed="x")}),
        ({}, {"hasher": BlockHasher(32, "sha256", seed="")}),
        ({}, {"profile": "vllm"}),
        ({}, {"keys": KeySchema("m", cache_prefix="p")}),
        ({}, {"keys": KeySchema("m", tp_rank=1)}),
        ({}, {"keys": KeySchema("m", namespace="@mine")}),
        ({}, {"layout": KVCacheLayout(FS.groups, hash_block_size=8)}),
        ({}, {"layout": KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64), FS.groups[1]][::-1])}),
        (
            {},
            {
                "layout": KVCacheLayout(
                    [FullAttentionSpec(32, page_size_bytes=128), SlidingWindowSpec(8, 8, page_size_bytes=32)]
                )
            },
        ),
        (
            {},
            {
                "layout": KVCacheLayout(
                    [FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 7, page_size_bytes=32)]
                )
            },
        ),
        ({"profile": "vllm"}, {"profile": "vllm", "hasher": BlockHasher(8, "sha256", seed="x")}),
        ({"profile": "vllm"}, {"profile": "vllm", "hasher": BlockHasher(8, "sha256_cbor")}),
    ],
)
async def test_caches_that_differ_never_meet(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    store = MemoryStore()
    other_layout = theirs.get("layout", FS)
    theirs = {name: value for name, value in theirs.items() if name != "layout"}
    async with client_of(store, **ours) as one, client_of(store, other_layout, **theirs) as two:
        await one.put(one.sequence(range(100)), Pages(FS))
        before = set(store.keys())
        hit = await two.lookup(two.sequence(range(100)))
        assert hit.hit_length == 0
        assert not any(mask.any() for mask in hit.present)
        put = await two.put(two.sequence(range(100)), Pages(other_layout))
        assert put.existing.chunks == 0
        assert len(store.keys()) == len(before) + put.written.chunks
        assert (await one.get(one.sequence(range(100)))).hit_length == 96
        assert (await two.get(two.sequence(range(100)))).hit_length == 96


@pytest.mark.parametrize(
    "theirs",
    [
        {"dtype": "float16"},
        {"revision": "2"},
        {"value_format": "raw"},
        {"hasher": BlockHasher(32, seed="x")},
        {"hasher": BlockHasher(32, "sha256", seed="")},
        {"layout": KVCacheLayout(FS.groups, hash_block_size=8)},
        {"layout": KVCacheLayout([FS.groups[0], SlidingWindowSpec(8, 9, page_size_bytes=32)])},
        {"layout": KVCacheLayout([FS.groups[0], SlidingWindowSpec(8, 8, page_size_bytes=33)])},
        {"layout": KVCacheLayout([FS.groups[0], SlidingWindowSpec(16, 8, page_size_bytes=32)])},
        {"layout": KVCacheLayout([FS.groups[0], ChunkedLocalAttentionSpec(8, 8, page_size_bytes=32)])},
        {"layout": KVCacheLayout([FS.groups[0]])},
    ],
)
def test_what_parts_a_cache_is_in_its_fingerprint(theirs: dict[str, Any]) -> None:
    layout = theirs.get("layout", FS)
    other = client_of(MemoryStore(), layout, **{name: value for name, value in theirs.items() if name != "layout"})
    one = client_of(MemoryStore())
    assert re.fullmatch("[0-9a-f]{16}", one.fingerprint)
    assert other.fingerprint != one.fingerprint
    assert one.keys.namespace == f"@fp:{one.fingerprint}"


@pytest.mark.parametrize(
    "theirs",
    [
        {"layout": KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64, name="other"), FS.groups[1]])},
        {"retention_interval": 0},
        {"timeout": 5.0},
        {"limits": Limits(max_batch_chunks=1)},
        {"keys": KeySchema("m", key_ranks=((0, 0, 0, 0),))},
        {"hasher": BlockHasher(32)},
    ],
)
async def test_what_is_no_part_of_a_cache_does_not_part_it(theirs: dict[str, Any]) -> None:
    store = MemoryStore()
    layout = theirs.get("layout", FS)
    theirs = {name: value for name, value in theirs.items() if name != "layout"}
    async with client_of(store) as one, client_of(store, layout, **theirs) as two:
        await one.put(one.sequence(range(100)), Pages(FS))
        assert two.fingerprint == one.fingerprint
        assert (await two.get(two.sequence(range(100)))).hit_length == 96


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({}, {"cache_salt": "a"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"lora": ("a", "/a")}),
        ({"lora": ("a", "/a")}, {"lora": ("a", "/b")}),
        ({"lora": ("a", "/a")}, {"lora": ("b", "/a")}),
        ({}, {"multimodal": [("image", 3, 5)]}),
        ({"multimodal": [("image", 3, 5)]}, {"multimodal": [("other", 3, 5)]}),
        ({"multimodal": [("image", 3, 5)]}, {"multimodal": [("image", 4, 5)]}),
        ({}, {"prompt_embeds": np.zeros((100, 4), np.float16)}),
        ({"prompt_embeds": np.zeros((100, 4), np.float16)}, {"prompt_embeds": np.ones((100, 4), np.float16)}),
    ],
)
async def test_sequences_that_differ_never_meet(a: dict[str, Any], b: dict[str, Any]) -> None:
    async with client_of(MemoryStore()) as client:
        await client.put(client.sequence(range(100), **a), Pages(FS))
        assert (await client.lookup(client.sequence(range(100), **a))).hit_length == 96
        hit = await client.lookup(client.sequence(range(100), **b))
        assert (hit.hit_length, hit.report.group_lengths[0]) == (0, 0)


async def test_an_image_late_in_the_prompt_leaves_what_is_before_it_shared() -> None:
    async with client_of(MemoryStore()) as client:
        await client.put(client.sequence(range(100), multimodal=[("image", 70, 9)]), Pages(FS))
        assert (await client.lookup(client.sequence(range(100), multimodal=[("other", 70, 9)]))).hit_length == 64
        assert (await client.lookup(client.sequence(range(100)))).hit_length == 64


SEQUENCE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"cache_salt": "tenant ä"},
    {"lora": ("name", "/path")},
    {"multimodal": [("image", 3, 5), ("image", 50, 40)]},
    {"prompt_embeds": np.arange(400, dtype=np.float32).reshape(100, 4)},
    {
        "cache_salt": "s",
        "lora": ("n", "/p"),
        "multimodal": [("i", 0, 1)],
        "prompt_embeds": np.ones((100, 2), np.float16),
    },
]
KEY_OPTIONS: list[Callable[[int], dict[str, Any]]] = [
    lambda _: {},
    lambda _: {"keys": KeySchema("m", cache_prefix="pre/fix", tp_rank=3, pcp_rank=1, dcp_rank=2, pp_rank=5)},
    lambda _: {"keys": KeySchema("m", namespace="@mine")},
    lambda _: {"keys": KeySchema.vllm("m", cache_prefix="x")},
    lambda _: {"keys": KeySchema("m", tp_rank=1, key_ranks=((1, 0, 0, 0),))},
    lambda _: {"model_name": "org/mödel", "dtype": "float16", "revision": "abc"},
    lambda _: {"value_format": "raw"},
    lambda _: {"profile": "vllm"},
    lambda _: {"profile": "vllm", "value_format": "framed"},
    lambda block: {"hasher": BlockHasher(block, "sha256")},
    lambda block: {"hasher": BlockHasher(block, "sha256_cbor", seed="7")},
    lambda block: {"hasher": BlockHasher(block, "xxhash", seed="secret")},
    lambda block: {"hasher": BlockHasher(block, "xxhash_cbor", seed="secret")},
    lambda block: {"hasher": BlockHasher(block, "sha256_packed", seed="seed")},
]
HASH_BLOCKS = [None, 8, 16]


@pytest.mark.parametrize("number", range(len(KEY_OPTIONS)))
@pytest.mark.parametrize("hash_block", HASH_BLOCKS)
async def test_whatever_was_put_is_found(number: int, hash_block: int | None) -> None:
    """One builder makes the keys that are written and those that are asked for, whatever enters them."""
    layout = KVCacheLayout(ALL_KINDS.groups, hash_block_size=hash_block)
    settings = KEY_OPTIONS[number](layout.hash_block_size)
    store = MemoryStore()
    for options in SEQUENCE_OPTIONS:
        async with client_of(store, layout, **settings) as writer:
            put = await writer.put(writer.sequence(list(range(100)), **options), Pages(layout))
            assert (put.existing.chunks, put.failures) == (0, ())
            expected = sum(int(mask.sum()) for mask in store_mask(layout, 96, num_prompt_tokens=100))
            assert put.written.chunks == expected
        async with client_of(store, layout, **settings) as reader:
            sequence = reader.sequence(np.arange(100, dtype=np.uint16), **options)
            got = await reader.get(sequence)
            assert (got.hit_length, got.failures) == (96, ())
            assert intact(got, layout)
            assert (await reader.put(sequence, Pages(layout))).existing == put.written
            removed = await reader.remove(sequence)
            assert removed.removed == expected
    assert store.keys() == ()


async def test_a_hit_of_another_sequence_is_refused() -> None:
    spy = Spy()
    async with client_of(spy) as client:
        hit = await client.lookup(client.sequence(range(100)))
        spy.calls.clear()
        for other in (
            client.sequence(range(1, 101)),
            client.sequence(range(100), cache_salt="a"),
            client.sequence(range(50)),
        ):
            with pytest.raises(InvalidRequestError, match="not of this sequence"):
                await client.put(other, Pages(FS), hit=hit)
        assert spy.calls == []
        grown = client.sequence(range(150))
        assert (await client.put(grown, Pages(FS), hit=hit)).written.chunks == 8


@pytest.mark.parametrize(
    "settings", [{"dtype": "float16"}, {"model_name": "n"}, {"keys": KeySchema("m", cache_prefix="p")}]
)
async def test_a_hit_of_another_cache_is_refused(settings: dict[str, Any]) -> None:
    async with client_of(MemoryStore()) as client, client_of(MemoryStore(), **settings) as other:
        hit = await other.lookup(other.sequence(range(100)))
        with pytest.raises(InvalidRequestError, match="cache"):
            await client.get(hit)
        with pytest.raises(InvalidRequestError, match="cache"):
            await client.put(client.sequence(range(100)), Pages(FS), hit=hit)


async def test_a_hit_of_another_layout_under_plain_keys_is_refused() -> None:
    """Plain keys say nothing of the layout, and bytes of a wrong chunk must not be handed over."""
    store = MemoryStore()
    wide = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=48)])
    async with client_of(store, F16, profile="vllm") as narrow, client_of(store, wide, profile="vllm") as other:
        sequence = narrow.sequence(range(100))
        await narrow.put(sequence, Pages(F16))
        hit = await narrow.lookup(sequence)
        assert hit.hit_length == 96
        with pytest.raises(InvalidRequestError):
            await other.get(hit)


async def test_a_sequence_of_another_hasher_is_refused() -> None:
    async with client_of(MemoryStore()) as client, client_of(MemoryStore(), profile="vllm") as other:
        for call in (client.lookup, client.exists, client.remove, client.get):
            with pytest.raises(InvalidRequestError, match="hashed by"):
                await call(other.sequence(range(100)))


# A store that does not answer


def down() -> StoreUnavailableError:
    return StoreUnavailableError("the master cannot be reached")


async def test_a_store_out_of_reach_raises() -> None:
    spy = Spy()
    async with client_of(spy, resilience=PLAIN) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence)
        spy.down = down()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: client.lookup(sequence),
            lambda: client.get(hit),
            lambda: client.get(sequence),
            lambda: client.put(client.sequence(range(128)), Pages(FS)),
            lambda: client.exists(sequence),
            lambda: client.remove(sequence),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError) as caught:
                await call()
            assert caught.value.retriable
        spy.down = None
        assert (await client.get(hit)).hit_length == 96


async def test_a_store_out_of_reach_may_count_as_empty() -> None:
    spy = Spy()
    async with client_of(spy, when_down="miss", resilience=PLAIN) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence)
        spy.down = down()
        nothing = await client.lookup(sequence, local_tokens=40)
        assert (nothing.hit_length, nothing.keys_asked) == (32, 0)
        assert (hit.answered, nothing.answered) == (True, False)
        assert indices(nothing.load_masks) == [[], []]
        assert (await client.get(nothing)).hit_length == 32
        got = await client.get(hit)
        assert (got.hit_length, got.chunks) == (0, {})
        assert set(got.failures) == {
            ChunkFailure(group, chunk, "unavailable") for group, chunk in [(0, 0), (0, 1), (0, 2), (1, 11)]
        }
        assert (await client.get(sequence)).hit_length == 0
        sink = {where: bytearray(FS.page_sizes[where[0]]) for where in [(0, 0), (0, 1), (0, 2), (1, 11)]}
        got = await client.get(hit, into=sink)
        assert (got.hit_length, got.chunks) == (0, {})
        assert [mask.any() for mask in await client.exists(sequence)] == [False, False]
        put = await client.put(client.sequence(range(500, 600)), Pages(FS))
        assert put.failed == Tally(6, 288)
        assert {failure.reason for failure in put.failures} == {"unavailable"}
        spy.down = StoreTimeoutError("too slow")
        put = await client.put(client.sequence(range(500, 600)), Pages(FS))
        assert {failure.reason for failure in put.failures} == {"timeout"}
        with pytest.raises(StoreTimeoutError):
            await client.remove(sequence)  # nobody may believe that something went
        spy.down = None
        assert (await client.get(hit)).hit_length == 96
        assert (await client.put(client.sequence(range(500, 600)), Pages(FS))).written.chunks == 6


async def test_errors_that_are_not_about_reach_raise_in_every_mode() -> None:
    spy = Spy()
    async with client_of(spy, when_down="miss") as client:
        spy.down = InvalidRequestError("a bug")
        for call in (client.lookup, client.exists, client.get):
            with pytest.raises(InvalidRequestError, match="a bug"):
                await call(client.sequence(range(100)))


async def test_a_call_ends_within_its_timeout() -> None:
    spy = Spy()
    async with client_of(spy, timeout=0.05, resilience=PLAIN) as client:
        sequence = client.sequence(range(100))
        spy.gate.clear()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: client.lookup(sequence),
            lambda: client.get(sequence),
            lambda: client.put(sequence, Pages(FS)),
            lambda: client.exists(sequence),
            lambda: client.remove(sequence),
        ]
        for call in calls:
            with pytest.raises(StoreTimeoutError, match=r"0\.05 s") as caught:
                await asyncio.wait_for(call(), 10)
            assert isinstance(caught.value, TimeoutError)
            assert caught.value.retriable
        spy.gate.set()
        assert (await client.put(sequence, Pages(FS))).written.chunks == 6


async def test_a_call_that_runs_out_of_time_may_count_as_a_miss() -> None:
    spy = Spy()
    async with client_of(spy, timeout=0.05, when_down="miss", resilience=PLAIN) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence)
        spy.gate.clear()
        assert (await client.lookup(sequence, local_tokens=32)).hit_length == 32
        assert not any(mask.any() for mask in await client.exists(sequence))
        got = await client.get(hit)
        assert (got.hit_length, got.chunks) == (0, {})
        assert {failure.reason for failure in got.failures} == {"timeout"}
        put = await client.put(client.sequence(range(500, 600)), Pages(FS))
        assert put.failed == Tally(6, 288)
        assert {failure.reason for failure in put.failures} == {"timeout"}
        with pytest.raises(StoreTimeoutError):
            await client.remove(sequence)  # nobody may believe that something went
        spy.gate.set()
        assert (await client.get(hit)).hit_length == 96


async def test_a_put_that_runs_out_of_time_says_what_was_written() -> None:
    class Slow(MemoryStore):
        async def put(self, items: Sequence[PutItem]) -> list[Failure | None]:
            if len(self.keys()) == 2:
                await asyncio.Event().wait()
            return await super().put(items)

    store = Slow()
    limits = Limits(max_batch_chunks=1, concurrency=1)
    async with client_of(store, limits=limits, timeout=0.3, resilience=PLAIN) as client:
        with pytest.raises(StoreTimeoutError, match=r"2 chunks were written, 4 were left or are not known"):
            await client.put(client.sequence(range(100)), Pages(FS))
        assert len(store.keys()) == 2


async def test_a_store_that_hangs_is_not_healthy() -> None:
    class Hung(MemoryStore):
        async def health(self) -> Health:
            await asyncio.Event().wait()
            raise AssertionError

    async with client_of(MemoryStore()) as client:
        assert await client.health() == Health(ok=True)
    async with client_of(Hung(), timeout=0.05) as client:
        health = await client.health()
        assert (health.ok, health.kind) == (False, "timeout")
        assert "0.05" in health.detail


# Leases


async def test_a_hit_older_than_the_lease_is_asked_again() -> None:
    spy = Spy(lease=0.02)
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence)
        await asyncio.sleep(0.03)
        spy.calls.clear()
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (96, ())
        needed = [(0, 0), (0, 1), (0, 2), (1, 11)]
        assert sorted(spy.keys_of("exists")) == sorted(key_of(client, sequence, *where) for where in needed)
        assert [name for name, _ in spy.calls] == ["exists", "get"]
        await spy.kept.remove([key_of(client, sequence, 0, 2)])
        spy.calls.clear()
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (64, ())  # it was known to be gone, and nobody tried
        assert key_of(client, sequence, 0, 2) not in spy.keys_of("get")
        assert intact(got, FS)


async def test_an_old_hits_draft_margin_is_asked_for_too() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=48)], use_eagle=True)
    spy = Spy(lease=0.02)
    async with client_of(spy, layout) as client:
        sequence = client.sequence(range(64))
        await client.put(sequence, Pages(layout))
        hit = await client.lookup(sequence)
        assert hit.hit_length == 48
        await spy.kept.remove([key_of(client, sequence, 0, 3)])
        await asyncio.sleep(0.03)
        assert (await client.get(hit)).hit_length == 32


@pytest.mark.parametrize("lease", [None, 1000.0])
async def test_a_fresh_hit_is_not_asked_again(lease: float | None) -> None:
    spy = Spy(lease=lease)
    async with client_of(spy) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence)
        spy.calls.clear()
        assert (await client.get(hit)).hit_length == 96
        assert [name for name, _ in spy.calls] == ["get"]


# Making a client


def test_a_layout_without_page_sizes_is_refused() -> None:
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=16), SlidingWindowSpec(16, 32, name="window")])
    with pytest.raises(InvalidLayoutError, match=r"page_size_bytes.*group 1 \(window\)"):
        client_of(MemoryStore(), layout)


def test_a_chunk_larger_than_the_store_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=rf"\b{64 + HEADER_SIZE}\b.*\b{63 + HEADER_SIZE}\b"):
        client_of(MemoryStore(63 + HEADER_SIZE))
    client_of(MemoryStore(64 + HEADER_SIZE))
    client_of(MemoryStore(64), value_format="raw")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"model_name": ""}, InvalidKeyError, "model_name"),
        ({"model_name": 7}, InvalidKeyError, "model_name"),
        ({"dtype": ""}, InvalidKeyError, "dtype"),
        ({"revision": None}, InvalidKeyError, "revision"),
        ({"profile": "sglang"}, ConfigError, "profile"),
        ({"value_format": "zip"}, ConfigError, "value_format"),
        ({"timeout": 0}, ConfigError, "timeout"),
        ({"timeout": -1.0}, ConfigError, "timeout"),
        ({"timeout": float("inf")}, ConfigError, "timeout"),
        ({"timeout": float("nan")}, ConfigError, "timeout"),
        ({"timeout": True}, ConfigError, "timeout"),
        ({"timeout": None}, ConfigError, "timeout"),
        ({"when_down": "ignore"}, ConfigError, "when_down"),
        ({"retention_interval": -32}, InvalidRetentionError, "-32"),
        ({"retention_interval": 33}, InvalidRetentionError, "32.*33.*argument"),
        ({"retention_interval": 1.5}, InvalidRetentionError, "retention_interval"),
        ({"hasher": BlockHasher(16)}, InvalidHasherError, "16.*32"),
        ({"keys": "m"}, InvalidKeyError, "KeySchema"),
        ({"keys": KeySchema("other")}, InvalidKeyError, "other"),
    ],
)
def test_settings_that_cannot_be_are_told_at_once(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        client_of(MemoryStore(), **settings)


@pytest.mark.parametrize("store", [None, {}, "127.0.0.1:50051", MemoryStore])
def test_what_is_no_store_is_refused(store: Any) -> None:
    with pytest.raises(ConfigError, match="Store"):
        client_of(store)


@pytest.mark.parametrize("name", ["max_batch_bytes", "max_batch_chunks", "concurrency", "requests_per_second"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "9"])
def test_limits_are_positive(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: value})


async def test_the_retention_comes_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**settings: Any) -> tuple[int | None, str]:
        client = SparseStoreClient(MemoryStore(), FS, model_name="m", **settings)
        return client.retention_interval, client.retention_origin

    ours, theirs = RETENTION_VARIABLES
    assert made() == (None, "default")
    monkeypatch.setenv(theirs, "64")
    assert made() == (64, theirs)
    monkeypatch.setenv(ours, "0")
    assert made() == (0, ours)
    assert made(retention_interval=96) == (96, "argument")
    assert made(retention_interval=None) == (None, "argument")
    for text in ("", "-1", "many", "1.5"):
        monkeypatch.setenv(ours, text)
        with pytest.raises(ConfigError, match=ours):
            made()
        assert made(retention_interval=0) == (0, "argument")
    monkeypatch.setenv(ours, "33")
    with pytest.raises(InvalidRetentionError, match=ours):
        made()


async def test_a_closed_client_says_so() -> None:
    store = MemoryStore()
    client = client_of(store)
    sequence = client.sequence(range(100))
    async with client:
        await client.put(sequence, Pages(FS))
        hit = await client.lookup(sequence)
    await client.aclose()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.lookup(sequence),
        lambda: client.get(hit),
        lambda: client.get(sequence),
        lambda: client.put(sequence, Pages(FS)),
        lambda: client.exists(sequence),
        lambda: client.remove(sequence),
        client.health,
        client.__aenter__,
    ]
    for call in calls:
        with pytest.raises(ClientClosedError, match="closed"):
            await call()
    # The store is the caller's: it stays open.
    assert len(store.keys()) == 6
    assert await store.health() == Health(ok=True)


async def test_a_client_that_is_not_opened_says_so() -> None:
    for client in (
        SparseStoreClient.connect(FS, model_name="m", master_server_address="127.0.0.1:1"),
        SparseStoreClient.local(FS, model_name="m"),
    ):
        sequence = client.sequence(range(100))  # needs no store
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda client=client, sequence=sequence: client.lookup(sequence),  # type: ignore[misc]
            lambda client=client, sequence=sequence: client.get(sequence),  # type: ignore[misc]
            lambda client=client, sequence=sequence: client.put(sequence, Pages(FS)),  # type: ignore[misc]
            lambda client=client, sequence=sequence: client.exists(sequence),  # type: ignore[misc]
            lambda client=client, sequence=sequence: client.remove(sequence),  # type: ignore[misc]
            client.health,
        ]
        for call in calls:
            with pytest.raises(ClientClosedError, match="async with"):
                await call()
        assert client.plan_put(sequence).end_token == 96
        await client.aclose()
        with pytest.raises(ClientClosedError, match="closed"):
            await client.lookup(sequence)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"master_server_adress": "127.0.0.1:1"}, "master_server_adress"),
        ({"master_server_address": "127.0.0.1"}, "host:port"),
        ({}, "MOONCAKE_MASTER"),
        ({"master_server_address": "127.0.0.1:1", "mode": "dummy"}, "dummy"),
        ({"master_server_address": "127.0.0.1:1", "global_segment_size": "1GB"}, "remote"),
        ({"master_server_address": "127.0.0.1:1", "protocol": "rdma"}, "rdma"),
    ],
)
async def test_connecting_with_settings_that_cannot_be_is_told(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        async with SparseStoreClient.connect(FS, model_name="m", **settings):
            pass


@pytest.mark.parametrize("size", ["1 parsec", -1, 1000, 1.5])
def test_a_local_segment_has_a_size(size: Any) -> None:
    with pytest.raises(ConfigError, match="segment_size"):
        SparseStoreClient.local(FS, model_name="m", segment_size=size)


async def test_a_long_prompt_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand tokens are hashed on another thread, once, and callers agree."""
    hashed: list[tuple[int, int]] = []
    hash_blocks = BlockHasher.hash_blocks

    def recorded(self: BlockHasher, token_ids: Any, **settings: Any) -> tuple[bytes, ...]:
        hashed.append((threading.get_ident(), len(token_ids)))
        return hash_blocks(self, token_ids, **settings)

    monkeypatch.setattr(BlockHasher, "hash_blocks", recorded)
    async with client_of(MemoryStore(), F16, profile="vllm") as client:
        sequence = client.sequence(range(100_000))
        hits = await asyncio.gather(*(client.lookup(sequence) for _ in range(4)))
        assert len({hit.block_hashes for hit in hits}) == 1
        assert len(hits[0].block_hashes) == 6250
        assert sum(count for _, count in hashed) == 100_000
        assert threading.get_ident() not in {thread for thread, _ in hashed}
        await client.lookup(client.sequence(range(100)))  # not worth a thread
        assert hashed[-1] == (threading.get_ident(), 96)


async def test_numbers_of_numpy_are_numbers() -> None:
    async with client_of(MemoryStore()) as client:
        sequence = client.sequence(np.arange(100))
        settings: dict[str, Any] = {
            "num_tokens": np.int64(100),
            "start_token": np.int32(0),
            "boundaries": np.array([64]),
        }
        assert (await client.put(sequence, Pages(FS), **settings)).written.chunks == 6
        local: Any = np.int64(32)
        assert (await client.lookup(sequence, local_tokens=local)).hit_length == 96


async def test_no_bytes_of_a_miss_are_handed_over() -> None:
    """A read that fails leaves what it left in a sink; the answer does not count it."""
    store = MemoryStore()
    async with client_of(store) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, Pages(FS))
        flip(store, key_of(client, sequence, 0, 0), -1)
        got = await client.get(sequence)
        assert (got.hit_length, got.chunks, got.loaded) == (0, {}, Tally())
        room = Room(key_of(client, sequence, 0, 0), 64 + HEADER_SIZE)
        assert await store.get([room.item]) == [None]  # it is there, and is not taken
