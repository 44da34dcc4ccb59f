"""Values that were flipped, cut, grown or swapped in the store: a get raises nothing and hands out no wrong byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_sparse_client import (
    FullAttentionSpec,
    KVCacheLayout,
    MemoryStore,
    SlidingWindowSpec,
    SparseStoreClient,
)
from mooncake_sparse_client.core.framing import HEADER_SIZE
from mooncake_sparse_client.core.keys import KeySchema
from mooncake_sparse_client.errors import InvalidRequestError

LAYOUT = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=64), SlidingWindowSpec(8, 16, page_size_bytes=64)])
REASONS = {"header", "version", "fingerprint", "group", "length", "name", "checksum", "missing"}
#: From a store's values and the keys, what becomes of one of them; None: it is removed.
Damage: TypeAlias = Callable[[bytes, bytes], "bytes | None"]


def page(group: int, chunk: int) -> bytes:
    return random.Random(f"{group}/{chunk}").randbytes(LAYOUT.page_sizes[group])


def flipped(position: int, change: int) -> Damage:
    return lambda value, _: bytes(
        byte ^ change if place == position % len(value) else byte for place, byte in enumerate(value)
    )


def patched(position: int, patch: bytes) -> Damage:
    return lambda value, _: (value[:position] + patch + value[position + len(patch) :])[: len(value)]


DAMAGES = st.one_of(
    st.builds(flipped, st.integers(0, 200), st.integers(1, 255)),
    st.builds(patched, st.integers(0, HEADER_SIZE), st.binary(min_size=1, max_size=12)),
    st.integers(1, 120).map(lambda length: lambda value, _: value[:length]),
    st.binary(min_size=1, max_size=90).map(lambda more: lambda value, _: value + more),
    st.binary(min_size=1, max_size=200).map(lambda noise: lambda _, __: noise),
    st.binary(min_size=128, max_size=128).map(lambda noise: lambda _, __: noise),
    st.binary(min_size=64, max_size=64).map(lambda noise: lambda value, _: value[:HEADER_SIZE] + noise),
    st.just(lambda _, other: other),
    st.just(lambda value, other: value[:HEADER_SIZE] + other[HEADER_SIZE:]),
    st.just(lambda value, other: other[:HEADER_SIZE] + value[HEADER_SIZE:]),
    st.just(lambda _, __: None),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 1 << 16), DAMAGES), min_size=1, max_size=4))
def test_whatever_became_of_the_values_no_wrong_byte_is_read(damages: list[tuple[int, int, Damage]]) -> None:
    asyncio.run(read_after(damages))


async def read_after(damages: list[tuple[int, int, Damage]]) -> None:
    store = MemoryStore()
    async with SparseStoreClient(store, LAYOUT, model_name="m") as writer:
        await writer.put(writer.sequence(range(160)), page)
    keys = store.keys()
    for number, other, damage in damages:
        key = keys[number % len(keys)]
        value = store._values.get(key, b"?")
        new = damage(value, store._values.get(keys[other % len(keys)], b"??"))
        if new is None:
            store._values.pop(key, None)
        else:
            store._values[key] = new
    async with SparseStoreClient(store, LAYOUT, model_name="m") as reader:
        sequence = reader.sequence(range(161))
        hit = await reader.lookup(sequence)
        got = await reader.get(hit)
        assert got.hit_length <= hit.hit_length
        assert {failure.reason for failure in got.failures} <= REASONS
        for (group, chunk), memory in got.chunks.items():
            assert bytes(memory) == page(group, chunk)
        assert (got.hit_length < hit.hit_length) is bool(got.failures)
        # A put heals what was found damaged; in a few turns all of it, since a get stops where it cannot go on.
        for _ in range(len(damages) + 2):
            await reader.put(sequence, page)
            got = await reader.get(sequence)
        assert (got.hit_length, got.failures) == (160, ())


async def test_clearing_takes_the_whole_cache_and_no_other() -> None:
    store = MemoryStore()
    ranks = ((0, 0, 0, 0), (1, 0, 0, 0))
    others = [
        SparseStoreClient(store, LAYOUT, model_name="m.x"),
        SparseStoreClient(store, LAYOUT, model_name="mm"),
        SparseStoreClient(store, LAYOUT, model_name="m", dtype="float16"),
        SparseStoreClient(store, LAYOUT, model_name="m", keys=KeySchema("m", cache_prefix="m")),
        SparseStoreClient(store, LAYOUT, model_name="m", profile="vllm"),
    ]
    own = [
        SparseStoreClient(store, LAYOUT, model_name="m", keys=KeySchema("m", tp_rank=rank[0], key_ranks=ranks))
        for rank in ranks
    ]
    for client in (*others, *own):
        await client.put(client.sequence(range(160)), page)
    before = set(store.keys())
    mine = {key for key in before if key.startswith(own[0].keys.cache_id + "@")}
    assert await own[0].clear() == len(mine) > 0
    assert set(store.keys()) == before - mine
    assert (await own[1].lookup(own[1].sequence(range(160)))).hit_length == 0
    assert await own[0].clear(force=True) == 0
    for client in others:
        assert (await client.get(client.sequence(range(161)))).hit_length == 160


async def test_what_is_known_to_be_wrong_is_forgotten_with_it() -> None:
    store = MemoryStore()
    async with SparseStoreClient(store, LAYOUT, model_name="m") as client:
        sequence = client.sequence(range(161))
        await client.put(sequence, page)
        good = dict(store._values)
        for key, value in good.items():
            store._values[key] = value[:-1] + bytes([value[-1] ^ 1])
        assert (await client.get(sequence)).hit_length == 0
        assert (await client.lookup(sequence)).hit_length == 0  # known to be damaged
        assert await client.clear() == len(good)
        store._values.update(good)  # as another client would
        assert (await client.get(sequence)).hit_length == 160


async def test_keys_that_others_share_are_not_cleared() -> None:
    store = MemoryStore()
    async with SparseStoreClient(store, LAYOUT, model_name="m", profile="vllm") as client:
        await client.put(client.sequence(range(160)), page)
        before = store.keys()
        with pytest.raises(InvalidRequestError, match="no namespace"):
            await client.clear(force=True)
        assert store.keys() == before
