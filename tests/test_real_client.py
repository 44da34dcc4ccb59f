"""SparseStoreClient over a real Mooncake: every kind of group, damage, other processes, and what it starts."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
import pytest
from store_contract import Room, value

from mooncake_sparse_client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KeySchema,
    KVCacheLayout,
    Limits,
    LocalMooncake,
    MambaSpec,
    MooncakeStore,
    SlidingWindowSpec,
    SparseStoreClient,
    layout_for,
)
from mooncake_sparse_client.core.framing import HEADER_SIZE
from mooncake_sparse_client.core.results import ChunkFailure, Health
from mooncake_sparse_client.errors import ClientClosedError, ConfigError

MIB = 1 << 20
FS = KVCacheLayout([FullAttentionSpec(32, page_size_bytes=6400), SlidingWindowSpec(8, 8, page_size_bytes=3200)])
ALL_KINDS = KVCacheLayout(
    [
        FullAttentionSpec(32, page_size_bytes=70_000),
        SlidingWindowSpec(8, 20, page_size_bytes=3200),
        ChunkedLocalAttentionSpec(16, 64, page_size_bytes=4001),
        MambaSpec(32, page_size_bytes=300_000),
    ]
)
LAYOUTS = {
    "all kinds": ALL_KINDS,
    "draft layers": KVCacheLayout(FS.groups, use_eagle=True),
    "window alone": layout_for("mistral", scale=0.002),
    "full": layout_for("llama", scale=0.01),
    "full and window": layout_for("gpt-oss", scale=0.01),
    "gemma": layout_for("gemma-3", scale=0.005),
    "chunked local": layout_for("llama-4", scale=0.005),
    "four groups": layout_for("deepseek-v4", scale=0.0005),
    "recurrent": layout_for("jamba", scale=0.05),
}


def page(group: int, chunk: int, nbytes: int) -> bytes:
    return random.Random(f"{group}/{chunk}").randbytes(nbytes)


def source_for(layout: KVCacheLayout) -> Any:
    return lambda group, chunk: page(group, chunk, layout.page_sizes[group])


def intact(got: Any, layout: KVCacheLayout) -> bool:
    return all(
        bytes(view) == page(where[0], where[1], layout.page_sizes[where[0]]) for where, view in got.chunks.items()
    )


def key_of(client: SparseStoreClient, sequence: Any, group: int, chunk: int) -> str:
    from mooncake_sparse_client import chunk_name

    name = chunk_name(client.layout, sequence.block_hashes, group, chunk)
    assert name is not None
    return client.keys.key(group, name)


def client_of(store: MooncakeStore, layout: KVCacheLayout, model_name: str, **settings: Any) -> SparseStoreClient:
    return SparseStoreClient(store, layout, model_name=model_name, **{"retention_interval": None, **settings})


async def children() -> set[psutil.Process]:
    return await asyncio.to_thread(lambda: set(psutil.Process().children(recursive=True)))


async def round_trip(client: SparseStoreClient, layout: KVCacheLayout, tokens: int = 1100) -> None:
    """Put, look up, read with and without a sink, and remove; every byte is compared."""
    sequence = client.sequence(np.arange(tokens))
    assert (await client.lookup(sequence)).hit_length == 0
    put = await client.put(sequence, source_for(layout), confirm=True)
    assert put.written.chunks > 0
    assert (put.existing.chunks, put.failures) == (0, ())
    expected = (tokens - 1) // layout.alignment * layout.alignment - (layout.alignment if layout.use_eagle else 0)
    hit = await client.lookup(sequence)
    assert hit.hit_length == expected
    got = await client.get(hit)
    assert (got.hit_length, got.failures) == (expected, ())
    assert sorted(got.chunks) == [
        (group, chunk) for group, mask in enumerate(hit.load_masks) for chunk in np.flatnonzero(mask).tolist()
    ]
    assert intact(got, layout)
    # Into the caller's memory, each chunk in two pieces and two thirds of a page apart.
    memory = {where: bytearray(len(view)) for where, view in got.chunks.items()}
    sink = {
        where: [memoryview(room)[: len(room) // 3], memoryview(room)[len(room) // 3 :]]
        for where, room in memory.items()
    }
    got = await client.get(hit, into=sink)
    assert (got.hit_length, got.failures, got.chunks) == (expected, (), {})
    assert all(bytes(room) == page(where[0], where[1], len(room)) for where, room in memory.items())
    again = await client.put(sequence, source_for(layout))
    assert (again.written.chunks, again.existing) == (0, put.written)
    removed = await client.remove(sequence, force=True)
    assert removed.removed == put.written.chunks
    assert (await client.lookup(sequence)).hit_length == 0


@pytest.mark.parametrize("name", LAYOUTS)
async def test_a_round_trip_of_every_kind_of_layout(mooncake_store: MooncakeStore, fresh: str, name: str) -> None:
    layout = LAYOUTS[name]
    async with client_of(mooncake_store, layout, fresh) as client:
        await round_trip(client, layout)


@pytest.mark.parametrize(
    "settings",
    [
        {"profile": "vllm"},
        {"value_format": "raw"},
        {"limits": Limits(max_batch_bytes=1, concurrency=4)},
        {"limits": Limits(max_batch_chunks=3, max_batch_keys=5, concurrency=1)},
        {"retention_interval": 64},
    ],
    ids=["vllm", "raw", "a chunk a batch", "small batches", "sparse"],
)
async def test_a_round_trip_with_every_setting(
    mooncake_store: MooncakeStore, fresh: str, settings: dict[str, Any]
) -> None:
    async with client_of(mooncake_store, ALL_KINDS, fresh, **settings) as client:
        await round_trip(client, ALL_KINDS, tokens=300)


async def test_many_callers_at_once(mooncake_store: MooncakeStore, fresh: str) -> None:
    async with client_of(mooncake_store, FS, fresh) as client:

        async def user(number: int) -> None:
            sequence = client.sequence([*range(40), *([number % 5] * (60 + number))])
            hit = await client.lookup(sequence)
            put = await client.put(sequence, source_for(FS), hit=hit)
            assert put.failures == ()
            got = await client.get(sequence)
            assert (got.hit_length, got.failures) == ((len(sequence) - 1) // 32 * 32, ())
            assert intact(got, FS)

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(user(number))


@pytest.mark.parametrize("where", [(0, 1), (1, 11)])
async def test_a_flipped_byte_is_a_miss_until_the_next_put_heals_it(
    mooncake_store: MooncakeStore, fresh: str, where: tuple[int, int]
) -> None:
    async with client_of(mooncake_store, FS, fresh) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        key, nbytes = key_of(client, sequence, *where), FS.page_sizes[where[0]] + HEADER_SIZE
        room = Room(key, nbytes)
        assert await mooncake_store.get([room.item]) == [None]
        damaged = bytearray(room.content)
        damaged[-5] ^= 1
        assert await mooncake_store.put([value(key, bytes(damaged), replace=True)]) == [None]
        shorter = {(0, 1): 32, (1, 11): 64}[where]
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (shorter, (ChunkFailure(*where, "checksum"),))
        assert intact(got, FS)
        assert (await client.lookup(sequence)).hit_length == shorter
        put = await client.put(sequence, source_for(FS))
        assert (put.written.chunks, put.existing.chunks) == (1, 5)
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (96, ())
        assert intact(got, FS)


async def test_a_value_of_another_length_heals_as_well(mooncake_store: MooncakeStore, fresh: str) -> None:
    async with client_of(mooncake_store, FS, fresh) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        for other in (b"short", bytes(20_000)):
            key = key_of(client, sequence, 0, 2)
            assert await mooncake_store.put([value(key, other, replace=True)]) == [None]
            got = await client.get(sequence)
            assert (got.hit_length, got.failures) == (64, (ChunkFailure(0, 2, "length"),))
            assert (await client.put(sequence, source_for(FS))).written.chunks == 1
            got = await client.get(sequence)
            assert got.hit_length == 96
            assert intact(got, FS)


async def test_a_chunk_that_goes_while_it_is_read_shortens_the_hit(mooncake_store: MooncakeStore, fresh: str) -> None:
    async with client_of(mooncake_store, FS, fresh) as client:
        sequence = client.sequence(range(129))
        await client.put(sequence, source_for(FS))
        hit = await client.lookup(sequence)
        await mooncake_store.remove([key_of(client, sequence, 0, 3)], force=True)
        got = await client.get(hit)
        assert (got.hit_length, got.failures) == (96, (ChunkFailure(0, 3, "missing"),))
        assert intact(got, FS)


async def test_what_a_reader_was_shown_is_leased(mooncake_store: MooncakeStore, fresh: str) -> None:
    async with client_of(mooncake_store, FS, fresh) as client:
        sequence = client.sequence(range(100))
        await client.put(sequence, source_for(FS))
        assert (await client.lookup(sequence)).hit_length == 96
        removed = await client.remove(sequence)
        assert removed.leased == 6
        assert (await client.get(sequence)).hit_length == 96
        removed = await client.remove(sequence, force=True)
        assert (removed.removed, removed.absent, removed.leased) == (6, 9, 0)


async def test_values_for_vllm_are_the_bytes_and_nothing_else(mooncake_store: MooncakeStore, fresh: str) -> None:
    async with client_of(mooncake_store, FS, fresh, profile="vllm") as client:
        sequence = client.sequence(range(100))

        def halves(group: int, chunk: int) -> list[memoryview]:
            whole = memoryview(page(group, chunk, FS.page_sizes[group]))
            return [whole[:100], whole[100:]]

        await client.put(sequence, halves)
        for group, chunk in [(0, 0), (0, 2), (1, 11)]:
            key = KeySchema.vllm(fresh).key(group, sequence.block_hashes[(chunk + 1) * [4, 1][group] - 1].hex())
            room = Room(key, FS.page_sizes[group])
            assert await mooncake_store.get([room.item]) == [None]
            assert room.content == page(group, chunk, FS.page_sizes[group])


# What a client opens by itself


async def test_a_client_may_bring_its_own_mooncake(native_library: None) -> None:
    before = await children()
    client = SparseStoreClient.local(ALL_KINDS, model_name="m", segment_size="64MB", retention_interval=None)
    with pytest.raises(ClientClosedError, match="async with"):
        await client.lookup(client.sequence(range(10)))
    async with client:
        assert await client.health() == Health(ok=True)
        assert await children() > before
        await round_trip(client, ALL_KINDS, tokens=300)
    assert await children() <= before
    with pytest.raises(ClientClosedError, match="closed"):
        await client.health()


async def test_a_chunk_larger_than_the_segment_is_told_and_leaves_nothing(native_library: None) -> None:
    before = await children()
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=20 * MIB)])
    with pytest.raises(ConfigError, match=rf"\b{20 * MIB + HEADER_SIZE}\b.*\b{16 * MIB}\b"):
        async with SparseStoreClient.local(layout, model_name="m", segment_size="16MB"):
            pass
    assert await children() <= before


async def test_a_full_store_makes_room(native_library: None) -> None:
    """Four times what fits is put: eviction lags behind, and nothing fails for it."""
    layout = KVCacheLayout([FullAttentionSpec(16, page_size_bytes=1 << 20)])
    async with SparseStoreClient.local(layout, model_name="m", segment_size="32MB", retention_interval=None) as client:
        for prompt in range(10):
            sequence = client.sequence(range(1000 * prompt, 1000 * prompt + 192))
            put = await client.put(sequence, lambda group, chunk: bytes([chunk]) * (1 << 20))
            assert (put.written.chunks, put.failures) == (12, ())
        assert (await client.get(sequence)).hit_length == 176


def remote_client(master: LocalMooncake, model_name: str) -> SparseStoreClient:
    """A client over the network, of an address that an argument names."""
    return SparseStoreClient.connect(
        ALL_KINDS, model_name=model_name, master_server_address=master.master_address, retention_interval=None
    )


async def test_a_round_trip_over_the_network(serving_master: LocalMooncake, fresh: str) -> None:
    async with remote_client(serving_master, fresh) as client:
        await round_trip(client, ALL_KINDS, tokens=500)
        assert await client.health() == Health(ok=True)


FINDS = """
import asyncio, os, random, sys
from mooncake_sparse_client import *

layout = KVCacheLayout([
    FullAttentionSpec(32, page_size_bytes=70_000),
    SlidingWindowSpec(8, 20, page_size_bytes=3200, name="named differently"),
    ChunkedLocalAttentionSpec(16, 64, page_size_bytes=4001),
    MambaSpec(32, page_size_bytes=300_000),
])

async def main():
    async with SparseStoreClient.connect(layout, model_name=sys.argv[1], retention_interval=0) as client:
        sequence = client.sequence(list(range(300)), cache_salt="shared")
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (288, ()), got
        for (group, chunk), view in got.chunks.items():
            assert bytes(view) == random.Random(f"{group}/{chunk}").randbytes(len(view))
        other = await client.lookup(client.sequence(list(range(300)), cache_salt="another"))
        assert other.hit_length == 0
        sequence.extend(range(300, 420))
        put = await client.put(
            sequence, lambda group, chunk: random.Random(f"{group}/{chunk}").randbytes(layout.page_sizes[group])
        )
        print("found", got.loaded.chunks, put.existing.chunks > 0, put.written.chunks > 0)

asyncio.run(main())
"""


async def test_another_process_finds_what_this_one_wrote(serving_master: LocalMooncake, fresh: str) -> None:
    environment = {
        **os.environ,
        "MOONCAKE_MASTER": serving_master.master_address,
        "PYTHONHASHSEED": "11",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    async with remote_client(serving_master, fresh) as client:
        sequence = client.sequence(range(300), cache_salt="shared")
        put = await client.put(sequence, source_for(ALL_KINDS))
        assert put.failures == ()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", FINDS, fresh),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        hit = await client.lookup(sequence)
        loads = sum(int(mask.sum()) for mask in hit.load_masks)
        assert out.decode().split() == ["found", str(loads), "True", "True"]
        # And this one finds what that one added.
        sequence.extend(range(300, 420))
        got = await client.get(sequence)
        assert (got.hit_length, got.failures) == (416, ())
        assert intact(got, ALL_KINDS)
